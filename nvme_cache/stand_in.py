"""Stand-ins: tensors with a shape, a dtype and a device, but without memory."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only


class StandIn(torch.Tensor):
    """A tensor that stands for numbers that are nowhere laid out.

    Who knows it asks it for them. Any operation lays it out and goes on with the result.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """One of this shape, dtype and device."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def laid_out(self) -> torch.Tensor:
        """What it stands for, in memory."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(StandIn, lambda stand_in: stand_in.laid_out(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
