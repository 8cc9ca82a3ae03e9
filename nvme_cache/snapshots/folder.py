"""A snapshot's folder: who uses it, and how files come into it.

The manifest is written last and put in place by a rename, so a snapshot is whole or absent, and one that is saved again
is the old one or the new one. Every save gives its files names of their own. Files of an earlier save are deleted once
nobody has the snapshot open: whoever has holds a shared lock, which also keeps stores of snapshots from evicting it.
"""

import fcntl
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nvme_cache.errors import NVMeCacheError, SnapshotCorruptedError

from .manifest import MANIFEST, Manifest

_IN_USE, _BEING_SAVED = "in-use.lock", "saving.lock"
_OURS = re.compile(r"(layer-\d+-\d+|states)-[0-9a-f]{16}\.(safetensors|partial)|manifest-[0-9a-f]{16}\.partial")


class Use:
    """Holds a snapshot open: its files stay for as long as this object exists.

    Args:
        folder: The snapshot; where it cannot be locked (a drive that is read only), nobody deletes from it either.
    """

    def __init__(self, folder: Path) -> None:
        with suppress(OSError):
            descriptor = _lock(folder / _IN_USE, fcntl.LOCK_SH)
            weakref.finalize(self, _leave, folder, descriptor, _manifest_on_drive(folder), os.getpid())
            os.utime(descriptor)


def _leave(folder: Path, descriptor: int, before: tuple[int, int] | None, owner_pid: int) -> None:
    """Lets a snapshot go; if it was saved again meanwhile, what only this use still needed is deleted."""
    os.close(descriptor)
    if os.getpid() == owner_pid and before is not None and _manifest_on_drive(folder) not in (None, before):
        with suppress(OSError, NVMeCacheError), _unused(folder, _BEING_SAVED) as is_unused:
            if is_unused:
                tidy(folder, read_manifest(folder))


def _manifest_on_drive(folder: Path) -> tuple[int, int] | None:
    """What changes when a snapshot is saved again; None if there is none."""
    try:
        found = (folder / MANIFEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def last_used(folder: Path) -> float:
    """When a snapshot was opened or saved last, in seconds since the epoch."""
    times = [(folder / MANIFEST).stat().st_mtime]
    with suppress(FileNotFoundError):
        times.append((folder / _IN_USE).stat().st_mtime)
    return max(times)


@contextmanager
def saving(folder: Path) -> Iterator[str]:
    """Makes the folder if need be and keeps others from saving into it; gives what this save's file names end with."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ending = secrets.token_hex(8)
    with locked(folder / _BEING_SAVED):
        try:
            yield ending
        except BaseException:
            for path in folder.glob(f"*-{ending}.*"):  # links, too, keep their bytes on the drive
                path.unlink(missing_ok=True)
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path` alone, waiting for it if need be."""
    descriptor = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _unused(folder: Path, *names: str) -> Iterator[bool]:
    """Whether nobody holds any of the locks called `names`, nor will while the context lasts."""
    held: list[int] = []
    try:
        for name in names:
            held.append(_lock(folder / name, fcntl.LOCK_EX | fcntl.LOCK_NB))
        yield True
    except BlockingIOError:
        yield False
    finally:
        for descriptor in held:
            os.close(descriptor)


def _lock(path: Path, how: int) -> int:
    """A descriptor of its own that holds a lock while it is open: a process's own uses count too."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, how)
            if os.fstat(descriptor).st_nlink:  # else whoever had it deleted the snapshot meanwhile
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the snapshot in `folder`.

    Raises:
        SnapshotCorruptedError: there is no snapshot, or it is not what was written.
        SnapshotMismatchError: another version of the format.
    """
    try:
        encoded = read_file(folder / MANIFEST)
    except OSError as error:
        raise SnapshotCorruptedError(
            error.errno, f"{folder} holds no snapshot that can be read: {error.strerror}: {folder / MANIFEST}"
        ) from error
    return Manifest.decode(encoded, folder / MANIFEST)


def read_file(path: Path) -> bytes:
    """What a regular file holds; a link is an error, since it may lead anywhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def write_manifest(folder: Path, manifest: Manifest, ending: str) -> None:
    """Puts a manifest in place; the files it names must be on the drive."""
    partial = folder / f"manifest-{ending}.partial"
    write_file(partial, manifest.encode())
    partial.rename(folder / MANIFEST)
    sync(folder)


def write_file(path: Path, content: bytes) -> None:
    """Writes a new file for its owner alone, down to the drive."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def bring(source: Path, target: Path) -> None:
    """Makes `target` a name for what `source` holds, by a link where the file system can, else a copy of its own."""
    try:
        os.link(source, target)
        return
    except OSError:
        pass  # other file systems, too many links, none at all
    with source.open("rb") as whole:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as copy:
            try:  # shares the bytes on file systems that can
                left = os.fstat(whole.fileno()).st_size
                while left and (count := os.copy_file_range(whole.fileno(), copy.fileno(), left)):
                    left -= count
            except OSError:
                whole.seek(0)
                copy.seek(0)
                shutil.copyfileobj(whole, copy)


def sync(path: Path) -> None:
    """Waits until a file or folder is on the drive."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tidy(folder: Path, manifest: Manifest) -> None:
    """Deletes what other saves than the one of `manifest` left in the folder.

    Tails and states go at once: they are read while a snapshot is opened, and whoever comes too late reads the new
    manifest. Shards go once nobody has the snapshot open.
    """
    others = [path for path in folder.iterdir() if _OURS.fullmatch(path.name) and path.name not in manifest.files]
    with _unused(folder, _IN_USE) as is_unused:
        for path in others:
            if is_unused or not path.name.startswith("layer-"):
                path.unlink(missing_ok=True)


def delete(folder: Path) -> bool:
    """Deletes a snapshot, its manifest first, unless someone has it open. Returns whether it is gone."""
    if not folder.exists():
        return True
    with _unused(folder, _BEING_SAVED, _IN_USE) as is_unused:
        if is_unused:
            (folder / MANIFEST).unlink(missing_ok=True)
            for path in folder.iterdir():
                if _OURS.fullmatch(path.name) or path.name in (_BEING_SAVED, _IN_USE):
                    path.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()  # unless something else is in it
        return is_unused
