"""OffloadedNVMeCache: a transformers cache whose full-attention layers are paged."""

import copy
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

import torch
from torch._compile import _disable_dynamo
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from .arguments import check_at_least, parse_count, parse_folder, parse_host_budget
from .errors import CacheMisuseError
from .feed import Feed
from .guards import Forward, GenerateCall, Progress, Prompt, is_prefilling, module_above
from .layers import NVMeLayer
from .pager import Pager
from .placement import ASSUMED_LAYERS, BLOCK_SIZE, Budgets, Tier
from .quantization import QuantizationConfig, check_installed, parse_quantization, warn_of_exact
from .resident import batch_size_of, move, undo_of
from .snapshots import SnapshotMixin
from .store import Store
from .streaming import StreamingMixin, streams
from .sweep import Sweep
from .units import parse_size

if TYPE_CHECKING:
    from .report import TaxReport

logger = logging.getLogger(__name__)


class OffloadedNVMeCache(StreamingMixin, SnapshotMixin, DynamicCache):
    """A `DynamicCache` that keeps sealed blocks of keys and values in device memory, host memory and on NVMe.

    It returns bit for bit what `DynamicCache(config=...)` would. Sliding-window, linear-attention and other layers that
    do not grow with the context are transformers' own and stay resident.

    Args:
        ddp_cache_data: As for `DynamicCache`: tuples of keys and values, one a layer. A config given in this place is
            taken as `config`.
        config: The model's config. With it, layers are recognised as `DynamicCache` does and budgets are shared out
            evenly from the first token on; models with sliding or linear layers need it.
        offload_dir: Existing folder for shards, on a fast drive. Default: `$NVME_CACHE_DIR`, else a folder among
            Hugging Face's cached assets.
        block_size: Tokens in a block.
        device_budget: Bytes of sealed blocks that stay in device memory, or text such as "8GiB".
        host_budget: Bytes of sealed blocks that stay in host memory, likewise; "auto" for half of what is
            available now.
        disk_budget: Most bytes of shards on the drive, likewise; None for what the drive has.
        prefetch_depth: Layers fetched ahead of the one computing; device memory holds one more than that at full
            length. "auto" for 2 (3 if quantized), up to 4 where layers are so small that the drive would run dry.
        io_threads: Reads under way at once; "auto" for what a short test of the drive finds fastest.
        quantization: How sealed blocks are stored: None for exactly, "int8", "int4", "int2", "float8", or a
            `QuantizationConfig`. The first few tokens and the newest stay exact.
        verify: Whether every block read back is checked against its checksum.
        dynamic_cache_kwargs: `offloading` and `offload_only_non_sliding`, accepted for code that builds caches of the
            given type, and without effect: this cache offloads anyway.

    Raises:
        ConfigurationError: an argument has a value that cannot work.
        OffloadDirectoryError: `offload_dir` is missing, not a folder, or not writable.

    Example:
        >>> from nvme_cache import OffloadedNVMeCache
        >>> with OffloadedNVMeCache(config=model.config, host_budget="8GiB") as cache:
        ...     output = model.generate(**inputs, past_key_values=cache, max_new_tokens=200)
    """

    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[torch.Tensor | None, ...]] | PreTrainedConfig | None = None,
        config: PreTrainedConfig | None = None,
        *,
        offload_dir: str | os.PathLike[str] | None = None,
        block_size: int = BLOCK_SIZE,
        device_budget: int | str = 0,
        host_budget: int | str = "auto",
        disk_budget: int | str | None = None,
        quantization: str | QuantizationConfig | None = None,
        prefetch_depth: int | Literal["auto"] = "auto",
        io_threads: int | Literal["auto"] = "auto",
        verify: bool = True,
        **dynamic_cache_kwargs: bool,
    ) -> None:
        if "transformers.modeling_utils" in sys.modules:  # only who has a model needs it; importing it takes seconds
            from . import attention  # noqa: F401  makes it known

        if isinstance(ddp_cache_data, PreTrainedConfig):
            ddp_cache_data, config = None, ddp_cache_data
        if unknown := set(dynamic_cache_kwargs) - {"offloading", "offload_only_non_sliding"}:
            raise TypeError(f"OffloadedNVMeCache() got unexpected arguments: {', '.join(sorted(unknown))}")
        check_at_least("block_size", block_size, 1)
        depth = parse_count("prefetch_depth", prefetch_depth, 0)
        threads = parse_count("io_threads", io_threads, 1)
        budgets = Budgets(parse_size("device_budget", device_budget), parse_host_budget(host_budget))
        quantized = check_installed(parse_quantization(quantization))
        disk_bytes = None if disk_budget is None else parse_size("disk_budget", disk_budget)
        # Upstream's own dispatch names the layers, in every version and for every model it knows.
        given = config is not None or ddp_cache_data is not None
        stock = DynamicCache(ddp_cache_data, config=config).layers if given else []
        paged = sum(type(layer) is DynamicLayer for layer in stock)
        self._pager = Pager(
            Store(parse_folder(offload_dir), disk_bytes),
            budgets=budgets,
            num_layers=max(1, paged) if config is not None else ASSUMED_LAYERS,
            block_size=block_size,
            prefetch_depth=depth,
            io_threads=threads,
            quantization=quantized,
            verify=verify,
        )
        if quantized is not None and len(stock) > paged:
            warn_of_exact(tuple(sorted({type(layer).__name__ for layer in stock if type(layer) is not DynamicLayer})))
        self._config = config
        self._unsettled: set[int] = set()
        self._grows = not stock
        self._sweep = Sweep()
        self._feed = Feed(self._pager)
        self._busy = threading.RLock()  # an interrupt that leaves it taken does not lock its own thread out
        self._forward = Forward()
        self._prompt = Prompt()
        self._was_passed = False
        layers = [NVMeLayer(self._pager, i) if type(layer) is DynamicLayer else layer for i, layer in enumerate(stock)]
        Cache.__init__(self, layers=layers if stock else _GrowingLayers())
        for layer, filled in zip(layers, stock, strict=True):
            if type(filled) is DynamicLayer and filled.keys is not None:
                # Not through the cache: this is no forward, which would reach the other layers too.
                cast(NVMeLayer, layer).update(filled.keys, cast(torch.Tensor, filled.values))

    @_disable_dynamo  # graphs end here: compiled code could not wait for drives
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens to a layer and returns all it holds, `[batch, heads, seq_length, head_dim]` each.

        While the layer computes, the layers that follow it are fetched. What is returned stays valid until the layer's
        next update.

        Raises:
            NVMeCacheError: what went wrong in the background since the last call, or misuse.
        """
        with self._owned():
            while self._grows and len(self.layers) <= layer_idx:
                self.layers.append(NVMeLayer(self._pager, len(self.layers)))
            layer = self.layers[layer_idx]
            undo = layer.undo() if isinstance(layer, NVMeLayer) else undo_of(layer)
            if self._forward.begins_at(layer_idx):
                past, progress = self._length(), Progress.above(sys._getframe(1), self)
                self._prompt.go_on(progress, past)
                self._forward.enter(layer_idx, undo, self)
                # Only `generate` says what is a prompt; elsewhere it is what comes in more than a block at once.
                is_long = progress is None and key_states.shape[2] > self._pager.block_size
                is_prefill = past == 0 or is_long or is_prefilling(sys._getframe(1))
                self._pager.meter.begin_step(past, key_states.shape[2], is_prefill=is_prefill)
            else:
                self._forward.enter(layer_idx, undo, self)
            if isinstance(layer, NVMeLayer):
                states = self._update_paged(layer, key_states, value_states, module_above(sys._getframe(1)))
            else:
                if layer_idx in self._unsettled:  # was restored where the model need not be
                    move(layer, key_states.device)
                    self._unsettled.remove(layer_idx)
                states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            self._forward.leave(layer_idx)
            self._pager.meter.go_on()
            return states

    def _update_paged(
        self, layer: NVMeLayer, key_states: torch.Tensor, value_states: torch.Tensor, module: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._grows and layer.get_seq_length():
            self._pager.num_layers = len(self.layers)  # the first forward has shown them all
        with self._at_work(key_states.device):
            if layer.can_stream and streams(module, key_states, value_states):
                states = self._stream(layer, key_states, value_states, module)
            else:
                layer.prepare(key_states, value_states)
                states = layer.extend(key_states, value_states)
            # Last: the interpreter runs one thread at a time, and readers wake up now.
            self._sweep.fetch_behind(layer, self._paged_layers(), self._pager.prefetch_depth(layer.sealed_nbytes))
            return states

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens of every layer, all if there are fewer.

        Raises:
            ValueError: `tokens_to_remove` is positive, as upstream.
        """
        tokens_to_remove, seen = int(tokens_to_remove), self._length()  # some versions pass a tensor
        self._mend()
        if tokens_to_remove < 0:  # counted from the length seen, which may have had a broken forward in it
            tokens_to_remove = min(0, tokens_to_remove + seen - self._length())
        super().crop(tokens_to_remove)
        self._prompt.crop(self._length())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row `i` of every layer what row `beam_idx[i]` was."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each batch row `repeats` times, copies side by side."""
        if (batch_size := self._known_batch_size()) is not None:
            self._select_rows(torch.arange(batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keeps the batch rows at `indices`, in that order; a mask works too."""
        if (batch_size := self._known_batch_size()) is not None:
            self._select_rows(torch.arange(batch_size, device="cpu")[torch.as_tensor(indices).cpu()])

    def reset(self) -> None:
        """Forgets every token; the cache may then be used for another prompt.

        The files of these tokens stay in the cache's folder for that prompt to overwrite, which is faster than making
        new ones. They give way to `disk_budget` and to a drive that runs full; what the prompt leaves of them is
        deleted by the next `reset()`, everything by `close()`. The folder never takes more than it did at its fullest.
        """
        self._forward.reset()
        self._prompt.forget()
        self._pager.meter.pause()
        self._feed.abandon()
        self._pager.delete_free_files()  # of an earlier prompt, and this one had no use for them
        super().reset()

    def close(self) -> None:
        """Waits for work in flight and deletes every shard. Safe to call again.

        Also done when the cache is collected and when the process ends.
        """
        self._pager.close()
        self._feed.abandon()
        if self._busy.acquire(blocking=False):  # else another thread is about to learn that the cache is closed
            self._forward.reset()  # what would take it back holds blocks
            for layer in self._paged_layers().values():
                layer.reset()
            self._busy.release()

    def memory_usage(self) -> dict[str, int]:
        """Bytes of keys and values by tier: sealed blocks where they were placed, tails in `device`."""
        usage = {str(tier): 0 for tier in Tier}
        for layer in self._paged_layers().values():
            usage[Tier.DEVICE] += layer.tail_bytes()
            for tier, nbytes in layer.used_bytes().items():
                usage[tier] += nbytes
        return usage

    @property
    def tax(self) -> "TaxReport":
        """What paging has cost so far: a report to `print`, with `to_dict()`, `to_json(path)` and `plot(path)`."""
        from .report import TaxReport  # brings the library that draws tables

        return TaxReport(self._pager.meter)

    @property
    def offload_path(self) -> Path:
        """This cache's own folder of shards."""
        return self._pager.folder

    @property
    def is_compileable(self) -> bool:
        """False: blocks come and go outside any graph."""
        return False

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The longest a layer can get, -1 for no limit; over all layers if `layer_idx` is None."""
        return super().get_max_length(layer_idx) if self.layers else -1

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put every layer back as it was; False while there are no layers to ask."""
        return bool(self.layers) and super().is_croppable

    @property
    def _is_user_defined(self) -> bool:
        return self._was_passed

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` sets this on every cache it is given, before anything else: the one sign that a new call begins.
        self._was_passed = value
        self._forward.check_thread(self)
        self._pager.meter.pause()
        self._mend()
        if (call := GenerateCall.above(sys._getframe(1))) is not None:
            if call.begins_anew and self._length():
                logger.warning("this way of generating begins with the whole prompt: what the cache held is dropped")
                self.reset()
            length = self._length()
            kept = self._prompt.check(call, length)
            if kept < length:
                self._take_back(length - kept)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        name, usage = type(self).__name__, self.memory_usage()
        return f"{name}({len(self.layers)} layers, {self._length()} tokens, bytes by tier: {usage})"

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Yields each layer's keys, values and sliding window; reads every block."""
        yield from super().__iter__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._mend()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self._pager)] = self._pager.fork()
        fresh = {"_busy": threading.RLock(), "_forward": self._forward.forked(), "_config": self._config}
        for name, value in vars(self).items():
            setattr(copied, name, fresh[name] if name in fresh else copy.deepcopy(value, memo))
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an OffloadedNVMeCache cannot be pickled or sent to another process: its blocks live in files and threads "
            "of this one. Use copy.deepcopy for a copy, and make a new cache in the other process."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _owned(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            self._pager.check()  # the other thread may be closing it
            raise CacheMisuseError("this cache is in use by another thread; give each thread a cache of its own")
        try:
            yield
        finally:
            self._busy.release()

    def _length(self) -> int:
        """The length `generate` goes by; 0 while there are only linear layers, which have none."""
        return 0 if all(self.is_linear) else self.get_seq_length()

    def _mend(self) -> None:
        """Takes back the tokens of a forward that was interrupted; nothing to do in the middle of a whole one."""
        self._forward.check_thread(self)  # another thread's forward under way looks like one that was interrupted
        if self._forward.is_broken:
            self._forward.roll_back()

    def _take_back(self, count: int) -> None:
        try:
            self.crop(-count)
        except RuntimeError as error:
            raise CacheMisuseError(
                "every token of this prompt is cached already, and a sliding-window or linear layer cannot step back "
                "to compute the last one again; call reset() or pass a longer prompt"
            ) from error

    def _known_batch_size(self) -> int | None:
        for layer in self.layers:
            if not isinstance(layer, NVMeLayer):
                batch_size = batch_size_of(layer)
            else:
                batch_size = layer.batch_size if layer.get_seq_length() else None
            if batch_size is not None:
                return batch_size
        return None

    def _select_rows(self, rows: torch.Tensor) -> None:
        self._mend()
        self._prompt.forget()
        on_host = rows.cpu()  # once, not once a layer
        for layer in self.layers:
            # Upstream's own layers select any rows this way, and the linear ones have no other.
            layer.reorder_cache(cast(torch.LongTensor, on_host if isinstance(layer, NVMeLayer) else rows))

    def _paged_layers(self) -> dict[int, NVMeLayer]:
        return {layer_idx: layer for layer_idx, layer in enumerate(self.layers) if isinstance(layer, NVMeLayer)}


class _GrowingLayers(list[Any]):
    """The layers of a cache made without a config: full attention, added as the model reaches them."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= len(self):
            raise CacheMisuseError(
                f"there is no layer {index} yet, and it is not one of full attention: for models with linear, hybrid "
                "or indexed layers make the cache with config=model.config"
            )
        return super().__getitem__(index)
