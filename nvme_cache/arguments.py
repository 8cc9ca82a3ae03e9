"""What a cache may be given: each argument checked, and errors that name it, its value and the remedy."""

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
import torch
from accelerate.utils import convert_file_size_to_int

from .cgroup import memory_limit
from .errors import ConfigurationError

if TYPE_CHECKING:  # importing it would start the compiler
    from transformers import PreTrainedModel

_AUTO_HOST_SHARE = 0.5  # of the memory available at construction: the model's own peaks need the rest


def check_at_least(name: str, value: object, least: int) -> None:
    """Raises `ConfigurationError` unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r} must be a whole number of at least {least}")


def parse_count(name: str, value: object, least: int) -> int | None:
    """A whole number of at least `least`; None for "auto". Raises `ConfigurationError` for anything else."""
    if value == "auto":
        return None
    check_at_least(name, value, least)
    return cast(int, value)


def parse_folder(value: str | os.PathLike[str] | None) -> Path | None:
    """The folder named; None for the default. Raises `ConfigurationError` if the name is empty."""
    if value is not None and not os.fspath(value):
        raise ConfigurationError(f"offload_dir={value!r} names no folder; pass one on a fast drive, or None")
    return None if value is None else Path(value)


def parse_size(name: str, value: object) -> int:
    """Bytes, from a number of them or from text such as "8GiB". Raises `ConfigurationError` for anything else."""
    remedy = 'pass bytes as a whole number of at least 0, or text such as "8GiB" or "500MB"'
    if isinstance(value, str):
        try:
            value = int(value) if value.isdecimal() else convert_file_size_to_int(value)
        except ValueError as error:
            raise ConfigurationError(f"{name}={value!r} is no size; {remedy}") from error
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"{name}={value!r} is no size; {remedy}")
    return value


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The floating-point dtype called `name`; None for the default. Raises `ConfigurationError` for anything else."""
    dtype = None if name is None else getattr(torch, name, None)
    if name is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ConfigurationError(f'dtype={name!r} is none that models compute in; pass "bfloat16", "float16" or "float32"')


def parse_rate(name: str, value: str) -> int:
    """Bytes per second, from text such as "7GB/s". Raises `ConfigurationError` for anything else, and for 0."""
    try:
        rate = convert_file_size_to_int(value.removesuffix("/s"))
    except ValueError as error:
        raise ConfigurationError(f'{name}={value!r} is no rate; pass text such as "7GB/s" or "500MB/s"') from error
    if not rate:
        raise ConfigurationError(f"{name}={value!r} must be more than nothing")
    return int(rate)


def parse_host_budget(value: object) -> int:
    """As `parse_size`; "auto" is a share of the memory that the machine, or the container, has left now."""
    if value == "auto":
        available, limit = psutil.virtual_memory().available, memory_limit()
        if limit is not None:
            available = min(available, max(0, limit.limit_bytes - limit.used_bytes))
        return int(available * _AUTO_HOST_SHARE)
    return parse_size("host_budget", value)


def cache_argument(model: "PreTrainedModel") -> str:
    """What this transformers calls the cache: `cache` since 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
