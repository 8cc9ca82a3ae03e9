"""Guard rails: uses that transformers lets pass and that would end in wrong text.

A cache sees keys and values, never tokens. What tells it more: `generate` marks every cache a caller passes, which is
the one sign that a new call begins; its frames hold the tokens; and the order in which layers are updated tells whole
forwards from broken ones.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple, cast

import torch

from .errors import CacheMisuseError

_NEAR = 6  # frames: between a module and the cache stand at most another cache and what keeps code out of graphs


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call of `generate` that has just been given the cache.

    Attributes:
        is_encoder_decoder: Whether the model is one.
        use_cache: Whether the call lets the model use a cache.
        input_ids: `[batch, length]`, the tokens passed: the whole sequence, or what is new.
        total_length: Tokens the attention mask covers; equal to `length` if the whole sequence was passed.
        decodes_itself: Whether the caller's own function decodes, which may go on from a full cache.
        ignores_cache: Whether the first forward is given all tokens passed, even those that are cached.
    """

    is_encoder_decoder: bool
    use_cache: bool
    input_ids: torch.Tensor
    total_length: int
    decodes_itself: bool
    ignores_cache: bool

    @classmethod
    def above(cls, frame: FrameType | None) -> "GenerateCall | None":
        """The call whose preparation reached `frame`; None if the frames do not look as expected."""
        if frame is None:
            return None
        # A model's own preparation may stand around the usual one.
        others = (outer for outer in _outward(frame) if outer.f_code.co_name != frame.f_code.co_name)
        if (generate := next(others, None)) is None:
            return None
        prepared, called = frame.f_locals, generate.f_locals
        model, config, kwargs = (prepared.get(name) for name in ("self", "generation_config", "model_kwargs"))
        input_ids = called.get("input_ids")
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not isinstance(kwargs, dict):
            return None
        mask = kwargs.get("attention_mask")
        total = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
        return cls(
            is_encoder_decoder=bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)),
            use_cache=getattr(config, "use_cache", True) is not False and kwargs.get("use_cache") is not False,
            input_ids=input_ids,
            total_length=total if kwargs.get("inputs_embeds") is None else -1,
            decodes_itself=callable(called.get("custom_generate")),
            ignores_cache=prepared.get("generation_mode") == "assisted_generation"
            or (getattr(config, "prefill_chunk_size", None) is not None and chunks_ignore_cache(model)),
        )

    @property
    def begins_anew(self) -> bool:
        """Whether the first forward processes all tokens of the sequence, even those that are cached."""
        return self.ignores_cache and self.total_length == self.input_ids.shape[1]


def chunks_ignore_cache(model: Any) -> bool:
    """Whether this transformers splits a whole prompt into chunks, whatever is cached, as it did before 5.24."""
    prefill = getattr(type(model), "_prefill", None)
    return prefill is None or "prefill_ids" not in prefill.__code__.co_varnames


class Progress(NamedTuple):
    """How far a `generate` has come: its sequences, `[batch, length]`, and whether they answer to encoded input."""

    ids: torch.Tensor
    is_encoder_decoder: bool

    @classmethod
    def above(cls, frame: FrameType | None, cache: object) -> "Progress | None":
        """That of the call above `frame` that was given `cache`; None if there is none that looks as expected."""
        for outer in _outward(frame):
            if outer.f_code.co_name in ("_sample", "_assisted_decoding") and _was_given(outer, cache):
                ids, model = (outer.f_locals.get(name) for name in ("input_ids", "self"))
                config = getattr(model, "config", None)
                return cls(ids, config.is_encoder_decoder) if isinstance(ids, torch.Tensor) and config else None
        return None


def is_prefilling(frame: FrameType | None) -> bool:
    """Whether a `generate` above `frame` is processing its prompt, in one go or in chunks."""
    return any(outer.f_code.co_name == "_prefill" for outer in _outward(frame))


def module_above(frame: FrameType | None) -> torch.nn.Module | None:
    """The innermost module whose method is not far above `frame`: where a layer is updated, the one that attends."""
    for outer in islice(_outward(frame), _NEAR):
        # Of methods alone: a frame keeps what it was asked for, in the user's own perhaps a cache long dropped.
        if outer.f_code.co_varnames[:1] == ("self",) and isinstance(outer.f_locals.get("self"), torch.nn.Module):
            return cast(torch.nn.Module, outer.f_locals["self"])
    return None


class Prompt:
    """The tokens the cache is known to hold, from the first on: the last prompt and what was generated behind it."""

    def __init__(self) -> None:
        self._ids: torch.Tensor | None = None
        self._was_whole = False  # whether the call under way was passed all tokens, not only new ones

    def check(self, call: GenerateCall, cached_length: int) -> int:
        """Compares a new call with what the cache holds.

        Args:
            call: The new call.
            cached_length: Tokens in the cache.

        Returns:
            How many cached tokens may be kept: all, or one less than the prompt, whose last token must be computed.

        Raises:
            CacheMisuseError: the call would continue from tokens that are not its own.
        """
        if call.is_encoder_decoder:
            raise CacheMisuseError(
                "an encoder-decoder model needs separate caches for its two kinds of attention: pass "
                "EncoderDecoderCache(OffloadedNVMeCache(...), DynamicCache())"
            )
        if not call.use_cache:
            raise CacheMisuseError("use_cache=False together with a cache would process every token again and again")
        length = call.input_ids.shape[1]
        self._was_whole = call.total_length == length
        if call.total_length < 0:  # embeddings: no tokens to compare
            return cached_length
        if call.total_length != length:
            if cached_length + length != call.total_length:
                raise CacheMisuseError(
                    f"the attention mask covers {call.total_length} tokens, but {cached_length} are cached and "
                    f"{length} new ones were passed; pass a mask over all of them"
                )
            return cached_length
        if cached_length and self._ids is not None:
            known = min(self._ids.shape[1], cached_length, length)
            same = call.input_ids.shape[0] == self._ids.shape[0] and torch.equal(
                call.input_ids[:, :known].cpu(), self._ids[:, :known].cpu()
            )
            if not same:
                raise CacheMisuseError(
                    f"this cache holds {cached_length} tokens of another prompt. Make a new cache for each prompt, or "
                    "call reset() first, or let nvme_cache.enable(model) give every call its own; to continue a "
                    "conversation pass the whole sequence, starting with the tokens already cached."
                )
        elif cached_length > length:
            raise CacheMisuseError(
                f"this cache holds {cached_length} tokens, more than the {length} passed; pass the whole sequence, or "
                "the new tokens with an attention mask over all"
            )
        self._ids = call.input_ids.cpu().clone()
        return cached_length if call.decodes_itself else min(cached_length, length - 1)

    def go_on(self, progress: Progress | None, cached_length: int) -> None:
        """Notes that a forward begins.

        Args:
            progress: How far `generate` has come; None if it is not under way.
            cached_length: Tokens in the cache.

        Raises:
            CacheMisuseError: an encoder-decoder model begins another answer on top of an earlier one.
        """
        if progress is not None and progress.is_encoder_decoder:
            if cached_length >= progress.ids.shape[1]:
                raise CacheMisuseError(
                    f"this cache holds {cached_length} tokens of an earlier call, and the one beside it what was then "
                    "encoded; make new caches for each input, or call reset() on the EncoderDecoderCache"
                )
        elif progress is not None and self._was_whole:
            self._ids = progress.ids
        elif cached_length:
            self.crop(cached_length)  # tokens of a forward that was taken back

    @property
    def ids(self) -> torch.Tensor | None:
        """`[batch, length]`, the tokens known to be held; None if they are not known."""
        return self._ids

    def hold(self, ids: torch.Tensor) -> None:
        """Notes that the cache holds these tokens and no others, `[batch, length]`."""
        self._ids = ids

    def crop(self, length: int) -> None:
        """Forgets tokens from `length` on."""
        if self._ids is not None:
            self._ids = self._ids[:, :length]

    def forget(self) -> None:
        """Forgets all: the rows or tokens the cache holds were changed from outside."""
        self._ids, self._was_whole = None, False


class Forward:
    """Tells whole forward passes from broken ones by the layers they update, and takes broken ones back.

    An interrupt may come between any two steps here; a layer counts as reached only once its update is done.

    Attributes:
        was_whole: Whether a forward was followed by another, and so had reached every layer that it had to.
    """

    def __init__(self) -> None:
        self.was_whole = False
        self._current = _Pass()
        self._last_layer: int | None = None  # where whole forwards end
        self._highest_layer = -1
        self._expected: frozenset[int] = frozenset()
        self._thread = threading.get_ident()

    def expect(self, layers: Iterable[int]) -> None:
        """Tells which layers every forward reaches, where others than this process's have filled them."""
        self._expected = frozenset(layers)

    def begins_at(self, layer_idx: int) -> bool:
        """Whether a forward begins if this layer is updated next."""
        return not self._current.undo or layer_idx in self._current.undo

    @property
    def is_broken(self) -> bool:
        """Whether the forward ended before the layer that forwards end with. True also while one is under way."""
        current = self._current
        lacks = not self._expected <= current.undo.keys()
        return bool(current.undo) and (lacks or (self._last_layer is not None and current.reached != self._last_layer))

    def enter(self, layer_idx: int, undo: Callable[[], None], owner: object) -> None:
        """Notes that a layer is about to be updated.

        Args:
            layer_idx: The layer.
            undo: Takes the update back, as far as it was made.
            owner: The cache, to see whether another thread is generating with it.

        Raises:
            CacheMisuseError: the previous forward was interrupted and has now been taken back, or another thread is
                using the cache.
        """
        self.check_thread(owner)
        if self.begins_at(layer_idx) and not _is_inside_a_model():
            self.reset()  # whoever fills layers by hand does so in any order
        elif layer_idx in self._current.undo:  # a new forward begins
            if self.is_broken:
                self.roll_back()
                raise CacheMisuseError(
                    "the last forward was interrupted before it reached every layer. Its tokens have been taken back: "
                    "the cache is as it was before it; call the model again."
                )
            self._last_layer, self.was_whole = self._current.reached, True
            self._highest_layer = max(self._highest_layer, *self._current.undo)
            self._current = _Pass()
        elif self._last_layer is not None and layer_idx > self._highest_layer:
            raise CacheMisuseError(
                f"layer {layer_idx} was never reached before: the first forward was interrupted. Call reset() and "
                "start again."
            )
        self._current.undo[layer_idx] = undo

    def leave(self, layer_idx: int) -> None:
        """Notes that a layer has been updated."""
        self._current.reached = layer_idx

    def check_thread(self, owner: object) -> None:
        """Takes the cache over for this thread.

        Raises:
            CacheMisuseError: another thread is generating with it.
        """
        thread = threading.get_ident()
        if thread != self._thread and self._current.undo and _is_computing(self._thread, owner):
            raise CacheMisuseError("this cache is in use by another thread; give each thread a cache of its own")
        self._thread = thread

    def roll_back(self) -> None:
        """Takes back what the forward under way has done."""
        for undo in self._current.undo.values():
            undo()
        self._current = _Pass()

    def forked(self) -> "Forward":
        """What a copy of the cache goes on with: it too must refuse layers that the first forward never reached."""
        forked = Forward()
        forked._last_layer, forked._highest_layer = self._last_layer, self._highest_layer
        forked.was_whole, forked._expected = self.was_whole, self._expected
        if self._current.undo:
            forked._last_layer = self._current.reached
            forked._highest_layer = max(self._highest_layer, *self._current.undo)
        return forked

    def reset(self) -> None:
        """Forgets all forwards."""
        self.was_whole = False
        self._current = _Pass()
        self._last_layer, self._highest_layer, self._expected = None, -1, frozenset()


@dataclass(slots=True)
class _Pass:
    """One forward: how to take back the update of each layer, and the last layer whose update is done."""

    undo: dict[int, Callable[[], None]] = field(default_factory=dict)
    reached: int | None = None


def _is_computing(thread: int, cache: object) -> bool:
    """Whether `thread` is inside a `generate`, or a module's forward, that was given `cache`."""
    frames = _outward(sys._current_frames().get(thread))
    return any(frame.f_code.co_name in ("generate", "_call_impl") and _was_given(frame, cache) for frame in frames)


def _is_inside_a_model() -> bool:
    return any(frame.f_code.co_name == "_call_impl" for frame in _outward(sys._getframe(1)))  # of torch.nn.Module


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame` and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _was_given(frame: FrameType, cache: object) -> bool:
    kwargs: Any = frame.f_locals.get("model_kwargs", frame.f_locals.get("kwargs"))
    given = kwargs.values() if isinstance(kwargs, dict) else ()
    return any(value is cache or getattr(value, "self_attention_cache", None) is cache for value in given)
