"""What one layer holds: its sealed runs, and behind them its tail."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .blocks import BlockRun
from .placement import Tier
from .states import LayerSpec, States, StateSpec


class Tail:
    """The newest tokens of a layer, at full precision on the layer's device.

    Args:
        spec: Heads, widths and dtypes.
        batch_size: Batch rows.
        capacity: Tokens it usually holds at most; for more it grows.
        device: The layer's device.

    Attributes:
        length: Tokens held.
        exposed: Tokens that views handed out may show.
    """

    def __init__(self, spec: LayerSpec, batch_size: int, capacity: int, device: torch.device) -> None:
        self.length = self.exposed = 0
        self._spec, self._batch_size, self._device = spec, batch_size, device
        self._buffers = self._made(capacity)

    def append(self, states: States) -> None:
        """Adds tokens, `[batch, heads, seq_length, head_dim]` each."""
        end, capacity = self.length + states[0].shape[2], self._buffers[0].shape[2]
        # After a crop someone may still be reading what would be written over.
        if end > capacity or self.length < self.exposed:
            fresh = self._made(capacity if end <= capacity else max(end, 2 * capacity))
            for buffer, held in zip(fresh, self.states(), strict=True):
                buffer[:, :, : self.length].copy_(held)
            self._buffers, self.exposed = fresh, 0
        for buffer, new in zip(self._buffers, states, strict=True):
            buffer[:, :, self.length : end].copy_(new)
        self.length = end

    def states(self, start: int = 0) -> States:
        """Keys and values from token `start` of the tail on."""
        keys, values = self._buffers
        return keys[:, :, start : self.length], values[:, :, start : self.length]

    @torch.inference_mode(False)  # buffers born in inference mode could not be written outside it
    def _made(self, capacity: int) -> States:
        def buffer(kind: StateSpec) -> torch.Tensor:
            # Tokens side by side in memory: only as many pages are touched as there are tokens.
            shape = (capacity, self._batch_size, kind.num_heads, kind.head_dim)
            return torch.empty(shape, dtype=kind.dtype, device=self._device).permute(1, 2, 0, 3)

        return buffer(self._spec.keys), buffer(self._spec.values)


@dataclass(frozen=True)
class History:
    """All tokens of a layer, replaced as a whole so that an interrupt finds it before or after a change, never between.

    Attributes:
        runs: Sealed blocks, oldest first.
        sealed_length: Tokens in them.
        tail: The tokens behind them.
    """

    runs: tuple[BlockRun, ...]
    sealed_length: int
    tail: Tail

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.sealed_length + self.tail.length

    @cached_property  # runs grow in number, and each update asks
    def used_bytes(self) -> Counter[Tier]:
        """Bytes of the sealed blocks by tier, as stored."""
        used: Counter[Tier] = Counter()
        for run in self.runs:
            used[run.tier] += run.nbytes
        return used

    def cropped_runs(self, length: int) -> tuple[BlockRun, ...]:
        """The runs that hold the first `length` sealed tokens, the last of them shortened if need be."""
        kept: list[BlockRun] = []
        for run in self.runs:
            if length > 0:
                kept.append(replace(run, length=min(run.length, length)))
            length -= run.length
        return tuple(kept)

    def selected_runs(self, rows: torch.Tensor) -> tuple[BlockRun, ...]:
        """The runs as seen by a batch whose row `i` is the present row `rows[i]`; those sealed alike share an index."""
        composed: dict[int, BlockRun] = {}
        return tuple(
            replace(run, rows=composed.setdefault(id(run.rows), run.with_rows(rows)).rows) for run in self.runs
        )
