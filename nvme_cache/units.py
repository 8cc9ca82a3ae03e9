"""Sizes and rates as people write them."""

from accelerate.utils import convert_file_size_to_int

from .errors import ConfigurationError


def parse_size(name: str, value: object) -> int:
    """Bytes, from a number of them or from text such as "8GiB". Raises `ConfigurationError` for anything else."""
    remedy = 'pass bytes as a whole number of at least 0, or text such as "8GiB" or "500MB"'
    if isinstance(value, str):
        try:
            value = int(value) if value.isdecimal() else _bytes_in(value)
        except ValueError as error:
            raise ConfigurationError(f"{name}={value!r} is no size; {remedy}") from error
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"{name}={value!r} is no size; {remedy}")
    return value


def parse_rate(name: str, value: str) -> int:
    """Bytes per second, from text such as "7GB/s". Raises `ConfigurationError` for anything else, and for 0."""
    try:
        rate = _bytes_in(value.removesuffix("/s"))
    except ValueError as error:
        raise ConfigurationError(f'{name}={value!r} is no rate; pass text such as "7GB/s" or "500MB/s"') from error
    if not rate:
        raise ConfigurationError(f"{name}={value!r} must be more than nothing")
    return rate


def in_bytes(nbytes: float) -> str:
    """Bytes for people, in decimal units, as drives and links are sold."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _bytes_in(text: str) -> int:
    if text.endswith("b"):
        raise ValueError(f"{text} is a number of bits")
    for unit, smaller, factor in (("TIB", "GIB", 1024), ("TB", "GB", 1000)):
        if text.upper().endswith(unit):
            return factor * int(convert_file_size_to_int(text[: -len(unit)] + smaller))
    return int(convert_file_size_to_int(text))
