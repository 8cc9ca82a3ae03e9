"""Measuring what paging costs while it happens: where each step's time went, and which bytes moved.

Time is counted once: the tax of an update is how long the model's own stream of work spent between entering and
leaving it. While the model's thread waits for a layer, that time goes to whatever the reader thread that finishes last
is doing; the rest is our own code, or, where an accelerator stands still for longer than its host needs, copies. Work
hidden behind the model's computing is in none of these figures.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from .transfer import Timestamp

_MOST_STEPS = 65536  # remembered one by one


class Cause(StrEnum):
    """What time goes to.

    Reading a shard, or waiting until it is written; checking what was read; copying between tiers; dequantizing into a
    slot; waiting for a free staging buffer; our own code, threads waiting for the interpreter included.
    """

    DRIVE = "drive"
    CHECK = "check"
    COPY = "copy"
    DEQUANTIZE = "dequantize"
    STAGING = "staging"
    SOFTWARE = "software"


@dataclass(slots=True)
class Step:
    """One forward of the model.

    Attributes:
        is_prefill: Whether it processed a prompt, or a chunk of one.
        past_length: Tokens cached before it.
        new_length: Tokens it was given.
        began_s: When its first layer was updated, by `time.perf_counter`.
        wall_s: Seconds until the next one began, or, if none followed at once, until its last layer was updated.
        tax_s: Seconds of it that paging took from the model, by cause.
        read_bytes: Read from the drive meanwhile.
        copied_bytes: Copied into slots from other tiers.
        busy_s: Seconds of it during which background threads worked.
        reading_s: Seconds of it during which they read the drive.
        kept_length: How many of its tokens the next one found still cached; None if none followed at once.
    """

    is_prefill: bool
    past_length: int
    new_length: int
    began_s: float
    wall_s: float = 0.0
    tax_s: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    read_bytes: int = 0
    copied_bytes: int = 0
    busy_s: float = 0.0
    reading_s: float = 0.0
    kept_length: int | None = None


class Phase:
    """A stretch of a background thread's work: what it did, from when to when, by `time.perf_counter`."""

    __slots__ = ("began_s", "cause", "ended_s")

    def __init__(self, cause: Cause, began_s: float) -> None:
        self.cause, self.began_s, self.ended_s = cause, began_s, began_s


@dataclass(frozen=True, slots=True)
class _Update:
    step: Step
    host_s: Mapping[Cause, float]
    began: Timestamp
    ended: Timestamp


class Meter:
    """Counts for one cache.

    Attributes:
        sealed_bytes: Bytes of blocks sealed, whatever their tier.
        written_bytes: Bytes of blocks written to NVMe, headers and padding aside.
        read_bytes: Bytes of blocks read from NVMe.
        copied_bytes: Bytes of resident blocks copied into slots.
        steps: The newest steps, oldest first; the last may be under way.
        known_prefill: How many tokens came from another cache, and seconds that each took it; None if that is unknown.
    """

    def __init__(self) -> None:
        self.sealed_bytes = self.written_bytes = self.read_bytes = self.copied_bytes = 0
        self.steps: deque[Step] = deque(maxlen=_MOST_STEPS)
        self.known_prefill: tuple[int, float] | None = None
        self._step: Step | None = None
        self._before = 0.0, 0.0
        self._update_began_s = 0.0
        self._waits_s = dict.fromkeys(Cause, 0.0)
        self._updates: deque[_Update] = deque()
        self._own = threading.local()
        self._mutex = threading.Lock()
        self._settling = threading.Lock()
        self._working, self._reading = _Busy(), _Busy()

    @property
    def prefill_token_s(self) -> float | None:
        """Seconds that a token of a prompt took; None if nothing is known of that."""
        count, token_s = (0, 0.0) if self.known_prefill is None else self.known_prefill
        prompts = [step for step in self.steps if step.is_prefill and step.wall_s]
        total = count + sum(step.new_length for step in prompts)
        return (count * token_s + sum(step.wall_s for step in prompts)) / total if total else None

    def begin_step(self, past_length: int, new_length: int, *, is_prefill: bool) -> None:
        """A forward begins: it ends the one before."""
        before = self._step
        self.go_on()
        if before is not None:
            before.kept_length = max(0, past_length - before.past_length)
        self._step = step = Step(is_prefill, past_length, new_length, time.perf_counter())
        self._before = self._working.until(step.began_s), self._reading.until(step.began_s)
        self.steps.append(step)

    def go_on(self) -> None:
        """The step under way has come to here."""
        if (step := self._step) is not None:
            now, (busy_s, reading_s) = time.perf_counter(), self._before
            step.wall_s = now - step.began_s
            step.busy_s, step.reading_s = self._working.until(now) - busy_s, self._reading.until(now) - reading_s

    def pause(self) -> None:
        """What comes before the next forward is not part of this one."""
        self._step = None

    @contextmanager
    def update(self, timestamp: Callable[[], Timestamp]) -> Iterator[None]:
        """An update of a paged layer goes on inside; `timestamp` tells how far the layer's device has got."""
        began_s, began, read_bytes, copied_bytes = time.perf_counter(), timestamp(), self.read_bytes, self.copied_bytes
        self._update_began_s, self._waits_s = began_s, dict.fromkeys(Cause, 0.0)
        try:
            yield
        finally:
            if (step := self._step) is not None:
                ended, now, host_s = timestamp(), time.perf_counter(), self._waits_s
                host_s[Cause.SOFTWARE] += now - began_s - sum(host_s.values())
                self._updates.append(_Update(step, host_s, began, ended))
                self.settle(wait=False)
                step.read_bytes += self.read_bytes - read_bytes
                step.copied_bytes += self.copied_bytes - copied_bytes

    def waited(self, parts_s: Mapping[Cause, float]) -> None:
        """During the present update the model's thread waited, by cause."""
        for cause, seconds in parts_s.items():
            self._waits_s[cause] += seconds

    @contextmanager
    def phase(self, cause: Cause, *, works: bool = True) -> Iterator[None]:
        """What a background thread does inside is `cause`: work, or else waiting. Phases do not nest."""
        phase = Phase(cause, time.perf_counter())
        if works:
            self._count(phase, 1, phase.began_s)
        try:
            yield
        finally:
            phase.ended_s = time.perf_counter()
            if works:
                self._count(phase, -1, phase.ended_s)
            phases = self.phases()
            phases.append(phase)
            while phases and phases[0].ended_s < self._update_began_s:  # nobody waits for that any more
                phases.popleft()

    def phases(self) -> deque[Phase]:
        """What this thread has done since the present update began, oldest first, and maybe something before."""
        if not hasattr(self._own, "phases"):
            self._own.phases = deque()
        phases: deque[Phase] = self._own.phases
        return phases

    def settle(self, *, wait: bool) -> None:
        """Books the updates that devices have got behind; all of them, waiting for the devices, if `wait` is set."""
        if not self._settling.acquire(blocking=wait):
            return  # another thread is asking for a report
        try:
            self._settle(wait=wait)
        finally:
            self._settling.release()

    def _settle(self, *, wait: bool) -> None:
        while self._updates:
            update = self._updates[0]
            if not wait and not update.ended.is_reached():
                return
            self._updates.popleft()
            took_s, host_s = update.ended.seconds_since(update.began), sum(update.host_s.values())
            # An accelerator with work in store loses less time than its host; one that stands still for longer waits
            # for copies.
            share = min(1.0, took_s / host_s)
            for cause, seconds in update.host_s.items():
                update.step.tax_s[cause] += seconds * share
            update.step.tax_s[Cause.COPY] += max(0.0, took_s - host_s)

    def _count(self, phase: Phase, change: int, now: float) -> None:
        with self._mutex:
            self._working.change(change, now)
            if phase.cause is Cause.DRIVE:
                self._reading.change(change, now)


class _Busy:
    """The length of a union of intervals; read without a lock, which a fork could leave taken."""

    def __init__(self) -> None:
        self._state = 0.0, 0, 0.0  # the length so far, intervals open, since when any is

    def until(self, now: float) -> float:
        total_s, count, since_s = self._state
        return total_s + (max(0.0, now - since_s) if count else 0.0)

    def change(self, change: int, now: float) -> None:
        total_s, count, since_s = self._state
        if count == 0:
            self._state = total_s, change, now
        elif count + change:
            self._state = total_s, count + change, since_s
        else:
            self._state = total_s + now - since_s, 0, now


def split(began_s: float, ended_s: float, phases: Sequence[Phase]) -> dict[Cause, float]:
    """How much of the time from `began_s` to `ended_s` went to which cause, given what a thread did in its course.

    What lies between phases is software.
    """
    parts = dict.fromkeys(Cause, 0.0)
    for phase in phases:
        parts[phase.cause] += max(0.0, min(ended_s, phase.ended_s) - max(began_s, phase.began_s))
    parts[Cause.SOFTWARE] += max(0.0, ended_s - began_s - sum(parts.values()))
    return parts
