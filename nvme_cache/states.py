"""What one token's keys and values look like."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

States: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one token's keys (or values) of one layer look like: `[num_heads, head_dim]` of `dtype`."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, states: torch.Tensor) -> "StateSpec":
        """The spec of `states`, shaped `[batch, num_heads, seq_length, head_dim]`."""
        return cls(states.shape[1], states.shape[3], states.dtype)

    def nbytes(self, tokens: int) -> int:
        """Size in bytes of `tokens` tokens of one batch row."""
        return self.num_heads * self.head_dim * self.dtype.itemsize * tokens


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The specs of one layer's keys and values; they differ in width with MLA and in dtype under autocast."""

    keys: StateSpec
    values: StateSpec

    @classmethod
    def of(cls, key_states: torch.Tensor, value_states: torch.Tensor) -> "LayerSpec":
        """The spec of a layer that was given these states."""
        return cls(StateSpec.of(key_states), StateSpec.of(value_states))

    def nbytes(self, tokens: int) -> int:
        """Size in bytes of `tokens` tokens of one batch row, keys and values."""
        return self.keys.nbytes(tokens) + self.values.nbytes(tokens)

    @property
    def extents(self) -> tuple[int, ...]:
        """Heads and width of keys, then of values."""
        return self.keys.num_heads, self.keys.head_dim, self.values.num_heads, self.values.head_dim

    def promoted(self, other: "LayerSpec") -> "LayerSpec":
        """This spec with the dtypes that hold both this one's and `other`'s values, as concatenation promotes."""
        return LayerSpec(
            replace(self.keys, dtype=torch.promote_types(self.keys.dtype, other.keys.dtype)),
            replace(self.values, dtype=torch.promote_types(self.values.dtype, other.values.dtype)),
        )


def joined(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Both along the tokens in fresh memory, which autograd may keep, with gradients reaching `new`."""
    whole = past.new_empty((*past.shape[:2], past.shape[2] + new.shape[2], past.shape[3]))
    whole[:, :, : past.shape[2]] = past
    whole[:, :, past.shape[2] :] = new
    return whole
