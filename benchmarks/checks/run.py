"""What every section is given: the device under test, the time it has, and where to report."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

MIB = 1 << 20
GIB = 1 << 30


class SkippedError(Exception):
    """Why a section has nothing to do here."""


class OutOfTimeError(BaseException):
    """A section overran its time, or hangs; not an `Exception`, so that nothing on the way takes it for its own."""


class Device:
    """The device under test. On CPU streams and device memory mean nothing: the same calls do nothing or give 0.

    Args:
        name: As torch spells it; None for the accelerator that torch reports, CPU if there is none.

    Attributes:
        torch: The device, with its index.
    """

    def __init__(self, name: str | None) -> None:
        found = torch.device(name or torch.accelerator.current_accelerator(check_available=True) or "cpu")
        self.is_cpu = found.type == "cpu"
        self.torch = found if self.is_cpu or found.index is not None else torch.device(found.type, 0)
        torch.zeros(1, device=self.torch)

    @property
    def name(self) -> str:
        """What the maker calls it."""
        names = getattr(torch.get_device_module(self.torch), "get_device_name", None)
        return str(names(self.torch)) if names else str(self.torch)

    def synchronize(self) -> None:
        """Waits for everything enqueued on every stream."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.torch)

    def stream(self) -> AbstractContextManager[Any]:
        """A new stream, to enqueue on in a `with`."""
        return nullcontext() if self.is_cpu else torch.Stream(device=self.torch)

    def free_bytes(self) -> int:
        """Bytes that could be allocated, those that the allocator keeps in reserve included."""
        if self.is_cpu:
            return psutil.virtual_memory().available
        kept = self.memory("memory_reserved") - self.memory("memory_allocated")
        return int(self._memory_info()[0]) + kept

    def total_bytes(self) -> int:
        """Size of its memory in bytes."""
        return psutil.virtual_memory().total if self.is_cpu else int(self._memory_info()[1])

    def memory(self, figure: str) -> int:
        """A figure of the allocator in bytes, by the name of torch's function; 0 where it keeps none."""
        answer = self._ask(figure)
        return 0 if answer is None else int(answer)

    def reset_peak(self) -> None:
        """Lets `max_memory_allocated` begin anew."""
        self._ask("reset_peak_memory_stats")

    def empty_cache(self) -> None:
        """Gives device memory that torch keeps in reserve back to the system."""
        if not self.is_cpu:
            getattr(torch.accelerator, "empty_cache", torch.get_device_module(self.torch).empty_cache)()

    def empty_host_cache(self) -> None:
        """Likewise for pinned memory."""
        if not self.is_cpu:
            getattr(torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", int))()

    def _memory_info(self) -> tuple[int, int]:
        return self._ask("get_memory_info") or self._ask("mem_get_info") or (0, 0)

    def _ask(self, function: str) -> Any:
        if not self.is_cpu:  # torch.accelerator has these since 2.9; before, each device's module had its own
            for module in (torch.accelerator, torch.get_device_module(self.torch)):
                if hasattr(module, function):
                    try:
                        return getattr(module, function)(self.torch)
                    except (RuntimeError, NotImplementedError):
                        continue
        return None


@dataclass
class Run:
    """One run of the check.

    Attributes:
        device: What is checked.
        quick: Whether to run the reduced form.
        folder: Existing folder for shards.
        save: Writes the report so far.
        began: When the run began, on the monotonic clock, in seconds.
        deadline: When the present section should be done, likewise.
        problems: What the present section found wrong.
        rates: The best that `rates` measured, in bytes per second: `h2d`, `read`, `write`.
        attentions: Attention implementations that work on the device, the faster last.
        host_memory_bytes: Host memory of the machine; None for what the system says.
    """

    device: Device
    quick: bool
    folder: Path
    save: Callable[[], None]
    began: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    problems: list[str] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    attentions: tuple[str, ...] = ()
    host_memory_bytes: int | None = None

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    def left_s(self) -> float:
        """Seconds the present section still has."""
        return self.deadline - time.monotonic()

    def host_available(self) -> int:
        """Bytes of host memory that may still be used."""
        memory = psutil.virtual_memory()
        if self.host_memory_bytes is None:
            return memory.available
        return self.host_memory_bytes - (memory.total - memory.available)

    def say(self, text: str) -> None:
        """Prints a line of progress and writes the report so far, for a run that is killed."""
        print(f"[{self.elapsed_s():6.1f} s] {text}", flush=True)
        self.save()

    def problem(self, text: str) -> None:
        """Records something wrong; the run goes on and ends with status 1."""
        self.problems.append(text)
        self.say(f"PROBLEM: {text}")
