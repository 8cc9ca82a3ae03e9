"""What a cache may be given: each argument checked, and errors that name it, its value and the remedy."""

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from .cgroup import available_bytes
from .errors import ConfigurationError
from .units import parse_size

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


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The floating-point dtype called `name`; None for the default. Raises `ConfigurationError` for anything else."""
    dtype = None if name is None else getattr(torch, name, None)
    if name is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ConfigurationError(f'dtype={name!r} is none that models compute in; pass "bfloat16", "float16" or "float32"')


def parse_host_budget(value: object) -> int:
    """As `parse_size`; "auto" is a share of the memory that the machine, or the container, has left now."""
    if value == "auto":
        return int(available_bytes() * _AUTO_HOST_SHARE)
    return parse_size("host_budget", value)


def cache_argument(model: "PreTrainedModel") -> str:
    """What this transformers calls the cache: `cache` since 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
