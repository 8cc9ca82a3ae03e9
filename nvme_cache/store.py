"""The folder shards live in: creation, permissions, lock, quota, orphans, deletion.

Each store makes its own 0700 folder inside the offload folder and holds a lock in it for as long as it lives. A folder
whose lock nobody holds belongs to a process that died; whoever opens a store next removes it. The order of steps closes
the race between the two: a new folder counts only once its lock is held on the file that is still in place, and an
orphan is renamed, its lock held, before anything in it is deleted.
"""

import logging
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

import psutil
from filelock import FileLock, Timeout

from . import io
from .errors import OffloadDirectoryError, StorageFullError
from .shards import Section, Shard

logger = logging.getLogger(__name__)

_PREFIX = "nvme-cache-"
_LOCK_NAME = "lock"
_RAM_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
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
    """

    def __init__(self, offload_dir: Path | None, disk_budget: int | None) -> None:
        root = _checked(offload_dir) if offload_dir is not None else default_offload_dir()
        if offload_dir is None:
            root = _checked(root)
        with _explained(root):
            remove_orphans(root)
            self.path, lock = _claim_folder(root)
            self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())
            self._direct = io.supports_direct(self.path)
        self.used_bytes = 0
        self._disk_budget = disk_budget
        self._count = 0
        self._users = 1
        self._mutex = RLock()  # a shard's finalizer may run inside any of the methods that hold it
        self._open: weakref.WeakSet[Shard] = weakref.WeakSet()
        _warn_once(root, direct=self._direct)

    def new_shard(self, layer_idx: int, first_token: int, sections: tuple[Section, Section]) -> Shard:
        """A shard yet to be written, its size counted. Its file is deleted once nothing refers to the shard.

        Raises:
            StorageFullError: the disk budget or the drive has no room for it.
        """
        with self._mutex:
            self._count += 1
            shard = Shard(
                self.path / f"layer-{layer_idx:03d}-{self._count:06d}.safetensors",
                layer_idx,
                first_token,
                sections,
                direct=self._direct,
                keep_open=len(self._open) < io.open_file_allowance(),
            )
            self._check_room(shard.file_nbytes)
            self.used_bytes += shard.file_nbytes
            self._open.add(shard)
        forget = weakref.finalize(shard, Store._forget, weakref.ref(self), shard.path, shard.file_nbytes, os.getpid())
        forget.atexit = False  # closing the store removes the folder whole
        return shard

    def share(self) -> "Store":
        """This store, to be closed once more before it is gone."""
        with self._mutex:
            self._users += 1
        return self

    def close(self) -> None:
        """Deletes the folder and everything in it, once all who share the store have closed it."""
        with self._mutex:
            self._users -= 1
            if self._users:
                return
        self._finalizer()

    def _check_room(self, nbytes: int) -> None:
        if self._disk_budget is not None and self.used_bytes + nbytes > self._disk_budget:
            raise StorageFullError(
                f"a shard of {nbytes:,} bytes would exceed disk_budget={self._disk_budget:,} with {self.used_bytes:,} "
                "in use. Raise disk_budget, give host_budget more, or close other caches."
            )
        free = shutil.disk_usage(self.path).free
        if free < nbytes + _SPARE_BYTES:
            raise StorageFullError(
                f"{self.path} has {free:,} bytes free; a shard of {nbytes:,} bytes and {_SPARE_BYTES:,} to spare do "
                "not fit. Free space and call again (nothing is lost), or use an offload_dir on a larger drive."
            )

    @staticmethod
    def _forget(reference: "weakref.ref[Store]", path: Path, nbytes: int, owner_pid: int) -> None:
        if os.getpid() != owner_pid:
            return  # a forked child must not delete its parent's shard
        path.unlink(missing_ok=True)
        if (store := reference()) is not None:
            with store._mutex:
                store.used_bytes -= nbytes


def remove_orphans(root: Path) -> list[Path]:
    """Removes the folders in `root` whose process died without closing them, and returns their former paths."""
    removed = []
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            lock = FileLock(folder / _LOCK_NAME, thread_local=False)
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue  # alive, or going away under our eyes, or not ours to touch
        try:
            doomed = folder.rename(folder.with_name(f"{_PREFIX}removing-{secrets.token_hex(8)}"))
            shutil.rmtree(doomed, ignore_errors=True)
            removed.append(folder)
            logger.info("removed %s, left by a process that died", folder)
        except OSError:
            continue
        finally:
            lock.release()
    return removed


def _claim_folder(root: Path) -> tuple[Path, FileLock]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        lock = FileLock(folder / _LOCK_NAME, mode=0o600, thread_local=False)
        try:
            lock.acquire(timeout=0)
            if (folder / _LOCK_NAME).exists():
                return folder, lock
        except (Timeout, FileNotFoundError):
            pass  # taken for an orphan between the two steps: make another
        lock.release()


def _remove(folder: Path, lock: FileLock, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child must not delete its parent's folder
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()


def _checked(root: Path) -> Path:
    if not root.exists():
        raise OffloadDirectoryError(
            f"offload_dir={str(root)!r} does not exist. Create it (mkdir -p {root}) or check that the drive is mounted."
        )
    if not root.is_dir():
        raise OffloadDirectoryError(f"offload_dir={str(root)!r} is not a folder. Pass a folder on a fast drive.")
    return root


@contextmanager
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OffloadDirectoryError(
            error.errno,
            f"cannot write to offload_dir={str(root)!r}: {error.strerror}. Pass a folder this user may write to, on a "
            "drive with space.",
        ) from error


def file_system_of(folder: Path) -> str:
    """The name of the file system `folder` is on, such as "ext4"; "unknown" where the system does not tell."""
    parents = {str(parent) for parent in [folder.resolve(), *folder.resolve().parents]}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in parents]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown"


def _warn_once(root: Path, *, direct: bool) -> None:
    name = file_system_of(root)
    problems = []
    if name in _RAM_FILE_SYSTEMS:
        problems.append(
            f"{root} is a {name}: its files live in RAM, so paging there saves none. Use a folder on a drive."
        )
    elif not direct:
        problems.append(f"{root} is on {name}, which refuses O_DIRECT: reads and writes go through the page cache.")
    for problem in problems:
        if (str(root), problem) not in _warned:
            _warned.add((str(root), problem))
            logger.warning("%s", problem)
