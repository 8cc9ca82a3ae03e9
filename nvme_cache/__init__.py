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
    SnapshotCorruptedError,
    SnapshotIOError,
    SnapshotMismatchError,
    StorageFullError,
)
from .integration import Switch, enable
from .quantization import QuantizationConfig
from .snapshots import SnapshotStore

__all__ = [
    "CacheClosedError",
    "CacheMisuseError",
    "ConfigurationError",
    "NVMeCacheError",
    "OffloadDirectoryError",
    "OffloadedNVMeCache",
    "QuantizationConfig",
    "ShardCorruptedError",
    "ShardIOError",
    "SnapshotCorruptedError",
    "SnapshotIOError",
    "SnapshotMismatchError",
    "SnapshotStore",
    "StorageFullError",
    "Switch",
    "enable",
]
