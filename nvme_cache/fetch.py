"""Laying runs out in a slot: what there is to read and to copy, and the tasks that do it on reader threads."""

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from threading import Semaphore
from typing import TypeVar

import torch

from .blocks import BlockRun, Parts, WarmBlocks, unpack
from .buffers import HostBuffer, StagingPool
from .errors import NVMeCacheError
from .meter import Cause, Meter, Phase
from .quantization import Codec, Exact
from .shards import Sections, Shard, spread, staged
from .slots import Check, Slot
from .transfer import Event, Transfer

_WORTH_SPLITTING = 8 << 20  # bytes


class NotWrittenError(Exception):
    """A shard to be read has not reached the drive; the writer knows why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where blocks go in a slot. It holds no view: while one exists, the slot counts as held by someone outside.

    Attributes:
        slot: The slot.
        index: 0 for keys, 1 for values.
        start: First token.
        length: Tokens.
        codec: How they are stored.
        piece_length: Tokens in a piece.
        batch_rows: For each of the slot's batch rows the row as sealed; None if they are the same.
    """

    slot: Slot
    index: int
    start: int
    length: int
    codec: Codec
    piece_length: int
    batch_rows: torch.Tensor | None

    def copy(self, parts: Parts, transfer: Transfer) -> None:
        """Lays out blocks given as stored; inside `transfer.side_stream`."""
        states = (self.slot.keys, self.slot.values)[self.index][:, :, self.start : self.start + self.length]
        near = [_brought(part[: -(-self.length // self.piece_length)], transfer) for part in parts]
        for target, where in unpack(states, self.piece_length, self.batch_rows):
            transfer.convert(self.codec.decode, [part[where] for part in near], target)


@dataclass(frozen=True, slots=True)
class Read:
    """Sections of a shard, one behind the other, on their way to a slot.

    Attributes:
        shard: The file.
        groups: What its keys consist of, its values, or both.
        targets: Where each group goes.
        rows: Where the drive can fill the slot directly, the places in file order for each section; None to go through
            staging.
        warm: What keeps them in memory from then on, if anything.
    """

    shard: Shard
    groups: tuple[Sections, ...]
    targets: tuple[Target, ...]
    rows: list[list[memoryview]] | None
    warm: WarmBlocks | None

    @property
    def sections(self) -> Sections:
        """All sections."""
        return tuple(chain(*self.groups))

    @property
    def nbytes(self) -> int:
        """Size in bytes of the blocks."""
        return sum(section.nbytes for section in self.sections)


@dataclass(frozen=True, slots=True)
class Resident:
    """Blocks in memory, as stored, on their way to a slot."""

    parts: Parts
    target: Target

    @property
    def nbytes(self) -> int:
        """Size in bytes of the blocks."""
        return sum(part.nbytes for part in self.parts)


_Work = TypeVar("_Work", Read, Resident)


def plan(slot: Slot, runs: Sequence[BlockRun], *, in_parts: bool) -> tuple[list[Read], list[Resident]]:
    """What brings `runs` into a freshly laid out `slot`, from its first token on; the slot counts as filled by it.

    Args:
        slot: The slot.
        runs: What to lay out.
        in_parts: Whether several threads will read.
    """
    reads: list[Read] = []
    residents: list[Resident] = []
    for run in runs:
        targets = tuple(
            Target(slot, index, slot.filled, run.length, codec, run.layout.piece_length, run.rows)
            for index, codec in enumerate(run.layout.codecs)
        )
        if isinstance(run.blocks, Shard):
            reads += _reads(run, run.blocks, targets, None, in_parts=in_parts)
        elif run.blocks.parts is not None:
            residents += map(Resident, run.blocks.parts, targets)
        elif isinstance(run.blocks, WarmBlocks):
            reads += _reads(run, run.blocks.shard, targets, run.blocks, in_parts=in_parts)
        slot.filled += run.length
    return reads, residents


def _reads(
    run: BlockRun, shard: Shard, targets: Sequence[Target], warm: WarmBlocks | None, *, in_parts: bool
) -> Iterator[Read]:
    pairs = list(zip(shard.sections, targets, strict=True))
    # Large shards are worth two threads; small ones are read in one go, since calls cost more than bytes.
    for part in [[pair] for pair in pairs] if in_parts and run.nbytes >= _WORTH_SPLITTING else [pairs]:
        rows = []
        if run.rows is None and run.is_whole and warm is None:
            for sections, target in part:
                if isinstance(target.codec, Exact):
                    places = target.slot.rows(target.index, sections[0].dtype, target.start, sections[0].shape)
                    rows += [] if places is None else [places]
        groups, own = zip(*part, strict=True)
        yield Read(shard, groups, own, rows if len(rows) == len(part) else None, warm)


def split(work: Sequence[_Work], count: int) -> list[list[_Work]]:
    """At most `count` consecutive groups of about equal bytes, one for each thread."""
    groups: list[list[_Work]] = []
    total, done = sum(part.nbytes for part in work), 0
    for part in work:
        if not groups or done * count >= total * len(groups):
            groups.append([])
        groups[-1].append(part)
        done += part.nbytes
    return groups


@dataclass(frozen=True, slots=True)
class Filled:
    """What a task that fills a slot ends with.

    Attributes:
        event: Behind its last copy.
        ended_s: When it ended, by `time.perf_counter`.
        phases: What its thread did last, and goes on doing.
    """

    event: Event
    ended_s: float
    phases: deque[Phase]


@dataclass(frozen=True, slots=True)
class Filler:
    """Fills slots of one device, on reader threads.

    Attributes:
        transfer: The device's transfer.
        staging: Buffers between drive and slot, where the drive cannot fill it directly.
        meter: Told what takes how long.
        turns: Reads that may be under way at once. Threads that check or decode what they have read let the others read
            meanwhile; if all read at once, all would decode at once, and the drive would have nothing to do.
        verify: Whether what is read is checked.
    """

    transfer: Transfer
    staging: StagingPool
    meter: Meter
    turns: Semaphore
    verify: bool

    def read(self, reads: list[Read], after: Event, checks: list[Check] | None) -> Filled:
        """Reads sections into their slot, the copies not before `after`, and empties `reads`.

        What can be checked where it lies is left to who waits for it, if there are `checks` to add it to.

        Raises:
            NVMeCacheError: a shard is damaged or unreadable.
            NotWrittenError: a shard could not be written in the first place.
        """
        while reads:  # a task that is done must hold no shard: its file may have to go now
            read = reads.pop(0)
            with self.meter.phase(Cause.DRIVE, works=False):
                try:
                    read.shard.written.result()
                except NVMeCacheError as error:
                    raise NotWrittenError from error
            if reads:
                reads[0].shard.expect(reads[0].sections)
            if read.rows is not None:
                self._read(read, read.rows, checks)
            elif read.warm is None:
                self._read_staged(read, after)
            else:
                self._warm(read, read.warm, after)
        return self._filled(self.transfer.record())

    def copy(self, residents: Sequence[Resident], after: Event) -> Filled:
        """Copies blocks into their slot on the side stream, not before `after`."""
        self._copy(residents, after)
        return self._filled(self.transfer.record())

    def _read(self, read: Read, views: Sequence[Sequence[memoryview]], checks: list[Check] | None) -> None:
        with self.meter.phase(Cause.DRIVE, works=False):
            self.turns.acquire()
        try:
            with self.meter.phase(Cause.DRIVE):
                read.shard.read(read.sections, views)
        finally:
            self.turns.release()
        if self.verify or read.shard.needs_verifying(read.sections):
            check = partial(_check, weakref.ref(read.shard), read.sections, views)
            if checks is not None:
                checks.append(check)
            else:
                with self.meter.phase(Cause.CHECK):
                    check()

    def _read_staged(self, read: Read, after: Event) -> None:
        with self.meter.phase(Cause.STAGING, works=False):
            buffer = self.staging.acquire(sum(section.padded_nbytes for section in read.sections))
        try:
            self._copy(self._read_into(buffer, read), after)
        finally:
            self.staging.release(buffer, self.transfer.record())  # handed out again only once the copy has read it

    def _warm(self, read: Read, warm: WarmBlocks, after: Event) -> None:
        memory = self.transfer.host_memory(sum(section.padded_nbytes for section in read.sections))
        residents = self._read_into(HostBuffer(memory), read)
        self._copy(residents, after)
        for resident in residents:
            warm.keep(resident.target.index, resident.parts)

    def _read_into(self, buffer: HostBuffer, read: Read) -> list[Resident]:
        self._read(read, [[view] for view in spread(buffer.view, read.sections)], None)
        parts = iter(staged(buffer, read.sections))
        return list(map(Resident, [tuple(islice(parts, len(group))) for group in read.groups], read.targets))

    @torch.no_grad()
    def _copy(self, residents: Sequence[Resident], after: Event) -> None:
        exact = all(isinstance(resident.target.codec, Exact) for resident in residents)
        cause = Cause.COPY if exact else Cause.DEQUANTIZE
        with self.meter.phase(cause), self.transfer.side_stream(after):
            for resident in residents:
                resident.target.copy(resident.parts, self.transfer)

    def _filled(self, event: Event) -> Filled:
        return Filled(event, time.perf_counter(), self.meter.phases())


def _check(shard: weakref.ref[Shard], sections: Sections, views: Sequence[Sequence[memoryview]]) -> None:
    if (alive := shard()) is not None:  # else its tokens were dropped meanwhile
        alive.verify(sections, views)


def _brought(part: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    near = transfer.on_device(part)
    if near is not part:
        transfer.copy(near, part)
    return near
