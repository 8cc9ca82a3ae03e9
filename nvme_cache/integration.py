"""enable(model): a cache of its own for every `generate` of a model, pipelines included."""

import inspect
from functools import partial
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from .arguments import cache_argument
from .cache import OffloadedNVMeCache
from .errors import ConfigurationError, ShardCorruptedError
from .handles import STREAMING
from .reuse import Reuse, TokenPrompt
from .snapshots import SnapshotStore

if TYPE_CHECKING:  # importing it would start the compiler
    from transformers import PreTrainedModel

_SWITCHES = "_nvme_cache_switches"


class Switch:
    """What `enable` returns: turns it off again, by `disable()` or at the end of a `with`."""

    def __init__(
        self,
        model: "PreTrainedModel",
        options: dict[str, Any],
        reuse: Reuse | None,
        attended_with: dict[str, str | None] | None,
    ) -> None:
        self._model: PreTrainedModel | None = model
        self._attended_with = attended_with
        self.options = options
        self.reuse = reuse

    def disable(self) -> None:
        """Gives the model back what it had before: its own `generate`, or an enclosing `enable`'s, and its attention.

        Safe to call again.
        """
        model, self._model = self._model, None
        if model is None:
            return
        switches: list[Switch] = vars(model)[_SWITCHES]
        later = switches[switches.index(self) + 1 :]
        switches.remove(self)
        if not switches:
            del vars(model)[_SWITCHES], vars(model)["generate"]
        if self._attended_with is not None:
            heir = next((switch for switch in later if switch._attended_with is not None), None)
            if heir is None:
                model.set_attn_implementation(self._attended_with)
            else:
                heir._attended_with = self._attended_with
        if self.reuse is not None:
            self.reuse.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disable()


def enable(
    model: "PreTrainedModel",
    *,
    attention: Literal["streaming"] | None = None,
    reuse: bool | SnapshotStore = False,
    **options: Any,
) -> Switch:
    """Gives every `generate` of `model` an `OffloadedNVMeCache` of its own, also inside pipelines.

    A cache the caller passes wins, and so do `use_cache=False` and `cache_implementation=...`. The cache is closed
    when the call ends; if it is part of the output (`return_dict_in_generate=True`), when the output is gone. Nothing
    but this model object changes, and `disable` undoes it exactly. Calls nest: the innermost options count.

    With `reuse`, a call goes on from what an earlier one computed: its prompt is compared with the tokens whose keys
    and values are held, the longest common beginning is kept, and only the rest is processed. Prompts with more to them
    than tokens (images, embeddings) are not compared. How many tokens were reused is logged, as INFO of `nvme_cache`.

    Args:
        model: A model that can generate.
        attention: "streaming" to have the model read blocks as they arrive instead of a layer laid out whole, by
            `model.set_attn_implementation("nvme_streaming")`; None to leave its attention as it is.
        reuse: True to keep the last call's cache for the next one. A `SnapshotStore` to also save the cache of every
            call and to look there, for what other processes computed as well.
        options: Arguments of `OffloadedNVMeCache` but for `config`.

    Returns:
        A switch to turn it off, also usable in a `with` statement.

    Raises:
        ConfigurationError: `model` cannot generate, its `generate` was replaced by something else, or an option has a
            value that cannot work.
        OffloadDirectoryError: as `OffloadedNVMeCache`.

    Example:
        >>> with nvme_cache.enable(model, host_budget="8GiB"):
        ...     pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        ...     answers = pipe(prompts, max_new_tokens=100)
    """
    if not callable(getattr(type(model), "generate", None)) or _hides_cache(model):
        raise ConfigurationError(
            f"enable() needs a model that generates itself, not {type(model).__name__}; of one wrapped for adapters or "
            "compiled, enable the one inside: model.get_base_model() or model._orig_mod"
        )
    if not isinstance(reuse, (bool, SnapshotStore)):
        raise ConfigurationError(f"reuse={reuse!r} must be True, False or a SnapshotStore")
    if "generate" in vars(model) and _SWITCHES not in vars(model):
        raise ConfigurationError("this model object already has a generate of its own, put there by something else")
    if attention not in (None, "streaming"):
        raise ConfigurationError(f'attention={attention!r} must be None or "streaming"')
    OffloadedNVMeCache(config=model.config, **options).close()  # wrong options fail here, not in the middle of a batch
    store = reuse if isinstance(reuse, SnapshotStore) else None
    attended_with = None
    if attention is not None:
        attended_with = _attention_of(model)
        model.set_attn_implementation(STREAMING)
    switch = Switch(model, options, Reuse(store, options) if reuse is not False else None, attended_with)
    vars(model).setdefault(_SWITCHES, []).append(switch)
    # A bound method, so that a copied model generates with its own weights.
    vars(model)["generate"] = MethodType(_generate, model)
    return switch


def _generate(model: "PreTrainedModel", *args: Any, **kwargs: Any) -> Any:
    generate = cast(Any, type(model)).generate  # ours hides it on this object alone
    name = cache_argument(model)
    option = partial(_option, model, args, kwargs)
    has_own = any(kwargs.get(known) is not None for known in ("cache", "past_key_values", "cache_implementation"))
    implementation = option("cache_implementation")
    if has_own or option("use_cache") is False or implementation not in (None, "hybrid") or not _takes_cache(model):
        return generate(model, *args, **kwargs)
    switch: Switch = vars(model)[_SWITCHES][-1]
    prompt = None
    if switch.reuse is not None and not model.config.is_encoder_decoder:
        prompt = TokenPrompt.of(model, args, kwargs, option)
    if switch.reuse is None or prompt is None:
        paged = OffloadedNVMeCache(config=model.config, **switch.options)
    else:
        paged = switch.reuse.take(model, prompt)
    cache: Cache = paged
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(paged, DynamicCache(config=model.config.get_text_config(decoder=True)))
    for known in ("cache", "past_key_values"):
        kwargs.pop(known, None)
    try:
        output = generate(model, *args, **kwargs, **{name: cache})
    except BaseException as error:
        if switch.reuse is not None and isinstance(error, ShardCorruptedError):
            switch.reuse.failed(paged)
        paged.close()
        raise
    is_part = getattr(output, name, None) is cache  # and the caller's own from now on
    if switch.reuse is not None and prompt is not None:
        switch.reuse.give_back(model, prompt, paged.fork() if is_part else paged)
    elif not is_part:
        paged.close()
    return output


def _attention_of(model: "PreTrainedModel") -> dict[str, str | None]:
    """What the model and the models inside it attend with, as `set_attn_implementation` takes it."""
    inner = {key: getattr(model.config, key, None) for key in model.config.sub_configs}
    own = {key: config._attn_implementation for key, config in inner.items() if config is not None}
    return {"": model.config._attn_implementation, **own}


def _option(model: "PreTrainedModel", args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """What `generate` takes for an option: the argument, else what the call's config says, else the model's."""
    if name in kwargs:
        return kwargs[name]
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    values = (getattr(config, name, None) for config in (given, model.generation_config))
    return next((value for value in values if value is not None), None)


def _hides_cache(model: "PreTrainedModel") -> bool:
    """Whether the model passes on arguments that it does not name, as wrappers do, among them perhaps a cache."""
    parameters = inspect.signature(model.forward).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return passes_on and not {"cache", "past_key_values"} & set(parameters) and hasattr(model, "get_base_model")


def _takes_cache(model: "PreTrainedModel") -> bool:
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    return cache_argument(model) in inspect.signature(model.forward).parameters and (supports is None or supports())
