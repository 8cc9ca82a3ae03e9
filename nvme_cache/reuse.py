"""Prefix reuse: a call of `generate` goes on from the longest beginning of its prompt that was computed before."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from .cache import OffloadedNVMeCache
from .errors import ConfigurationError, NVMeCacheError
from .guards import chunks_ignore_cache
from .quantization import parse_quantization
from .snapshots import (
    Match,
    SnapshotStore,
    common_length,
    length_limit,
    marked,
    shifted_by_images,
    weights_of,
    whole_mask,
)

if TYPE_CHECKING:  # importing it would start the compiler
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_TOKENS = {"inputs", "input_ids", "attention_mask"}


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """What a call of `generate` begins with, if it is tokens and nothing else.

    Attributes:
        token_ids: `[batch, length]`.
        attention_mask: `[batch, length]`, 0 where a token is padding.
        copies: Into how many rows each is to be continued.
        begins_anew: Whether `generate` will process all tokens, cached or not.
    """

    token_ids: torch.Tensor
    attention_mask: torch.Tensor
    copies: int
    begins_anew: bool

    @classmethod
    def of(
        cls, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], option: Callable[[str], Any]
    ) -> "TokenPrompt | None":
        """The prompt of a call; None if there is more to it than tokens, whose keys and values may then differ.

        Args:
            model: The model.
            args: Of the call.
            kwargs: Of the call.
            option: The value that an option of `generate` has in the call.
        """
        given = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
        token_ids = next((each for each in given if each is not None), None)
        others = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor)} - _TOKENS
        if others or len(args) > 2 or not isinstance(token_ids, torch.Tensor) or token_ids.ndim != 2:
            return None
        mask = kwargs.get("attention_mask")
        pad = option("pad_token_id")
        if mask is None and isinstance(pad, int) and bool((token_ids == pad).any()):
            return None  # `generate` may take these for padding, or not
        mask = torch.ones_like(token_ids) if mask is None else mask
        drafted = kwargs.get("assistant_model") or option("prompt_lookup_num_tokens") or option("assistant_early_exit")
        begins_anew = drafted is not None or bool(option("prefill_chunk_size") and chunks_ignore_cache(model))
        copies = max(option("num_beams") or 1, option("num_return_sequences") or 1)
        return cls(token_ids, mask, copies, begins_anew) if mask.shape == token_ids.shape else None

    @property
    def marked(self) -> torch.Tensor:
        """The token ids with padding marked, to be compared."""
        return marked(self.token_ids, self.attention_mask)


@dataclass(frozen=True, slots=True)
class _Held:
    """A cache, where it is from, and the tokens it holds, `[batch, length]` with padding marked.

    Beside them, if it was kept from a call, what the weights were then.
    """

    cache: OffloadedNVMeCache
    source: str
    tokens: torch.Tensor
    weights: str = ""

    def usable(self, wanted: torch.Tensor) -> int:
        """How many tokens of a prompt it can stand for: not the last one, which must be computed."""
        length = max(0, min(common_length(self.tokens, wanted), wanted.shape[1] - 1))
        return length if length == self.tokens.shape[1] or self.cache.can_step_back else 0


class Reuse:
    """What earlier calls have computed: the last one's cache, and a store of snapshots if there is one.

    Args:
        store: Where to look further, and where the cache of every call is saved.
        options: Arguments of `OffloadedNVMeCache` but for `config`.
    """

    def __init__(self, store: SnapshotStore | None, options: dict[str, Any]) -> None:
        self._store = store
        self._options = options
        self._kept: _Held | None = None
        self._mutex = threading.Lock()
        self._opened: WeakKeyDictionary[OffloadedNVMeCache, Path] = WeakKeyDictionary()
        self._damaged: set[Path] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return Reuse, (self._store, self._options)  # a copied model may get other weights

    def take(self, model: "PreTrainedModel", prompt: TokenPrompt) -> OffloadedNVMeCache:
        """A cache that holds as much of the prompt's beginning as is known, perhaps nothing."""
        wanted = prompt.marked
        longest = length_limit(model.config)
        if wanted.shape[1] > longest:
            logger.info("this model's RoPE stretches with sequences of over %d tokens: nothing is reused", longest)
        if prompt.begins_anew or wanted.shape[1] > longest:
            return self._fresh(model)
        held = self._taken(wanted, weights_of(model), longest)
        length = 0 if held is None else held.usable(wanted)
        if (stored := self._stored(model, prompt, longest, longer_than=length)) is not None:
            self._keep(held)
            held, length = stored, stored.usable(wanted)
        if held is None:
            logger.info("reused none of %d prompt tokens", wanted.shape[1])
            return self._fresh(model)
        logger.info("reused %d of %d prompt tokens from %s", length, wanted.shape[1], held.source)
        cache = held.cache
        if prompt.copies > 1:  # whose rows will not be this prompt's any more
            cache = cache.fork()
            self._keep(held)
        if length < held.tokens.shape[1]:
            cache.crop(length - held.tokens.shape[1])
        if prompt.copies > 1:
            cache.batch_repeat_interleave(prompt.copies)
        return cache

    def give_back(self, model: "PreTrainedModel", prompt: TokenPrompt, cache: OffloadedNVMeCache) -> None:
        """Keeps what a call has computed; if that is several answers to a prompt, what was there before it stays."""
        if prompt.copies > 1:
            cache.close()
            return
        try:
            token_ids = cache.tokens_held()
        except ConfigurationError as error:  # decoded by a function of the caller's, for one
            logger.info("the cache of this call is not kept: %s", error)
            cache.close()
            return
        if self._store is not None and token_ids.shape[1] <= length_limit(model.config):
            try:
                self._store.save(cache, model=model, attention_mask=prompt.attention_mask)
            except (NVMeCacheError, OSError) as error:  # the answer is there, and worth more than an error
                logger.warning("the cache of this call was not saved in %s: %s", self._store.path, error)
        mask = whole_mask(token_ids, prompt.attention_mask)
        self._keep(_Held(cache, "the last call", marked(token_ids, mask), weights_of(model)))

    def failed(self, cache: OffloadedNVMeCache) -> None:
        """Closes a cache whose blocks were found damaged, and sees to it that no call gets its snapshot again."""
        cache.close()
        if (path := self._opened.get(cache)) is not None:
            self._damaged.add(path)

    def close(self) -> None:
        """Closes what was kept."""
        self._keep(None)

    def _fresh(self, model: "PreTrainedModel") -> OffloadedNVMeCache:
        self._keep(None)  # two at a time would take twice the memory
        return OffloadedNVMeCache(config=model.config, **self._options)

    def _taken(self, wanted: torch.Tensor, weights: str, longest: float) -> _Held | None:
        with self._mutex:
            held = self._kept
            if held is None or held.weights != weights or held.tokens.shape[1] > longest or not held.usable(wanted):
                return None
            self._kept = None  # nobody else must use it meanwhile
            return held

    def _keep(self, held: _Held | None) -> None:
        with self._mutex:
            before, self._kept = self._kept, held
        if before is not None:
            before.cache.close()

    def _stored(
        self, model: "PreTrainedModel", prompt: TokenPrompt, longest: float, *, longer_than: int
    ) -> _Held | None:
        if self._store is None or shifted_by_images(model):
            return None
        with self._mutex:
            self._damaged -= {path for path in self._damaged if self._store.discard(path)}
            unusable = set(self._damaged)
        quantization = parse_quantization(self._options.get("quantization"))
        options = {name: value for name, value in self._options.items() if name not in ("quantization", "block_size")}
        for match in self._store.find(
            prompt.token_ids, model=model, attention_mask=prompt.attention_mask, quantization=quantization
        ):
            if match.path in unusable or match.tokens.shape[1] > longest:
                continue
            if match.length <= longer_than or not self._pays(match, self._store.drive.read_bytes_per_s):
                return None
            try:
                cache = OffloadedNVMeCache.from_pretrained(match.path, model=model, **options)
            except NVMeCacheError as error:  # evicted meanwhile, or damaged
                logger.info("cannot use the snapshot %s: %s", match.path, error)
                continue
            self._opened[cache] = match.path
            held = _Held(cache, f"the snapshot {match.path}", match.tokens)
            if held.usable(prompt.marked) > longer_than:
                return held
            cache.close()
        return None

    def _pays(self, match: Match, read_bytes_per_s: float) -> bool:
        """Whether reading a snapshot takes less time than computing its tokens again."""
        token_s = match.manifest.prefill_token_s
        load_s = match.manifest.nbytes / read_bytes_per_s
        if token_s is None or load_s <= token_s * match.length:
            return True
        logger.info(
            "computing %d tokens again takes %.2g s, reading the snapshot %s %.2g s: recomputing",
            match.length, token_s * match.length, match.path, load_s,
        )  # fmt: skip
        return False
