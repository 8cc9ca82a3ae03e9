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
from .quantization import Codec
from .shards import Shard
from .states import States

Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Parts: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class ResidentBlocks:
    """The blocks of a run kept in memory: what its keys are stored as, what its values, and their bytes in all."""

    parts: tuple[Parts, Parts]
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one layer, sealed together and kept in one tier. The bytes never change.

    Attributes:
        tier: Where the bytes are.
        blocks: The bytes themselves: tensors, or a shard on the drive.
        codecs: How keys are stored, and values.
        piece_length: Tokens in a piece.
        sealed_length: Tokens as sealed.
        length: How many of the run's tokens, from the first, still count.
        rows: For each of the layer's present batch rows the row as sealed, int64 on CPU; None while they are the same.
    """

    tier: Tier
    blocks: ResidentBlocks | Shard
    codecs: tuple[Codec, Codec]
    piece_length: int
    sealed_length: int
    length: int
    rows: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes of the run as stored."""
        return self.blocks.nbytes

    @property
    def is_whole(self) -> bool:
        """Whether every token sealed still counts."""
        return self.length == self.sealed_length

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


def cut(states: Sequence[States], start: int, length: int) -> list[States]:
    """The part of consecutive `states` that covers `length` tokens from `start` on."""
    parts = []
    for keys, values in states:
        count = max(0, min(keys.shape[2] - start, length))
        if count:
            parts.append((keys[:, :, start : start + count], values[:, :, start : start + count]))
        start, length = max(0, start - keys.shape[2]), length - count
    return parts
