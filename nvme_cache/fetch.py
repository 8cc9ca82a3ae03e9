"""Laying runs out in a slot: what there is to read and to copy, and the tasks that do it on reader threads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .blocks import BlockRun, ResidentBlocks, unpack
from .buffers import StagingPool
from .shards import Section, Shard
from .slots import Slot
from .transfer import Transfer


@dataclass(frozen=True, slots=True)
class Read:
    """One section of a shard on its way to a slot.

    Attributes:
        shard: The file.
        section: Its keys or its values.
        target: Where the tokens go, `[batch, heads, length, head_dim]`.
        batch_rows: For each of the target's batch rows the row as sealed; None if they are the same.
        rows: Where the drive can fill the slot directly, the places in file order; None to go through staging.
    """

    shard: Shard
    section: Section
    target: torch.Tensor
    batch_rows: torch.Tensor | None
    rows: list[memoryview] | None


@dataclass(frozen=True, slots=True)
class Resident:
    """Blocks in memory, `[num_blocks, batch, heads, block_size, head_dim]`, on their way to a slot, as in `Read`."""

    blocks: torch.Tensor
    target: torch.Tensor
    batch_rows: torch.Tensor | None


def plan(slot: Slot, runs: Sequence[BlockRun]) -> tuple[list[Read], list[Resident]]:
    """What brings `runs` into a freshly laid out `slot`, from its first token on; the slot counts as filled by it."""
    reads: list[Read] = []
    residents: list[Resident] = []
    for run in runs:
        for index, states in enumerate((slot.keys, slot.values)):
            target = states[:, :, slot.filled : slot.filled + run.length]
            if isinstance(run.blocks, ResidentBlocks):
                residents.append(Resident((run.blocks.keys, run.blocks.values)[index], target, run.rows))
            else:
                section = run.blocks.sections[index]
                as_sealed = run.rows is None and run.is_whole and section.dtype == states.dtype
                rows = slot.rows(states, slot.filled, run.num_blocks, run.block_size) if as_sealed else None
                reads.append(Read(run.blocks, section, target, run.rows, rows))
        slot.filled += run.length
    return reads, residents


def split(reads: Sequence[Read], count: int) -> list[list[Read]]:
    """At most `count` consecutive groups of about equal bytes, one for each thread."""
    groups: list[list[Read]] = []
    total, done = sum(read.section.nbytes for read in reads), 0
    for read in reads:
        if not groups or done * count >= total * len(groups):
            groups.append([])
        groups[-1].append(read)
        done += read.section.nbytes
    return groups


def read_all(
    reads: Sequence[Read], transfer: Transfer, staging: StagingPool, after: torch.Event | None, verify: bool
) -> torch.Event | None:
    """Reads sections into their slot, the copies not before `after`.

    Returns:
        The event behind the last copy.

    Raises:
        NVMeCacheError: a shard is damaged, unreadable, or could not be written in the first place.
    """
    event = None
    for read in reads:
        read.shard.written.result()
        if read.rows is not None:
            read.shard.read(read.section, read.rows, verify=verify)
        else:
            event = _read_staged(read, transfer, staging, after, verify)
    return event


def _read_staged(
    read: Read, transfer: Transfer, staging: StagingPool, after: torch.Event | None, verify: bool
) -> torch.Event | None:
    buffer = staging.acquire(read.section.padded_nbytes)
    event = None
    try:
        read.shard.read(read.section, [buffer.view[: read.section.padded_nbytes]], verify=verify)
        blocks = buffer.tensor(read.section.shape, read.section.dtype)
        event = copy_all([Resident(blocks, read.target, read.batch_rows)], transfer, after)
    finally:
        staging.release(buffer, event)  # handed out again only once the copy has read it
    return event


@torch.no_grad()
def copy_all(residents: Sequence[Resident], transfer: Transfer, after: torch.Event | None) -> torch.Event | None:
    """Copies blocks into their slot on the side stream, not before `after`; returns the event behind the copies."""
    with transfer.side_stream(after):
        for resident in residents:
            for target, source in unpack(resident.target, resident.blocks, resident.batch_rows):
                transfer.copy(target, source)
    return transfer.record()
