"""What a cache of a model holds, from the model's config alone: no weights, no network.

The only formula for keys and values that is right for every architecture is the model itself. So it is built without
memory, one token is run through it without arithmetic, and what upstream's own cache then holds is read off: heads,
widths and dtypes of every layer, whatever the attention.
"""

import copy
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from .arguments import cache_argument
from .errors import ConfigurationError
from .placement import BLOCK_SIZE
from .quantization import QuantizationConfig, stored_token_bytes
from .states import LayerSpec

if TYPE_CHECKING:  # importing it would start the compiler
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LayerFootprint:
    """What one layer of a cache holds for one batch row.

    Attributes:
        is_paged: Whether `OffloadedNVMeCache` pages the layer; else it is transformers' own and stays resident.
        spec: A token's keys and values; None if there are none.
        index_bytes: Bytes per token of anything else that grows with the tokens, such as an indexer's keys.
        window: Most tokens the layer keeps; None for all.
        fixed_bytes: Bytes that do not depend on the context: the states of convolutions and linear attention.
    """

    is_paged: bool
    spec: LayerSpec | None
    index_bytes: int = 0
    window: int | None = None
    fixed_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return (self.spec.nbytes(1) if self.spec else 0) + self.index_bytes

    def stored_token_bytes(self, quantization: QuantizationConfig | None) -> float:
        """Bytes per token in sealed blocks of the usual size."""
        if self.spec is None:
            return self.token_bytes
        return stored_token_bytes(self.spec, quantization, BLOCK_SIZE) + self.index_bytes

    def nbytes(self, context: int) -> int:
        """Bytes after `context` tokens."""
        kept = context if self.window is None else min(context, self.window)
        return kept * self.token_bytes + self.fixed_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a cache of one model holds, and what a step reads of the model's weights.

    Attributes:
        layers: As in `DynamicCache(config=...)`: a model whose layers share keys and values has fewer of these.
        weight_bytes: Bytes of the text model's weights.
        routed_bytes: Those among them that belong to experts a router chooses from.
        routed_share: Share of the experts that one token takes.
    """

    layers: tuple[LayerFootprint, ...]
    weight_bytes: int
    routed_bytes: int = 0
    routed_share: float = 1.0

    @property
    def paged(self) -> tuple[LayerFootprint, ...]:
        """The layers that are paged."""
        return tuple(layer for layer in self.layers if layer.is_paged)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first paged layer's keys."""
        return next((layer.spec.keys.dtype for layer in self.paged if layer.spec), torch.bfloat16)

    @property
    def paged_token_bytes(self) -> int:
        """Bytes per token and batch row of all paged layers, unquantized."""
        return sum(layer.token_bytes for layer in self.paged)

    def stored_token_bytes(self, quantization: QuantizationConfig | None) -> float:
        """Bytes per token and batch row of all paged layers, in sealed blocks of the usual size."""
        return sum(layer.stored_token_bytes(quantization) for layer in self.paged)

    def resident_bytes(self, context: int, batch_size: int = 1) -> int:
        """Bytes of the layers that are not paged, after `context` tokens of each row."""
        return batch_size * sum(layer.nbytes(context) for layer in self.layers if not layer.is_paged)

    def step_weight_bytes(self, batch_size: int = 1) -> int:
        """Bytes of weights one step reads: of routed experts only those chosen, each row's being others."""
        chosen = min(1.0, batch_size * self.routed_share)
        return round(self.weight_bytes - self.routed_bytes * (1 - chosen))


def read_config(model: str | os.PathLike[str]) -> PreTrainedConfig:
    """The config in a folder, or of a model on the hub.

    Raises:
        ConfigurationError: there is none to be had.
    """
    name = os.fspath(model)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = "there is no such folder" if isinstance(error.__cause__, HFValidationError) else _first_line(error)
        raise ConfigurationError(
            f"no config of {name!r}: {reason}. Pass a folder with a config.json, or the id of "
            "a model on the hub that this machine can reach or has cached."
        ) from error
    return config


def footprint_of(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> Footprint:
    """What a cache of a model with `config` holds.

    Args:
        config: Of the model, or of a larger one around it: its text decoder counts.
        dtype: Of weights, keys and values; None for the config's, bfloat16 if it names none.

    Raises:
        ConfigurationError: the model cannot be run this way, or keeps nothing in the cache it is given.
    """
    text = config.get_text_config(decoder=True)
    name = type(config).__name__
    if config.is_encoder_decoder:
        raise ConfigurationError(
            f"{name} is of an encoder with a decoder, which has two caches: there is no paging plan"
        )
    dtype = dtype or cast(torch.dtype | None, text.dtype or config.dtype) or torch.bfloat16
    try:
        with torch.device("meta"):
            model, cache = _run(config, dtype)
    except Exception as error:
        # Some models branch on values, which meta tensors refuse and fake ones can leave open. Not fake ones at once:
        # they are slower, and some models cannot be built of them.
        try:
            with _fake_tensors():
                model, cache = _run(config, dtype)
        except Exception:
            raise ConfigurationError(
                f"cannot tell what a cache for {name} holds, for the model does not run without values: "
                f"{type(error).__name__}: {_first_line(error)}. If the config is complete, fill a cache and look at "
                "its memory_usage()."
            ) from error
    layers = tuple(map(_layer, cache.layers))
    if not any(layer.nbytes(1) for layer in layers):
        raise ConfigurationError(f"models of {name} keep nothing in transformers' cache: there is nothing to page")
    weights = dict(model.named_parameters())
    routed = [states for path, states in weights.items() if ".experts." in path and states.ndim == 3]
    per_token = getattr(text, "num_experts_per_tok", None)
    return Footprint(
        layers,
        weight_bytes=sum(states.nbytes for states in weights.values()),
        routed_bytes=sum(states.nbytes for states in routed),
        # Experts are stacked: the first extent counts them.
        routed_share=min(1.0, per_token / routed[0].shape[0]) if routed and per_token else 1.0,
    )


@torch.no_grad()
def _run(config: PreTrainedConfig, dtype: torch.dtype) -> tuple["PreTrainedModel", DynamicCache]:
    """The model, made where the context says, and what its cache is after one token."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    config = copy.deepcopy(config)  # models leave what they are made with in theirs
    text = config.get_text_config(decoder=True)
    # The text decoder where there is a class for it alone.
    ways: list[tuple[Any, PreTrainedConfig]] = [
        (AutoModelForCausalLM, text),
        (AutoModelForCausalLM, config),
        (AutoModel, text),
        (AutoModelForImageTextToText, config),
    ]
    auto, known = next((way for way in ways if type(way[1]) in way[0]._model_mapping), ways[0])
    # Eager attention is the one that every model has; batched experts run without values in every dtype.
    simplest = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    model: PreTrainedModel = auto.from_config(known, dtype=dtype, **simplest).eval()
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=torch.zeros((1, 1), dtype=torch.long), **{cache_argument(model): cache}, use_cache=True)
    return model, cache


@contextmanager
def _fake_tensors() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what fails is raised; it need not be printed, stack and all, as well
    try:
        with FakeTensorMode(shape_env=ShapeEnv()):
            yield
    finally:
        logger.setLevel(level)


def _layer(layer: Any) -> LayerFootprint:
    """What is in one of upstream's layers that has seen one token of one row."""
    held = dict(vars(layer))
    fixed = []
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        fixed = list(_tensors([held.pop("conv_states"), held.pop("recurrent_states")]))
    keys, values = (list(_tensors([held.pop(name, None)])) for name in ("keys", "values"))
    if type(layer).__module__ != DynamicLayer.__module__ or any(states.shape[-2] != 1 for states in keys + values):
        raise ConfigurationError(
            f"cannot tell how a {type(layer).__name__} of this model grows: it keeps something other than one key and "
            "one value a token. Fill a cache and look at its memory_usage()."
        )
    window = getattr(layer, "sliding_window", None)
    return LayerFootprint(
        is_paged=type(layer) is DynamicLayer,
        spec=LayerSpec.of(keys[0], values[0]) if keys and values else None,
        index_bytes=_nbytes(states for states in _tensors(held.values()) if states.ndim),  # scalars are settings
        window=None if window is None else window - 1,  # the newest token's is not kept for the step after it
        fixed_bytes=_nbytes(fixed),
    )


def _tensors(held: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in held:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(states.nbytes for states in tensors)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
