"""Laying runs out in a slot: what there is to read and to copy, and the tasks that do it on reader threads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .blocks import BlockRun, ResidentBlocks, unpack
from .buffers import StagingPool, shaped
from .errors import NVMeCacheError
from .shards import Section, Shard
from .slots import Slot
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
        batch_rows: For each of the slot's batch rows the row as sealed; None if they are the same.
    """

    slot: Slot
    index: int
    start: int
    length: int
    batch_rows: torch.Tensor | None

    def copy(self, blocks: torch.Tensor, transfer: Transfer) -> None:
        """Lays out `blocks`, `[num_pieces, batch, heads, piece_length, head_dim]`, inside `transfer.side_stream`."""
        blocks = blocks[: -(-self.length // blocks.shape[3])]
        near = transfer.on_device(blocks)
        if near is not blocks:
            transfer.copy(near, blocks)
        states = (self.slot.keys, self.slot.values)[self.index][:, :, self.start : self.start + self.length]
        for target, source in unpack(states, near, self.batch_rows):
            transfer.copy(target, source)


@dataclass(frozen=True, slots=True)
class Read:
    """Sections of a shard, one behind the other, on their way to a slot.

    Attributes:
        shard: The file.
        sections: Its keys, its values, or both.
        targets: Where the blocks of each go.
        rows: Where the drive can fill the slot directly, the places in file order for each section; None to go through
            staging.
    """

    shard: Shard
    sections: tuple[Section, ...]
    targets: tuple[Target, ...]
    rows: list[list[memoryview]] | None

    @property
    def nbytes(self) -> int:
        """Size in bytes of the blocks."""
        return sum(section.nbytes for section in self.sections)


@dataclass(frozen=True, slots=True)
class Resident:
    """Blocks in memory, `[num_pieces, batch, heads, piece_length, head_dim]`, on their way to a slot."""

    blocks: torch.Tensor
    target: Target


def plan(slot: Slot, runs: Sequence[BlockRun]) -> tuple[list[Read], list[Resident]]:
    """What brings `runs` into a freshly laid out `slot`, from its first token on; the slot counts as filled by it."""
    reads: list[Read] = []
    residents: list[Resident] = []
    for run in runs:
        targets = tuple(Target(slot, index, slot.filled, run.length, run.rows) for index in range(2))
        if isinstance(run.blocks, ResidentBlocks):
            residents += map(Resident, (run.blocks.keys, run.blocks.values), targets)
        else:
            reads += _reads(run, run.blocks, targets)
        slot.filled += run.length
    return reads, residents


def _reads(run: BlockRun, shard: Shard, targets: Sequence[Target]) -> Iterator[Read]:
    pairs = list(zip(shard.sections, targets, strict=True))
    # Large shards are worth two threads; small ones are read in one go, since calls cost more than bytes.
    for part in [pairs] if run.nbytes < _WORTH_SPLITTING else [[pair] for pair in pairs]:
        rows = []
        if run.rows is None and run.is_whole:
            for section, target in part:
                places = target.slot.rows(target.index, section.dtype, target.start, section.shape)
                rows += [] if places is None else [places]
        sections, own = zip(*part, strict=True)
        yield Read(shard, sections, own, rows if len(rows) == len(part) else None)


def split(reads: Sequence[Read], count: int) -> list[list[Read]]:
    """At most `count` consecutive groups of about equal bytes, one for each thread."""
    groups: list[list[Read]] = []
    total, done = sum(read.nbytes for read in reads), 0
    for read in reads:
        if not groups or done * count >= total * len(groups):
            groups.append([])
        groups[-1].append(read)
        done += read.nbytes
    return groups


def read_all(reads: list[Read], transfer: Transfer, staging: StagingPool, after: Event, verify: bool) -> Event:
    """Reads sections into their slot, the copies not before `after`, and empties `reads`.

    Returns:
        The event behind the last copy.

    Raises:
        NVMeCacheError: a shard is damaged or unreadable.
        NotWrittenError: a shard could not be written in the first place.
    """
    while reads:  # a task that is done must hold no shard: its file may have to go now
        read = reads.pop(0)
        try:
            read.shard.written.result()
        except NVMeCacheError as error:
            raise NotWrittenError from error
        if reads:
            reads[0].shard.expect(reads[0].sections)
        if read.rows is not None:
            read.shard.read(read.sections, read.rows, verify=verify)
        else:
            _read_staged(read, transfer, staging, after, verify)
    return transfer.record()


def _read_staged(read: Read, transfer: Transfer, staging: StagingPool, after: Event, verify: bool) -> None:
    buffer = staging.acquire(sum(section.padded_nbytes for section in read.sections))
    try:
        views, residents, at = [], [], 0
        for section, target in zip(read.sections, read.targets, strict=True):
            end = at + section.padded_nbytes
            views.append([buffer.view[at:end]])
            residents.append(Resident(shaped(buffer.bytes[at:end], section.shape, section.dtype), target))
            at = end
        read.shard.read(read.sections, views, verify=verify)
        copy_all(residents, transfer, after)
    finally:
        staging.release(buffer, transfer.record())  # handed out again only once the copy has read it


@torch.no_grad()
def copy_all(residents: Sequence[Resident], transfer: Transfer, after: Event) -> Event:
    """Copies blocks into their slot on the side stream, not before `after`; returns the event behind the copies."""
    with transfer.side_stream(after):
        for resident in residents:
            resident.target.copy(resident.blocks, transfer)
    return transfer.record()
