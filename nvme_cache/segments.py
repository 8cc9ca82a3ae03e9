"""Segments: the portions in which attention reads a layer's sealed runs, the largest as large as a shard.

What is read a segment at a time is never laid out whole, so the memory it takes does not grow with the context. Runs
that a prompt sealed are segments of their own; small ones, which decoding seals block by block, are read together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from .blocks import BlockRun, ResidentBlocks, WarmBlocks
from .placement import Tier
from .shards import MAX_SECTION_BYTES
from .states import LayerSpec, States

_MAX_BYTES = 2 * MAX_SECTION_BYTES  # laid out, keys and values; a run that is larger stays whole
_WORTH_READING_ALONE = 1 << 20  # bytes of a resident run; a smaller one is copied beside its neighbours


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive runs of one layer that attention reads together.

    Attributes:
        runs: The runs, all sealed for the same batch.
        start: Their first token.
        spec: The layer's heads, widths and dtypes.
        device: Where the layer computes.
    """

    runs: tuple[BlockRun, ...]
    start: int
    spec: LayerSpec
    device: torch.device

    @property
    def length(self) -> int:
        """Tokens."""
        return sum(run.length for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Size in bytes as stored."""
        return sum(run.nbytes for run in self.runs)

    @property
    def laid_out_nbytes(self) -> int:
        """Size in bytes as keys and values."""
        return self.spec.nbytes(self.length) * self.batch_size

    @property
    def batch_size(self) -> int:
        """Batch rows as sealed."""
        return self.runs[0].layout.batch_size

    @property
    def rows(self) -> torch.Tensor | None:
        """For each present batch row the one as sealed, int64 on CPU; None if they are the same."""
        return self.runs[0].rows

    @property
    def stored_runs(self) -> list[BlockRun]:
        """The runs with the batch rows they were sealed with: each row is read once, however many go by it now."""
        return [replace(run, rows=None) for run in self.runs]

    def is_laid_out_as(self, other: "Segment") -> bool:
        """Whether both lay out the same tokens in the same way, whichever batch rows go by them."""
        if (self.spec, self.device, len(self.runs)) != (other.spec, other.device, len(other.runs)):
            return False
        pairs = zip(self.runs, other.runs, strict=True)
        return all(mine.blocks is its.blocks and mine.length == its.length for mine, its in pairs)

    @property
    def in_place(self) -> States | None:
        """Keys and values where they are kept, `[batch, heads, length, head_dim]`; None if they must be laid out."""
        run = self.runs[0]
        if len(self.runs) > 1 or not _may_stay(run, self.spec, self.device):
            return None
        assert isinstance(run.blocks, (ResidentBlocks, WarmBlocks))
        if run.blocks.parts is None:
            return None
        keys, values = (part[0] for part in run.blocks.parts)
        return keys[0][:, :, : run.length], values[0][:, :, : run.length]


def segments_of(
    runs: Iterable[BlockRun], spec: LayerSpec, device: torch.device, known: Sequence[Segment] = ()
) -> list[Segment]:
    """The segments of a layer's runs, in the order to read them.

    Those that need not be laid out are spread evenly among the others: the drive is busy while attention is. Were they
    read first, it would have nothing to do meanwhile.

    Args:
        runs: The runs, oldest first.
        spec: The layer's present heads, widths and dtypes.
        device: Where the layer computes.
        known: Segments of the same layer at another time; those that still hold are given again.
    """
    grouped: list[list[BlockRun]] = []
    for run in runs:
        if not grouped or not _fits(grouped[-1], run, spec, device):
            grouped.append([])
        grouped[-1].append(run)
    earlier = {segment.start: segment for segment in known}
    kinds: tuple[list[Segment], list[Segment]] = ([], [])
    start = 0
    for group in grouped:
        segment = Segment(tuple(group), start, spec, device)
        before = earlier.get(start)
        if before is not None and before.rows is segment.rows and before.is_laid_out_as(segment):
            segment = before
        kinds[len(group) == 1 and _may_stay(group[0], spec, device)].append(segment)
        start += segment.length
    placed = [
        ((index + 0.5) / len(kind), segment.start, segment) for kind in kinds for index, segment in enumerate(kind)
    ]
    return [segment for *_, segment in sorted(placed, key=lambda entry: entry[:2])]


def _fits(group: Sequence[BlockRun], run: BlockRun, spec: LayerSpec, device: torch.device) -> bool:
    first = group[0]
    if run.rows is not first.rows or run.layout.batch_size != first.layout.batch_size:
        return False
    if any(_may_stay(one, spec, device) and one.nbytes >= _WORTH_READING_ALONE for one in (first, run)):
        return False
    length = sum(one.length for one in group) + run.length
    return spec.nbytes(length) * run.layout.batch_size <= _MAX_BYTES


def _may_stay(run: BlockRun, spec: LayerSpec, device: torch.device) -> bool:
    """Whether attention can read the run where it is kept: as tokens lie, of the right dtypes, on its device."""
    near = run.tier is Tier.DEVICE or (run.tier is Tier.HOST and device.type == "cpu")
    return near and run.layout.is_exact and run.layout.num_pieces == 1 and run.layout.spec == spec
