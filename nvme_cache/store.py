"""The folder shards live in: creation, permissions, lock, quota, orphans, deletion.

Each store makes its own 0700 folder inside the offload folder and holds a lock in it for as long as it lives. A
folder of ours whose lock nobody holds belongs to a process that died; whoever opens a store next removes it. The order
of steps closes the race between the two: a new folder counts only once its lock is held on the file that is still in
place, and an orphan is renamed, its lock held, before anything in it is deleted. Only files of the names that a store
gives are deleted.

A shard that nothing refers to any more leaves a *free file*, which the next shard of its size overwrites: that is
faster than making a new one. Live shards and free files together never take more bytes than live shards once did, so
free files stay within the disk budget by themselves.
"""

import fcntl
import logging
import math
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

import psutil

from . import io
from .drive import TEST_BYTES, Drive, drive_of
from .errors import NVMeCacheError, OffloadDirectoryError, StorageFullError
from .shards import Sections, Shard

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"nvme-cache-(\d+|removing)-[a-z0-9_]{8}")
_SNAPSHOT_FILES = ("states-*.safetensors", "manifest.json", "manifest-*.partial", "in-use.lock", "saving.lock")
# Free files come after those that a finalizer in another thread may turn into them while they are being deleted; the
# lock comes last: without it the folder may go at any moment.
_FILES = (*_SNAPSHOT_FILES, "layer-*.safetensors", "layer-*.partial", "layer-*.free", "probe", "lock")
_LOCK = "lock"
RAM_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
_SPARE_BYTES = 64 << 20  # what we leave free: a drive filled to the last byte breaks its other users

_warned: set[tuple[str, str]] = set()


def default_offload_dir() -> Path:
    """`$NVME_CACHE_DIR`, else a folder among Hugging Face's cached assets (`$HF_HOME`, `$HF_ASSETS_CACHE`).

    Raises:
        OffloadDirectoryError: the folder cannot be made.
    """
    if chosen := os.environ.get("NVME_CACHE_DIR"):
        return Path(chosen)
    from huggingface_hub import cached_assets_path

    try:
        return cached_assets_path(library_name="nvme_cache", namespace="offload", subfolder="default")
    except OSError as error:
        raise OffloadDirectoryError(
            f"cannot make the default offload folder: {error}. Pass offload_dir=... or set NVME_CACHE_DIR to a folder "
            "on a fast drive."
        ) from error


class Store:
    """A private folder of shards, gone when the store is closed.

    Args:
        offload_dir: Existing folder to work in; None for the default.
        disk_budget: Most bytes of shards at any time; None for what the drive has.

    Raises:
        OffloadDirectoryError: `offload_dir` is missing, not a folder, or not writable.

    Attributes:
        path: The folder.
        direct: Whether files in it are read and written past the page cache.
        drive: How to read the drive under it.
    """

    def __init__(self, offload_dir: Path | None, disk_budget: int | None) -> None:
        root = default_offload_dir() if offload_dir is None else offload_dir
        with _explained(root):
            root = _checked(root)
            remove_orphans(root)
            self.path, lock = _claim_folder(root)
            self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())
            self.direct = io.supports_direct(self.path)
            self.drive = tested_drive(self.path, disk_budget, direct=self.direct)
        self._disk_budget = disk_budget
        self._owner_pid = os.getpid()
        self._count = 0
        self._users = 1
        self._reserved_bytes = 0
        self._most_bytes = 0
        # Sizes and free files of shards that are gone: appended to by finalizers, which must not wait for a lock.
        self._forgotten: deque[tuple[int, Path | None]] = deque()
        self._free: dict[int, list[Path]] = {}  # by size, the one longest not asked for first
        self._mutex = RLock()  # the collector may close a fork of the same cache inside any of the methods that hold it
        _warn_once(root, direct=self.direct)

    @property
    def used_bytes(self) -> int:
        """Bytes of all shards that are on the drive or on their way to it; free files do not count."""
        with self._mutex:
            self._collect()
            return self._reserved_bytes

    def new_shard(
        self,
        layer_idx: int,
        first_token: int,
        sections: tuple[Sections, Sections],
        storage: Mapping[str, str] | None = None,
    ) -> Shard:
        """A shard yet to be written, its size counted. Its file is free once nothing refers to the shard.

        Raises:
            StorageFullError: the disk budget or the drive has no room for it.
        """
        with self._mutex:
            shard = Shard(
                self.new_path(layer_idx),
                layer_idx,
                first_token,
                sections,
                storage=storage,
                direct=self.direct,
            )
            self._collect()
            if not self._recycle(shard):
                self._make_room(shard.file_nbytes)
            self._count_in(shard.file_nbytes)
        # The newest finalizer runs first: the one that closes the file, made when it is written, before this one.
        forget = weakref.finalize(shard, _forget, shard.path, shard.file_nbytes, self._forgotten, os.getpid())
        forget.atexit = False  # closing the store removes the folder whole
        return shard

    def new_path(self, layer_idx: int) -> Path:
        """Where another file of a layer goes."""
        with self._mutex:
            self._count += 1
            return self.path / f"layer-{layer_idx:03d}-{self._count:06d}.safetensors"

    def reserve(self, nbytes: int) -> None:
        """Counts bytes that the caller is about to write and will `give_back`.

        Raises:
            StorageFullError: the disk budget or the drive has no room for them.
        """
        with self._mutex:
            self._collect()
            self._make_room(nbytes)
            self._count_in(nbytes)

    def give_back(self, nbytes: int) -> None:
        """Counts bytes no more: they were not written, or are deleted. Finalizers may call it."""
        self._forgotten.append((nbytes, None))

    def share(self) -> "Store":
        """This store, to be closed once more before it is gone."""
        with self._mutex:
            self._users += 1
        return self

    def delete_free_files(self) -> None:
        """Gives the space of all free files back to the drive."""
        if os.getpid() == self._owner_pid:  # in a forked child they are the parent's
            with self._mutex:
                self._collect()
                while self._free:
                    self._delete_free_file()

    def close(self) -> None:
        """Deletes the folder and everything in it, once all who share the store have closed it."""
        with self._mutex:
            self._users -= 1
            if self._users:
                return
        self._finalizer()

    def _count_in(self, nbytes: int) -> None:
        self._reserved_bytes += nbytes
        self._most_bytes = max(self._most_bytes, self._reserved_bytes)

    def _collect(self) -> None:
        """Takes note of what finalizers have left."""
        while self._forgotten:
            nbytes, path = self._forgotten.popleft()
            self._reserved_bytes -= nbytes
            if path is not None:
                self._free.setdefault(nbytes, []).append(path)

    def _recycle(self, shard: Shard) -> bool:
        """Puts a free file where `shard` is to be written, if one has its size and no link from elsewhere."""
        paths, recycled = self._free.pop(shard.file_nbytes, []), False
        while paths and not recycled:
            path = paths.pop()
            with suppress(OSError):
                found = path.stat()
                if found.st_nlink == 1 and found.st_size == shard.file_nbytes:
                    path.rename(shard.path.with_suffix(".partial"))
                    recycled = True
                else:
                    path.unlink()
        if paths:
            self._free[shard.file_nbytes] = paths
        return recycled

    def _make_room(self, nbytes: int) -> None:
        """Deletes the free files that are in the way of a new one of `nbytes`."""
        used_bytes = self._reserved_bytes
        if self._disk_budget is not None and used_bytes + nbytes > self._disk_budget:
            raise StorageFullError(
                f"a shard of {nbytes:,} bytes would exceed disk_budget={self._disk_budget:,} with {used_bytes:,} "
                "in use. Raise disk_budget, give host_budget more, or close other caches."
            )
        room_bytes = max(self._most_bytes - used_bytes - nbytes, 0)
        while sum(size * len(paths) for size, paths in self._free.items()) > room_bytes:
            self._delete_free_file()
        while (free := shutil.disk_usage(self.path).free) < nbytes + _SPARE_BYTES and self._free:
            self._delete_free_file()
        if free < nbytes + _SPARE_BYTES:
            raise StorageFullError(
                f"{self.path} has {free:,} bytes free; a shard of {nbytes:,} bytes and {_SPARE_BYTES:,} to spare do "
                "not fit. Free space and call again (nothing is lost), or use an offload_dir on a larger drive."
            )

    def _delete_free_file(self) -> None:
        size, paths = next(iter(self._free.items()))
        with suppress(OSError):
            paths.pop().unlink()
        if not paths:
            del self._free[size]


@contextmanager
def private_folder(root: Path) -> Iterator[Path]:
    """A folder inside `root` as stores have one, for files of the names they and snapshots give; gone at the end.

    Raises:
        OffloadDirectoryError: `root` is missing, not a folder, or not writable.
    """
    with _explained(root):
        folder, lock = _claim_folder(_checked(root))
        try:
            yield folder
        finally:
            _remove(folder, lock, os.getpid())


def tested_drive(folder: Path, disk_budget: int | None, *, direct: bool) -> Drive:
    """How to read the drive under `folder`: what a test finds if there is room for one, else a common NVMe drive."""
    # Reads through the page cache would be answered by it.
    room = min(shutil.disk_usage(folder).free - _SPARE_BYTES, math.inf if disk_budget is None else disk_budget)
    return drive_of(folder) if direct and room >= TEST_BYTES else Drive()


def remove_orphans(root: Path) -> list[Path]:
    """Removes the folders in `root` whose process died without closing them, and returns their former paths."""
    removed = []
    for folder in root.iterdir():
        if not _FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        if (lock := _lock(folder, create=False)) is None:
            with suppress(OSError):
                folder.rmdir()  # its maker died before it had a lock; if not, it makes another
            continue
        try:
            doomed = folder.rename(folder.with_name(f"nvme-cache-removing-{secrets.token_hex(4)}"))
            _delete(doomed)
            removed.append(folder)
            logger.info("removed %s, left by a process that died", folder)
        except OSError as error:
            logger.warning("cannot remove %s, left by a process that died: %s", folder, error)
        finally:
            os.close(lock)
    return removed


def _claim_folder(root: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"nvme-cache-{os.getpid()}-", dir=root))
        lock = _lock(folder, create=True)
        if lock is not None and (folder / _LOCK).exists():
            return folder, lock
        if lock is not None:  # taken for an orphan between the two steps: make another
            os.close(lock)


def _lock(folder: Path, *, create: bool) -> int | None:
    """The descriptor that holds the folder's lock while it is open; None if someone else holds it or it is not there.

    A forked child that closes its copy does not give the lock up, as unlocking it would.
    """
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _delete(folder: Path) -> None:
    """Deletes what a store or a snapshot put into `folder`, and the folder if that was all."""
    for pattern in _FILES:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _remove(folder: Path, lock: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child must not delete its parent's folder
        _delete(folder)
    os.close(lock)


def _forget(path: Path, nbytes: int, forgotten: deque[tuple[int, Path | None]], owner_pid: int) -> None:
    """Turns a shard's file into a free one."""
    free = None
    if os.getpid() == owner_pid:
        for present in (path, path.with_suffix(".partial")):  # the latter if it was to be overwritten and never was
            with suppress(OSError):
                free = present.rename(path.with_suffix(".free"))
    forgotten.append((nbytes, free))


def _checked(root: Path) -> Path:
    if not root.exists():
        raise OffloadDirectoryError(
            f"offload_dir={str(root)!r} does not exist. Create it (mkdir -p {root}) or check that the drive is mounted."
        )
    if not root.is_dir():
        raise OffloadDirectoryError(f"offload_dir={str(root)!r} is not a folder. Pass a folder on a fast drive.")
    return root.resolve()  # the process may change its working directory


@contextmanager
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except NVMeCacheError:
        raise
    except OSError as error:
        raise OffloadDirectoryError(
            error.errno,
            f"cannot write to offload_dir={str(root)!r}: {error.strerror}. Pass a folder this user may write to, on a "
            "drive with space.",
        ) from error


def file_system_of(folder: Path) -> str:
    """The name of the file system `folder` is on, such as "ext4"; "unknown" where the system does not tell."""
    return mount_of(folder)[0]


def mount_of(folder: Path) -> tuple[str, str]:
    """The file system `folder` is on and what is mounted there, such as "ext4" and "/dev/sda1"; else "unknown"."""
    parents = {str(parent) for parent in [folder.resolve(), *folder.resolve().parents]}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in parents]
    if not mounts:
        return "unknown", "unknown"
    mount = max(mounts, key=lambda mount: len(mount.mountpoint))
    return mount.fstype, mount.device


def _warn_once(root: Path, *, direct: bool) -> None:
    name = file_system_of(root)
    problems = []
    if name in RAM_FILE_SYSTEMS:
        problems.append(
            f"{root} is a {name}: its files live in RAM, so paging there saves none. Use a folder on a drive."
        )
    elif not direct:
        problems.append(f"{root} is on {name}, which refuses O_DIRECT: reads and writes go through the page cache.")
    for problem in problems:
        if (str(root), problem) not in _warned:
            _warned.add((str(root), problem))
            logger.warning("%s", problem)
