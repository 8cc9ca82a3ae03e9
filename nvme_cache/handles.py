"""Handles: tensors that stand for what a layer holds, without its being laid out anywhere.

`update` returns a pair of them where the model attends with "nvme_streaming", which reads what they stand for a segment
at a time. To everything else they are tensors of the right shape, dtype and device: any operation on one lays the layer
out in memory and goes on with that, so that no model breaks; it only loses the benefit.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch

from .segments import Segment
from .stand_in import StandIn
from .states import LayerSpec, States

logger = logging.getLogger(__name__)

STREAMING = "nvme_streaming"
Read: TypeAlias = Callable[[Callable[[Segment, States], None]], None]
Visit: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor | None], None]


class Streamed:
    """All keys and values of a layer, as they are after an update and stay, whatever becomes of the layer.

    Args:
        name: What the model calls such a layer, for messages.
        spec: Heads, widths and dtypes.
        batch_size: Batch rows.
        device: Where the layer computes.
        sealed_length: Tokens that are read a segment at a time.
        recent: Those behind them, in memory.
        read: Has what it is given read every segment.
        lay_out_from_now_on: Tells the layer to be laid out whole from its next update on.
    """

    def __init__(
        self,
        name: str,
        spec: LayerSpec,
        batch_size: int,
        device: torch.device,
        *,
        sealed_length: int,
        recent: list[States],
        read: Read,
        lay_out_from_now_on: Callable[[], None],
    ) -> None:
        self._name = name
        self._spec, self._batch_size, self._device = spec, batch_size, device
        self._sealed_length, self._recent = sealed_length, recent
        self._read = read
        self._lay_out_from_now_on = lay_out_from_now_on
        self._laid_out: States | None = None
        self._was_read = False

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self._sealed_length + sum(keys.shape[2] for keys, _ in self._recent)

    def handles(self) -> States:
        """A tensor that stands for the keys, and one for the values, `[batch, heads, length, head_dim]`."""
        keys, values = (
            Handle.of((self._batch_size, kind.num_heads, self.length, kind.head_dim), kind.dtype, self._device)
            for kind in (self._spec.keys, self._spec.values)
        )
        keys.streamed = values.streamed = self
        keys.which, values.which = 0, 1
        return keys, values

    def read(self, visit: Visit) -> None:
        """Has `visit` read everything once, in portions.

        Args:
            visit: Given keys and values, `[stored rows, heads, length, head_dim]`, the position of their first token,
                and for each batch row which stored one it goes by; None if they are the same. It must keep no view of
                them.

        Raises:
            NVMeCacheError: a segment is damaged or unreadable, or something went wrong in the background.
        """
        if self._was_read or self._laid_out is not None:
            if self._was_read:  # by layers that share it, which would each read it again
                self._lay_out_from_now_on()
            visit(*self.laid_out(), 0, None)
            return
        self._was_read = True
        self._read_all(visit)

    def laid_out(self) -> States:
        """Keys and values in fresh memory, `[batch, heads, length, head_dim]`.

        Raises:
            NVMeCacheError: as `read`.
        """
        if self._laid_out is None:
            keys, values = (
                torch.empty((self._batch_size, kind.num_heads, self.length, kind.head_dim), dtype=kind.dtype,
                            device=self._device)
                for kind in (self._spec.keys, self._spec.values)
            )  # fmt: skip

            def copy(own_keys: torch.Tensor, own_values: torch.Tensor, start: int, rows: torch.Tensor | None) -> None:
                for target, states in ((keys, own_keys), (values, own_values)):
                    near = states if rows is None else states[rows.to(states.device)]
                    target[:, :, start : start + states.shape[2]] = near

            with torch.no_grad():
                self._read_all(copy)
            self._laid_out = keys, values
        return self._laid_out

    def needed_whole(self) -> States:
        """`laid_out`, for an operation that streaming does not know; the layer is laid out from now on."""
        _say_once(self._name)
        self._lay_out_from_now_on()
        return self.laid_out()

    def _read_all(self, visit: Visit) -> None:
        self._read(lambda segment, states: visit(*states, segment.start, segment.rows))
        start = self._sealed_length
        for keys, values in self._recent:
            visit(keys, values, start, None)
            start += keys.shape[2]


class Handle(StandIn):
    """A tensor that stands for a layer's keys, or its values, wherever they are.

    Attributes:
        streamed: What holds both.
        which: 0 for keys, 1 for values.
    """

    streamed: Streamed
    which: int

    def laid_out(self) -> torch.Tensor:
        """What it stands for, in memory; the layer is laid out whole from its next update on.

        Raises:
            NVMeCacheError: as `Streamed.read`.
        """
        return self.streamed.needed_whole()[self.which]


@cache
def _say_once(name: str) -> None:
    logger.warning(
        "%s does more with keys and values than attend to them, so they are laid out whole in memory: tokens are the "
        "same, but streaming brings nothing",
        name,
    )
