"""What a cache can do with snapshots: `fork`, `save_pretrained`, `from_pretrained`."""

import copy
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedConfig

from nvme_cache.errors import CacheMisuseError, ConfigurationError
from nvme_cache.guards import Forward, Prompt
from nvme_cache.layers import NVMeLayer
from nvme_cache.pager import Pager
from nvme_cache.placement import Tier
from nvme_cache.quantization import QuantizationConfig
from nvme_cache.resident import can_step_back

from .identity import identify
from .remote import place_of, saved_to
from .restore import Snapshot
from .save import save, whole_mask

if TYPE_CHECKING:  # importing it would start the compiler
    from transformers import PreTrainedModel


class SnapshotMixin:
    """The part of a cache that outlives it."""

    layers: list[Any]
    _config: PreTrainedConfig | None
    _forward: Forward
    _pager: Pager
    _prompt: Prompt
    _unsettled: set[int]

    if TYPE_CHECKING:  # what the cache itself provides

        def __init__(self, **options: Any) -> None: ...
        def _owned(self) -> AbstractContextManager[None]: ...
        def _mend(self) -> None: ...
        def _length(self) -> int: ...
        def _known_batch_size(self) -> int | None: ...
        def close(self) -> None: ...
        def memory_usage(self) -> dict[str, int]: ...
        @property
        def is_linear(self) -> list[bool]: ...

    def fork(self) -> Self:
        """A cache that holds the same tokens and goes its own way; `copy.deepcopy` does the same.

        The two share all sealed blocks, which never change: nothing is written, and closing either leaves the other
        whole. Each has the budgets of this one.
        """
        return copy.deepcopy(self)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        token_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        model: "PreTrainedModel | None" = None,
    ) -> None:
        """Saves all tokens as a snapshot, from which `from_pretrained` goes on, in other processes too.

        Blocks on the drive are linked, not written again, if the folder is on the same file system. A snapshot that
        is there is replaced as a whole, or not at all if saving is interrupted.

        Args:
            save_directory: A folder, made if need be; or a URL that fsspec knows, such as "s3://bucket/report".
            token_ids: `[batch, length]`, the tokens whose keys and values are held, padding included; more are
                ignored. Not needed after `generate` was passed the whole sequence.
            attention_mask: `[batch, length]`, 0 where a token is padding; None if none is.
            model: The model, whose weights are then told apart from those of its fine-tunes. Needed if the cache was
                made without a config.

        Raises:
            ConfigurationError: the token ids or the config are missing, or a layer is of a kind that cannot be saved.
            CacheMisuseError: the first forward was interrupted, or another thread is using the cache.
            NVMeCacheError: what went wrong in the background since the last call.
            OSError: the folder cannot be written to.
            SnapshotIOError: the URL's place cannot be reached, or refuses; a snapshot that was there still is.
        """
        with self._owned():
            self._mend()
            config = self._config if model is None else model.config
            if config is None:
                raise ConfigurationError("a cache made without a config needs save_pretrained(..., model=model)")
            identity = identify(config, model)
            lengths = {
                layer.get_seq_length()
                for layer, is_linear in zip(self.layers, self.is_linear, strict=True)
                if not is_linear and hasattr(layer, "get_seq_length")
            }
            if len(lengths) > 1 and not self._forward.was_whole:
                raise CacheMisuseError(
                    f"the layers hold {' and '.join(map(str, sorted(lengths)))} tokens: the first forward was "
                    "interrupted. Call reset() and start again."
                )
            held, usage = self.tokens_held(token_ids), self.memory_usage()
            with saved_to(place_of(save_directory), self._pager.store, usage[Tier.DEVICE] + usage[Tier.HOST]) as folder:
                save(
                    folder,
                    layers=self.layers,
                    pager=self._pager,
                    identity=identity,
                    token_ids=held,
                    attention_mask=whole_mask(held, attention_mask),
                    prefill_token_s=self._pager.meter.prefill_token_s,
                )

    @classmethod
    def from_pretrained(
        cls,
        snapshot_directory: str | os.PathLike[str],
        *,
        config: PreTrainedConfig | None = None,
        model: "PreTrainedModel | None" = None,
        **options: Any,
    ) -> Self:
        """Opens a snapshot: a cache that holds its tokens, at once, and reads its blocks when they are needed.

        The snapshot stays as it is. Any number of processes may open it; what each adds is its own. From a URL, blocks
        are downloaded when they are first read, and kept with this cache's own.

        Args:
            snapshot_directory: What `save_pretrained` was given.
            config: The model's config, to compare with the one of the snapshot.
            model: The model instead, whose weights are compared too.
            options: Arguments of `OffloadedNVMeCache` but for `block_size` and `quantization`, which the snapshot has.

        Raises:
            SnapshotMismatchError: the snapshot is of another model, dtype or version; the message says of what.
            SnapshotCorruptedError: there is no snapshot, or it is damaged. Blocks are checked when they are first read.
            SnapshotIOError: the URL's place cannot be reached.
            ConfigurationError: neither `config` nor `model` was given.

        Example:
            >>> cache.save_pretrained("report", model=model)
            >>> with OffloadedNVMeCache.from_pretrained("report", model=model) as cache:
            ...     output = model.generate(**inputs, past_key_values=cache)
        """
        if model is not None:
            config = model.config
        if config is None:
            raise ConfigurationError("from_pretrained() needs config=model.config, or better model=model")
        if fixed := {"block_size", "quantization"} & set(options):
            raise ConfigurationError(f"a snapshot has its own {' and '.join(sorted(fixed))}; leave them out")
        snapshot = Snapshot.open(place_of(snapshot_directory), identify(config, model))
        manifest = snapshot.manifest
        cache = cls(
            config=config, **{"block_size": manifest.block_size, "quantization": snapshot.quantization, **options}
        )
        try:
            device = torch.get_default_device() if model is None else model.device
            snapshot.fill(cache.layers, cache._pager, device)
            cache._prompt.hold(snapshot.token_ids)
            if manifest.prefill_token_s is not None:
                cache._pager.meter.known_prefill = manifest.num_tokens, manifest.prefill_token_s
            cache._unsettled = set(range(len(cache.layers)))
            paged = (layer for layer in cache.layers if isinstance(layer, NVMeLayer) and layer.held is not None)
            cache._forward.expect(layer.layer_idx for layer in paged)
        except BaseException:
            cache.close()
            raise
        return cache

    @property
    def can_step_back(self) -> bool:
        """Whether `crop` can take back every layer: no linear attention, no window that slides already."""
        return all(map(can_step_back, self.layers))

    @property
    def quantization(self) -> QuantizationConfig | None:
        """How sealed blocks are stored; None for exactly."""
        return self._pager.quantization

    def tokens_held(self, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens that the cache holds, `[batch, length]`: the first of `token_ids`, or what it knows itself.

        Raises:
            ConfigurationError: it holds none, or these cannot be them.
        """
        length, batch_size = self._length(), self._known_batch_size()
        known = self._prompt.ids if token_ids is None else torch.atleast_2d(token_ids)
        if batch_size is None:
            raise ConfigurationError("this cache holds no tokens to be saved")
        if known is None or known.shape[1] < length or known.shape[0] != batch_size:
            found = "none" if known is None else f"{known.shape[0]} x {known.shape[1]}"
            raise ConfigurationError(
                f"the cache holds {batch_size} x {length} tokens, but of their ids {found} are known: pass token_ids, "
                "the whole sequences that were processed, padding included"
            )
        return known[:, :length] if length else known
