"""StreamingMixin: how a cache serves models that attend with "nvme_streaming"."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .errors import NVMeCacheError
from .feed import Feed, Visit
from .guards import Forward
from .handles import STREAMING, Streamed
from .layers import NVMeLayer
from .pager import Pager
from .segments import Segment
from .states import States
from .sweep import Sweep


def streams(module: Any, *states: torch.Tensor) -> bool:
    """Whether an attention module reads handles, and nothing needs gradients that would have to go through them."""
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != STREAMING:
        return False
    return not (torch.is_grad_enabled() and any(part.requires_grad for part in states))


class StreamingMixin:
    """The part of a cache that hands out handles and reads for them."""

    _pager: Pager
    _sweep: Sweep
    _feed: Feed
    _forward: Forward

    if TYPE_CHECKING:  # what the cache itself provides

        def _owned(self) -> AbstractContextManager[None]: ...
        def _paged_layers(self) -> dict[int, NVMeLayer]: ...

    def _stream(self, layer: NVMeLayer, key_states: torch.Tensor, value_states: torch.Tensor, module: Any) -> States:
        """Adds tokens to a layer and returns handles for all it holds."""
        if not layer.is_streamed:
            for other in self._paged_layers().values():
                other.is_streamed = other.can_stream  # until they say otherwise
        layer.prepare(key_states, value_states, lay_out=False)
        if layer.get_seq_length() == 0:
            return layer.extend(key_states, value_states)
        segments, recent = layer.append(key_states, value_states)

        def read(visit: Visit) -> None:
            self._feed.read(segments, lambda: self._following(layer), self._at_work, visit)

        streamed = Streamed(
            type(module).__name__,
            layer.spec,
            layer.batch_size,
            layer.device,
            sealed_length=sum(segment.length for segment in segments),
            recent=recent,
            read=read,
            lay_out_from_now_on=layer.stop_streaming,
        )
        return streamed.handles()

    def _following(self, layer: NVMeLayer) -> Iterator[Segment]:
        """What attention reads after `layer`, one sweep long."""
        for following in (*self._sweep.following(layer, self._paged_layers()), layer):
            if following.is_streamed:
                yield from following.segments

    @contextmanager
    def _at_work(self, device: torch.device) -> Iterator[None]:
        """What the model waits for inside is what paging costs, and what goes wrong takes the forward back."""
        with self._owned():
            try:
                with self._pager.meter.update(partial(self._pager.timestamp, device)):
                    yield
            except BaseException as error:
                self._forward.roll_back()  # so that the same call may be made again
                if isinstance(error, NVMeCacheError):
                    self._pager.flush()  # what was taken back leaves the drive once nothing writes or reads it
                elif isinstance(error, RuntimeError):
                    self._pager.check()  # another thread may have closed the cache
                raise
