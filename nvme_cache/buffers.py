"""Host memory that drives and accelerators can move bytes to and from."""

import math
import weakref
from collections import deque
from threading import Condition

import torch

from .transfer import Event, Transfer


class HostBuffer:
    """Host memory, seen as a tensor and as a memoryview.

    Args:
        memory: The bytes, as a `Transfer` made them.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.bytes = memory
        self.view = memoryview(memory.numpy().data)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.view.nbytes


@torch.inference_mode(False)  # views born in inference mode could not be written outside it
def shaped(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of `memory` as a contiguous tensor of `shape` and `dtype`."""
    return memory[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)


class StagingPool:
    """A bounded set of staging buffers; `acquire` waits when all are travelling, which bounds memory.

    A buffer that is lost on the way, to an interrupt say, makes room for another when it is collected.

    Args:
        count: How many buffers may exist.
        nbytes: Usual size of a buffer in bytes; a larger request replaces a buffer by a larger one.
        transfer: What copies to and from them.
    """

    def __init__(self, count: int, nbytes: int, transfer: Transfer) -> None:
        self._count = count
        self._nbytes = nbytes
        self._transfer = transfer
        self._made: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._free: deque[tuple[HostBuffer, Event]] = deque()
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
        event.synchronize()  # the device may still be copying from these bytes
        if buffer.nbytes >= nbytes:
            return buffer
        del buffer
        with self._changed:
            return self._make(nbytes)

    def release(self, buffer: HostBuffer, event: Event) -> None:
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
        buffer = HostBuffer(self._transfer.host_memory(max(nbytes, self._nbytes)))
        self._made.add(buffer)
        weakref.finalize(buffer, _notify, self._changed).atexit = False
        return buffer


def _notify(changed: Condition) -> None:
    with changed:
        changed.notify()
