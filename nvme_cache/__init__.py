"""A transformers KV cache that pages to NVMe, exactly."""

from .cache import OffloadedNVMeCache
from .errors import (
    CacheClosedError,
    CacheMisuseError,
    ConfigurationError,
    NVMeCacheError,
    OffloadDirectoryError,
    ShardCorruptedError,
    ShardIOError,
    StorageFullError,
)
from .integration import Switch, enable

__all__ = [
    "CacheClosedError",
    "CacheMisuseError",
    "ConfigurationError",
    "NVMeCacheError",
    "OffloadDirectoryError",
    "OffloadedNVMeCache",
    "ShardCorruptedError",
    "ShardIOError",
    "StorageFullError",
    "Switch",
    "enable",
]
