"""The only module that knows devices: their memory, streams, events and copies.

Copies run on a *side stream* beside the model's own. What orders the two is declared with three calls and nothing else:

- a copy starts only `after` an event of the compute stream (the data is produced, the target has no reader left);
- the compute stream `wait`s for the event recorded behind a copy before it uses what the copy brought;
- the host `synchronize`s with that event before it reuses or gives back the memory the copy reads or writes.

On CPU there is one order, the program's: the same calls copy at once and events have always passed.
"""

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, TypeAlias, cast

import torch

from .io import ALIGNMENT, round_up

_HUGE_PAGE = 2 << 20

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Conversion: TypeAlias = Callable[[Any, Any], None]


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Makes the host wait until the work before it is done."""


class Timestamp(Protocol):
    """When a device's computation got to a point."""

    def is_reached(self) -> bool:
        """Whether it has got there."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from `earlier`, a timestamp of the same device, to this one; waits until both are reached."""


class Transfer(Protocol):
    """How bytes move to, from and on one device.

    Attributes:
        is_host: Whether the device's memory is the host's, so that drives can fill it.
    """

    is_host: bool

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` bytes that begin on a page, which drives fill fast and the device copies from and to."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` bytes where the model computes."""

    def stream(self) -> object:
        """The stream the model computes on, comparable. Memory is given back to the stream it was made on."""

    def mark(self) -> Event:
        """The point the model's computation on this device has been enqueued up to."""

    def timestamp(self) -> Timestamp:
        """When the model's computation on this device gets to the point it has been enqueued up to."""

    def wait(self, event: Event) -> None:
        """Makes the model's computation from here on wait for `event`; the host does not wait."""

    @contextmanager
    def side_stream(self, after: Event) -> Iterator[None]:
        """What is called inside runs on the side stream, not before `after`."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device, to be asked for, used and dropped inside `side_stream`."""

    def on_device(self, blocks: torch.Tensor) -> torch.Tensor:
        """Memory shaped like `blocks`, wherever those are, on the device; `blocks` themselves if they are there.

        Only contiguous copies cross between host and device at full rate and without blocking the host, so what is
        rearranged is rearranged on the device. As `empty`, for inside `side_stream`.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies `source` into `target` on the side stream, without blocking the host."""

    def convert(self, function: Conversion, source: Tensors, target: Tensors) -> None:
        """Has `function(source, target)` fill `target`, all on the device, on the side stream."""

    def record(self) -> Event:
        """An event behind everything enqueued so far on the side stream."""


class HostTransfer:
    """Copies within host memory, done when the call returns."""

    is_host = True

    @torch.inference_mode(False)  # tensors born in inference mode could not be written outside it
    def host_memory(self, nbytes: int) -> torch.Tensor:
        nbytes = round_up(max(nbytes, 1), ALIGNMENT)
        # Drives fill huge pages at more than twice the rate of 4 KiB ones. Python's default, a shared mapping, never
        # gets any, and a private one only where its addresses cover whole ones.
        spare = _HUGE_PAGE if nbytes >= _HUGE_PAGE else 0
        mapping = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        if not spare:
            return memory
        start = -memory.data_ptr() % _HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE_PAGE * _HUGE_PAGE)
        return memory[start : start + nbytes]

    device_memory = host_memory

    def stream(self) -> None:
        return None

    def mark(self) -> "_Passed":
        return _PASSED

    def timestamp(self) -> "_Now":
        return _Now()

    def wait(self, event: Event) -> None:
        pass

    @contextmanager
    def side_stream(self, after: Event) -> Iterator[None]:
        yield

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def on_device(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def convert(self, function: Conversion, source: Tensors, target: Tensors) -> None:
        function(source, target)

    def record(self) -> "_Passed":
        return _PASSED


class _Passed:
    def synchronize(self) -> None:
        pass


_PASSED = _Passed()


class _Now:
    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def seconds_since(self, earlier: "_Now") -> float:
        return self._time_s - earlier._time_s


class StreamTransfer:
    """Copies on a side stream of an accelerator, through `torch.accelerator`, `torch.Stream`, `torch.Event`."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device=device)

    @torch.inference_mode(False)
    def host_memory(self, nbytes: int) -> torch.Tensor:
        nbytes = round_up(max(nbytes, 1), ALIGNMENT)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    @torch.inference_mode(False)
    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def mark(self) -> torch.Event:
        return self._record_on(self.stream())

    def timestamp(self) -> "_Reached":
        event = torch.Event(self._device, enable_timing=True)
        event.record(self.stream())
        return _Reached(event)

    def wait(self, event: Event) -> None:
        self.stream().wait_event(cast(torch.Event, event))

    @contextmanager
    def side_stream(self, after: Event) -> Iterator[None]:
        self._side.wait_event(cast(torch.Event, after))
        # Not `with self._side`: that keeps the previous stream on the object, which reader threads share.
        index = torch.accelerator.current_device_index()
        previous = self.stream()
        torch.accelerator.set_stream(self._side)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)
            torch.accelerator.set_device_index(index)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def on_device(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks if blocks.device == self._device else self.empty(blocks.shape, blocks.dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def convert(self, function: Conversion, source: Tensors, target: Tensors) -> None:
        function(source, target)

    def record(self) -> torch.Event:
        return self._record_on(self._side)

    def _record_on(self, stream: torch.Stream) -> torch.Event:
        # A blocking event lets a waiting thread sleep instead of spinning on a core the model needs.
        event = torch.Event(self._device, blocking=True)
        event.record(stream)
        return event


class _Reached:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def is_reached(self) -> bool:
        return self._event.query()

    def seconds_since(self, earlier: "_Reached") -> float:
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3


@cache  # one side stream a device: memory that an allocator keeps for a stream is of no use to another
def transfer_for(device: torch.device) -> Transfer:
    """The way to move bytes to and from `device`."""
    return HostTransfer() if device.type == "cpu" else StreamTransfer(device)


def accelerator() -> torch.device | None:
    """The accelerator this process computes on now, if there is any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found and torch.device(found.type, torch.accelerator.current_device_index())
