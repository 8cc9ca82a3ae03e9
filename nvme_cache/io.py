"""Positional reads and writes between files and memory the caller owns.

Every call here releases the GIL and keeps many requests in flight inside the kernel, so one long `preadv` from one
thread already reads at the drive's rate. `O_DIRECT` needs file offsets, addresses and lengths that are multiples of
the drive's logical block; `ALIGNMENT` satisfies every drive in use.
"""

import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ALIGNMENT = 4096
_MAX_VECTORS = os.sysconf("SC_IOV_MAX")
_MAX_CALL_BYTES = 1 << 30  # the kernel moves at most 2 GiB a call
_DIRECT = getattr(os, "O_DIRECT", 0)
_ATTEMPTS = 4


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def open_file(path: Path, *, direct: bool, create: bool = False) -> int:
    """Opens `path` for positional I/O, with `create` made if need be, for its owner alone. Returns the descriptor.

    A link is an error: it may lead anywhere.
    """
    flags = (os.O_RDWR | os.O_CREAT) if create else os.O_RDONLY
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | (_DIRECT if direct else 0), 0o600)


def preallocate(descriptor: int, size: int) -> None:
    """Reserves `size` bytes, so that a full drive says so before anything is written.

    Raises:
        OSError: ENOSPC or EDQUOT when there is no room.
    """
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def write_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Writes `views`, one after the other, to the file from byte `offset` on.

    Raises:
        OSError: what the kernel answered.
    """
    for part, at, wanted in _calls(views, offset):
        _complete(lambda left, position: os.pwritev(descriptor, left, position), part, at, wanted)


def read_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Fills `views`, one after the other, from the file's bytes from `offset` on.

    Raises:
        EOFError: the file ends before the views are full.
        OSError: what the kernel answered.
    """
    for part, at, wanted in _calls(views, offset):
        _complete(lambda left, position: os.preadv(descriptor, left, position), part, at, wanted)


def _calls(views: Sequence[memoryview], offset: int) -> Iterator[tuple[list[memoryview], int, int]]:
    """What one call can move: views, their position in the file, their bytes."""
    start = 0
    while start < len(views):
        end, wanted = start, 0
        while end < len(views) and end - start < _MAX_VECTORS and wanted + views[end].nbytes <= _MAX_CALL_BYTES:
            wanted += views[end].nbytes
            end += 1
        yield list(views[start:end]), offset, wanted
        start, offset = end, offset + wanted


def _complete(call: Callable[[list[memoryview], int], int], views: list[memoryview], offset: int, wanted: int) -> None:
    """Repeats `call` until it has moved all of `views`: the kernel may stop early."""
    while wanted:
        count = call(views, offset)
        if count == 0:
            raise EOFError(f"the file ends {wanted} bytes early, at byte {offset}")
        offset, wanted = offset + count, wanted - count
        while views and count >= views[0].nbytes:
            count -= views.pop(0).nbytes
        if count:
            views[0] = views[0][count:]


def advise(descriptor: int, offset: int, size: int, *, will_need: bool) -> None:
    """Tells the kernel, where it caches what is read, to read a range ahead, or to let go of it."""
    advice = os.POSIX_FADV_WILLNEED if will_need else os.POSIX_FADV_DONTNEED
    os.posix_fadvise(descriptor, offset, size, advice)


def supports_direct(folder: Path) -> bool:
    """Whether the file system under `folder` takes an `O_DIRECT` write, gives it back, and keeps it out of its cache.

    Raises:
        OSError: `folder` takes no files at all.
    """
    # A file system that is busy may put one such write through its cache nevertheless.
    return any(_takes_direct(folder) for _ in range(_ATTEMPTS))


def _takes_direct(folder: Path) -> bool:
    probe = folder / "probe"
    page = mmap.mmap(-1, 2 * ALIGNMENT)
    with page, memoryview(page) as view, view[:ALIGNMENT] as source, view[ALIGNMENT:] as target:
        source[:] = os.urandom(ALIGNMENT)
        try:
            descriptor = open_file(probe, direct=bool(_DIRECT), create=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        try:
            write_all(descriptor, [source], 0)
            read_all(descriptor, [target], 0)
            return bool(_DIRECT) and source == target and not _is_cached(probe)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            os.close(descriptor)
            probe.unlink()


def reads_direct(path: Path) -> bool:
    """Whether the beginning of a file can be read past the page cache."""
    with mmap.mmap(-1, ALIGNMENT) as page:
        try:
            descriptor = open_file(path, direct=bool(_DIRECT))
        except OSError:
            return False
        try:
            os.preadv(descriptor, [page], 0)
            return bool(_DIRECT)
        except OSError:
            return False
        finally:
            os.close(descriptor)


def _is_cached(path: Path) -> bool:
    """Whether the page cache holds the beginning of a file; False where the kernel does not tell."""
    descriptor = open_file(path, direct=False)
    try:
        return os.preadv(descriptor, [bytearray(ALIGNMENT)], 0, os.RWF_NOWAIT) > 0
    except OSError:  # EAGAIN: it would have to be read from the drive
        return False
    finally:
        os.close(descriptor)


def open_file_allowance() -> int:
    """How many shards may stay open at once without starving the process of file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(4096, soft // 2)
