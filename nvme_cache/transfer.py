"""The only module that knows devices: streams, events, pinned memory, copies.

Copies run on a *side stream* beside the model's own. What orders the two is declared here and nowhere else:

- a copy starts only `after` an event of the compute stream (the data is produced, the target has no reader left);
- the compute stream `wait`s for the event recorded behind a copy before it uses what the copy brought;
- the host waits for that event before it reuses the memory the copy reads or writes.

On CPU there is one order, the program's: the same calls copy at once and events are None.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Transfer(Protocol):
    """How bytes move to, from and on one device."""

    device: torch.device
    pins_memory: bool

    def mark(self) -> torch.Event | None:
        """The point the model's computation on this device has been enqueued up to."""

    def wait(self, event: torch.Event | None) -> None:
        """Makes the model's computation from here on wait for `event`; the host does not wait."""

    @contextmanager
    def side_stream(self, after: torch.Event | None) -> Iterator[None]:
        """Copies inside run on the side stream, not before `after`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies `source` into `target` on the current stream, without blocking the host if memory is pinned."""

    def record(self) -> torch.Event | None:
        """An event behind everything enqueued so far on the side stream."""


class HostTransfer:
    """Copies within host memory, done when the call returns."""

    pins_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> None:
        return None

    def wait(self, event: torch.Event | None) -> None:
        return None

    @contextmanager
    def side_stream(self, after: torch.Event | None) -> Iterator[None]:
        yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record(self) -> None:
        return None


class StreamTransfer:
    """Copies on a side stream of an accelerator, through `torch.accelerator`, `torch.Stream`, `torch.Event`."""

    pins_memory = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.Stream(device=device)

    def mark(self) -> torch.Event:
        return self._record_on(torch.accelerator.current_stream(self.device))

    def wait(self, event: torch.Event | None) -> None:
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)

    @contextmanager
    def side_stream(self, after: torch.Event | None) -> Iterator[None]:
        if after is not None:
            self._side.wait_event(after)
        # Not `with self._side`: that keeps the previous stream on the object, which reader threads share.
        index = torch.accelerator.current_device_index()
        previous = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(self._side)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)
            torch.accelerator.set_device_index(index)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> torch.Event:
        return self._record_on(self._side)

    def _record_on(self, stream: torch.Stream) -> torch.Event:
        # A blocking event lets a waiting thread sleep instead of spinning on a core the model needs.
        event = torch.Event(self.device, blocking=True)
        event.record(stream)
        return event


def transfer_for(device: torch.device) -> Transfer:
    """The way to move bytes to and from `device`."""
    return HostTransfer(device) if device.type == "cpu" else StreamTransfer(device)
