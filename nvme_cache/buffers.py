"""Host memory that drives and accelerators can move bytes to and from."""

import mmap
import weakref
from collections import deque
from threading import Condition

import torch

from .io import ALIGNMENT, round_up

_HUGE_PAGE = 2 << 20


class HostBuffer:
    """Page-aligned bytes, seen as a tensor and as a memoryview.

    Without an accelerator it is a private anonymous mapping with huge pages: drives fill those at more than twice the
    rate of 4 KiB pages, and Python's default, a shared mapping, never gets any. With one it is pinned memory, which is
    page-aligned by construction and which devices copy from without blocking the host.

    Args:
        nbytes: Least size in bytes; rounded up to whole pages.
        pin: Whether an accelerator will copy to or from it.
    """

    @torch.inference_mode(False)  # tensors born in inference mode could not be written outside it
    def __init__(self, nbytes: int, *, pin: bool = False) -> None:
        nbytes = round_up(max(nbytes, 1), ALIGNMENT)
        if pin:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self.view = memoryview(self.bytes.numpy().data).cast("B")
        else:
            mapping = _map_private(nbytes)
            self.bytes = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)
            self.view = memoryview(mapping)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.view.nbytes

    @torch.inference_mode(False)
    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The buffer's first bytes as a contiguous tensor of `shape` and `dtype`."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return self.bytes[:size].view(dtype).view(shape)


def _map_private(nbytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class StagingPool:
    """A bounded set of staging buffers; `acquire` waits when all are travelling, which bounds memory.

    A buffer that is lost on the way, to an interrupt say, makes room for another when it is collected.

    Args:
        count: How many buffers may exist.
        nbytes: Usual size of a buffer in bytes; a larger request replaces a buffer by a larger one.
        pin: Whether an accelerator copies to or from them.
    """

    def __init__(self, count: int, nbytes: int, *, pin: bool) -> None:
        self._count = count
        self._nbytes = nbytes
        self._pin = pin
        self._made: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._free: deque[tuple[HostBuffer, torch.Event | None]] = deque()
        self._failure: Exception | None = None
        self._changed = Condition()

    def acquire(self, nbytes: int) -> HostBuffer:
        """A buffer of at least `nbytes` bytes, waiting for one if need be.

        Raises:
            Exception: the failure that keeps buffers from coming back, as given to `fail`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or len(self._made) < self._count or self._failure)
            if not self._free:
                if len(self._made) >= self._count and self._failure is not None:
                    raise self._failure
                return self._make(nbytes)
            buffer, event = self._free.popleft()
        if event is not None:
            event.synchronize()  # the device may still be copying from or to these bytes
        if buffer.nbytes >= nbytes:
            return buffer
        del buffer
        with self._changed:
            return self._make(nbytes)

    def release(self, buffer: HostBuffer, event: torch.Event | None = None) -> None:
        """Takes `buffer` back; it is handed out again once `event` has passed."""
        with self._changed:
            self._free.append((buffer, event))
            self._changed.notify()

    def fail(self, failure: Exception | None) -> None:
        """Makes waiting callers raise `failure` instead of waiting for buffers that it holds; None mends."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _make(self, nbytes: int) -> HostBuffer:
        buffer = HostBuffer(max(nbytes, self._nbytes), pin=self._pin)
        self._made.add(buffer)
        weakref.finalize(buffer, _notify, self._changed).atexit = False
        return buffer


def _notify(changed: Condition) -> None:
    with changed:
        changed.notify()
