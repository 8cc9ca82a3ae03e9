"""Blocks: what they hold, where their bytes are, and how tokens map into them.

A block is `block_size` consecutive tokens of one layer, keys and values of all batch rows and KV heads. Blocks sealed
together and kept in one tier form a *run*, laid out piece by piece, `[num_pieces, batch, heads, piece_length,
head_dim]` for keys, then the same for values; a codec may store these otherwise. Where the drive fills slots itself an
exact run is one piece: it scatters one row a head, and few long rows cost less than many short ones. Elsewhere a piece
is a block, one range that can travel alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from .placement import Tier
from .quantization import Codec, Exact, Part
from .shards import Section, Sections, Shard
from .states import LayerSpec, States, StateSpec

Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Parts: TypeAlias = tuple[torch.Tensor, ...]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is laid out: keys and values, `[num_pieces, batch, heads, piece_length, head_dim]`, and codecs."""

    spec: LayerSpec
    batch_size: int
    codecs: tuple[Codec, Codec]
    num_pieces: int
    piece_length: int

    @property
    def kinds(self) -> tuple[StateSpec, StateSpec]:
        """Heads, widths and dtypes of keys and values."""
        return self.spec.keys, self.spec.values

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of keys and values."""
        return [
            (self.num_pieces, self.batch_size, kind.num_heads, self.piece_length, kind.head_dim) for kind in self.kinds
        ]

    @property
    def parts(self) -> list[list[Part]]:
        """What keys and values are stored as."""
        every = zip(self.codecs, self.shapes, self.kinds, strict=True)
        return [codec.parts(shape, kind.dtype) for codec, shape, kind in every]

    @property
    def is_exact(self) -> bool:
        """Whether keys and values are both stored as they are."""
        return all(isinstance(codec, Exact) for codec in self.codecs)

    @property
    def storage(self) -> dict[str, str]:
        """How keys and values are stored, for a shard's metadata; nothing if as they are."""
        named = zip(("keys", "values"), self.codecs, strict=True)
        return {} if self.is_exact else {f"{name}_codec": codec.describe() for name, codec in named}

    @property
    def length(self) -> int:
        """Tokens laid out."""
        return self.num_pieces * self.piece_length

    @property
    def nbytes(self) -> int:
        """Size in bytes, as stored."""
        return sum(part.nbytes for parts in self.parts for part in parts)

    @property
    def sections(self) -> tuple[Sections, Sections]:
        """The same as sections of a shard."""
        keys, values = (
            tuple(
                Section.of(f"{name}_{part.name}".rstrip("_"), part.shape, part.dtype, self.piece_length)
                for part in parts
            )
            for name, parts in zip(("keys", "values"), self.parts, strict=True)
        )
        return keys, values


@dataclass(frozen=True, slots=True)
class ResidentBlocks:
    """The blocks of a run kept in memory: what its keys are stored as, what its values, and their bytes in all."""

    parts: tuple[Parts, Parts]
    nbytes: int


class WarmBlocks:
    """Blocks of a snapshot that are to stay in host memory: once they have been read, which is when they are needed.

    Args:
        shard: Where they are until then.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._parts: dict[int, Parts] = {}

    @property
    def nbytes(self) -> int:
        """Size in bytes as stored."""
        return self.shard.nbytes

    @property
    def parts(self) -> tuple[Parts, Parts] | None:
        """What keys are stored as, and values; None until both have been read."""
        return (self._parts[0], self._parts[1]) if len(self._parts) == 2 else None

    def keep(self, index: int, parts: Parts) -> None:
        """Takes keys (0) or values (1) that have been read into host memory of their own."""
        self._parts[index] = parts


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one layer, sealed together and kept in one tier. The bytes never change.

    Attributes:
        tier: Where the bytes are.
        blocks: The bytes themselves: tensors, a shard on the drive, or one that becomes tensors.
        layout: How tokens, all that were sealed, lie in them.
        length: How many of the run's tokens, from the first, still count.
        rows: For each of the layer's present batch rows the row as sealed, int64 on CPU; None while they are the same.
    """

    tier: Tier
    blocks: ResidentBlocks | WarmBlocks | Shard
    layout: Layout
    length: int
    rows: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes of the run as stored."""
        return self.blocks.nbytes

    @property
    def is_whole(self) -> bool:
        """Whether every token sealed still counts."""
        return self.length == self.layout.length

    def warm(self) -> "BlockRun":
        """The run, on the drive, as one that stays in host memory once it has been read."""
        assert isinstance(self.blocks, Shard)
        return replace(self, tier=Tier.HOST, blocks=WarmBlocks(self.blocks))

    def on_device(self, device: torch.device) -> "BlockRun":
        """The run with what it has in device memory on `device`."""
        if self.tier is not Tier.DEVICE or not isinstance(self.blocks, ResidentBlocks):
            return self
        keys, values = (tuple(part.to(device) for part in parts) for parts in self.blocks.parts)
        return replace(self, blocks=ResidentBlocks((keys, values), self.blocks.nbytes))

    def with_rows(self, index: torch.Tensor) -> "BlockRun":
        """The run as seen by a batch whose row `i` is the present row `index[i]`."""
        return replace(self, rows=index if self.rows is None else self.rows[index])


def pack(blocks: torch.Tensor, start: int, states: torch.Tensor) -> Iterator[Copy]:
    """The copies that lay tokens out in blocks.

    Args:
        blocks: Target, `[num_pieces, batch, heads, piece_length, head_dim]`.
        start: Token of the target at which `states` begin.
        states: `[batch, heads, seq_length, head_dim]`.

    Yields:
        Pairs of target and source views of equal shape.
    """
    piece_length = blocks.shape[3]
    while states.shape[2]:
        piece, offset = divmod(start, piece_length)
        whole = 0 if offset else states.shape[2] // piece_length
        if whole:
            count = whole * piece_length
            source = states[:, :, :count].unflatten(2, (whole, piece_length))
            yield blocks[piece : piece + whole], source.permute(2, 0, 1, 3, 4)
        else:
            count = min(piece_length - offset, states.shape[2])
            yield blocks[piece, :, :, offset : offset + count], states[:, :, :count]
        start, states = start + count, states[:, :, count:]


def unpack(
    states: torch.Tensor, piece_length: int, rows: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, tuple[slice, slice]]]:
    """How blocks are laid out as tokens.

    Args:
        states: Target, `[batch, heads, length, head_dim]`; `length` tokens are taken from the blocks.
        piece_length: Tokens in a piece.
        rows: The stored row of each of the target's rows; None if they are the same.

    Yields:
        A view of the target, `[num_pieces, batch, heads, tokens, head_dim]`, and which pieces and stored rows go there;
        `tokens` are the first of a piece.
    """
    whole, rest = divmod(states.shape[2], piece_length)
    pairs = [(slice(None), slice(None))]
    if rows is not None:
        pairs = [(slice(row, row + 1), slice(stored, stored + 1)) for row, stored in enumerate(rows.tolist())]
    for row, stored in pairs:
        if whole:
            target = states[row, :, : whole * piece_length].unflatten(2, (whole, piece_length))
            yield target.permute(2, 0, 1, 3, 4), (slice(whole), stored)
        if rest:
            yield states[row, :, whole * piece_length :].unsqueeze(0), (slice(whole, whole + 1), stored)


def merged_rows(parts: Sequence[States]) -> tuple[list[States], torch.Tensor | None]:
    """Consecutive states with each batch row that is there several times, bit for bit, only once.

    Beams and several return sequences begin with rows that are all the same.

    Returns:
        The states, and for each batch row where it is now, int64 on CPU; None if all rows differ.
    """
    kept: list[int] = []
    rows: list[int] = []
    for row in range(parts[0][0].shape[0]):
        same = [place for place, earlier in enumerate(kept) if _are_same(parts, row, earlier)]
        rows.append(same[0] if same else len(kept))
        kept += [] if same else [row]
    if len(kept) == len(rows):
        return list(parts), None
    index = torch.tensor(kept, device=parts[0][0].device)
    return [(keys[index], values[index]) for keys, values in parts], torch.tensor(rows, device="cpu")


def _are_same(parts: Sequence[States], row: int, other: int) -> bool:
    bits = [states.view(_BITS[states.dtype.itemsize]) for part in parts for states in part]  # 0.0 is not -0.0
    newest = bits[-2][:, :, -1]  # most rows that differ do so here
    if not torch.equal(newest[row], newest[other]):
        return False
    return all(torch.equal(states[row], states[other]) for states in bits)


def cut(states: Sequence[States], start: int, length: int) -> list[States]:
    """The part of consecutive `states` that covers `length` tokens from `start` on."""
    parts = []
    for keys, values in states:
        count = max(0, min(keys.shape[2] - start, length))
        if count:
            parts.append((keys[:, :, start : start + count], values[:, :, start : start + count]))
        start, length = max(0, start - keys.shape[2]), length - count
    return parts
