"""Every error the package raises on purpose.

NVMeCacheError
├── ConfigurationError      (ValueError)    an argument that cannot work
├── OffloadDirectoryError   (OSError)       the folder for shards is missing, not a folder, or not writable
├── StorageFullError        (OSError)       the drive, or the disk budget, has no room for the next shard
├── ShardCorruptedError     (OSError)       a shard read back is missing, short, or fails its checksum
├── ShardIOError            (OSError)       the drive refused a read or a write
├── SnapshotCorruptedError  (OSError)       a snapshot is missing, incomplete or not what was written
├── SnapshotIOError         (OSError)       where a snapshot is kept cannot be reached, or refused
├── SnapshotMismatchError   (ValueError)    a snapshot is of another model, dtype, layer kind or version
├── CacheMisuseError        (RuntimeError)  a call that would produce wrong text if it went through
└── CacheClosedError        (RuntimeError)  the cache was closed before this call
"""


class NVMeCacheError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(NVMeCacheError, ValueError):
    """An argument has a value that cannot work; the message names it and what would."""


class OffloadDirectoryError(NVMeCacheError, OSError):
    """The folder that should hold the shards is missing, not a folder, or not writable."""


class StorageFullError(NVMeCacheError, OSError):
    """The drive or the disk budget has no room for the next shard. Nothing is lost: free space and call again."""


class ShardCorruptedError(NVMeCacheError, OSError):
    """A shard read back is missing, shorter than it was written, or fails its checksum."""


class ShardIOError(NVMeCacheError, OSError):
    """The drive refused a read or a write of a shard."""


class SnapshotCorruptedError(NVMeCacheError, OSError):
    """There is no snapshot where there should be one, or a file of it is missing, short or not what was written."""


class SnapshotIOError(NVMeCacheError, OSError):
    """The object store or server that keeps a snapshot cannot be reached, or refused a read or a write."""


class SnapshotMismatchError(NVMeCacheError, ValueError):
    """A snapshot is of another model, dtype, layer kind or version; the message says in what it differs."""


class CacheMisuseError(NVMeCacheError, RuntimeError):
    """A call that would silently produce wrong text if it went through."""


class CacheClosedError(NVMeCacheError, RuntimeError):
    """The cache was closed: its shards are gone."""
