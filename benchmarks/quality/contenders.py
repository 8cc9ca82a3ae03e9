"""The caches compared: how each is made, when it quantizes, how much it stores."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedConfig, QuantizedCache
from transformers.cache_utils import Cache

from nvme_cache import OffloadedNVMeCache, QuantizationConfig

_RESIDUAL_LENGTH = 128  # transformers' default
_Q_GROUP_SIZE = 64  # both libraries' default
_BLOCK_SIZE = 256  # ours
EXACT = "exact"  # the name of the cache that all are compared with


class Make(Protocol):
    """Makes an empty cache for a model of `config`, with `folder` for what goes to a drive."""

    def __call__(self, config: PreTrainedConfig, folder: Path) -> Cache: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """A cache that takes part.

    Attributes:
        name: What tables call it.
        make: Makes an empty one.
        step: Every how many tokens it quantizes, fed one token at a time.
        lead: How many of the first tokens come in addition before it does so first.
        parts: In how many calls a piece is fed that others are fed in one.
        is_ours: Whether it is `OffloadedNVMeCache`.
        options: What the cache was given, for the record.
    """

    name: str
    make: Make
    step: int
    lead: int = 0
    parts: int = 1
    is_ours: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """For the record."""
        return {"is_ours": self.is_ours, "quantizes_every_tokens": self.step, "options": self.options}

    def chunks(self, length: int) -> list[int]:
        """`length` tokens in pieces such that attention sees quantized what it sees quantized when decoding.

        Both libraries return the tokens of a call as they came and quantize behind it, transformers as soon as
        `residual_length` tokens are exact, ours in whole blocks. Fed in pieces of just that length, a token attends to
        as many exact ones as it would when decoding: all since the last time something was quantized. Longer pieces
        would quantize less often, others at other places: either would flatter one of the two.
        """
        pieces = [min(self.lead + self.step, length)]
        while (rest := length - sum(pieces)) > 0:
            pieces.append(min(self.step, rest))
        return pieces

    @contextmanager
    def open(self, config: PreTrainedConfig, folder: Path) -> Iterator[Cache]:
        """An empty cache, closed at the end."""
        cache = self.make(config, folder)
        try:
            yield cache
        finally:
            close(cache)


def ours(name: str, quantization: str | QuantizationConfig | None, block_size: int = _BLOCK_SIZE) -> Contender:
    """`OffloadedNVMeCache`, with all blocks in memory: where they are is nothing to their quality."""
    sinks = 0
    if quantization is not None:
        config = quantization if isinstance(quantization, QuantizationConfig) else QuantizationConfig()
        sinks = config.sink_tokens
    options = {"quantization": quantization, "block_size": block_size}
    return Contender(
        f"nvme-cache {name}",
        partial(_make_ours, options),
        step=block_size,
        lead=sinks,
        is_ours=True,
        options=options | {"quantization": str(quantization)},
    )


def exact() -> Contender:
    """The cache that all are compared with, fed as ours are."""
    return Contender(EXACT, _make_exact, step=_BLOCK_SIZE, lead=QuantizationConfig().sink_tokens)


def exact_in_thirds() -> Contender:
    """The same once more, in smaller products, which round differently: what even an exact cache is off by."""
    return replace(exact(), name=f"{EXACT}, in thirds", parts=3)


def quanto(nbits: int, axis_key: int = 0, residual_length: int = _RESIDUAL_LENGTH) -> Contender:
    """The `QuantizedCache` of transformers: groups of 64 for each token (axis 0), or for each channel (axis -1)."""
    options: dict[str, Any] = {
        "backend": "quanto",
        "nbits": nbits,
        "axis_key": axis_key,
        "axis_value": 0,
        "q_group_size": _Q_GROUP_SIZE,
        "residual_length": residual_length,
    }
    name = f"quanto int{nbits}" + (", keys by channel" if axis_key else "")
    return Contender(
        name if residual_length == _RESIDUAL_LENGTH else f"{name}, {residual_length} exact",
        lambda config, folder: QuantizedCache(config=config, **options),
        step=residual_length,
        options=options,
    )


def all_contenders() -> list[Contender]:
    """Every cache that takes part where transformers' quantized ones work."""
    return [
        exact(),
        exact_in_thirds(),
        ours("int8", "int8"),
        ours("float8", "float8"),
        ours("int8 keys, int4 values", QuantizationConfig(key="int8", value="int4")),
        ours("int4", "int4"),
        ours("int2", "int2"),
        quanto(4),
        quanto(4, axis_key=-1),
        quanto(4, axis_key=-1, residual_length=_BLOCK_SIZE),
        quanto(2),
        quanto(2, axis_key=-1),
    ]


def working(contenders: list[Contender], config: PreTrainedConfig, folder: Path) -> tuple[list[Contender], list[str]]:
    """Those that can store something here, and of the others why not: quanto compiles its kernels when first used."""
    able, reasons = [], []
    states = torch.zeros(1, 1, _RESIDUAL_LENGTH, _Q_GROUP_SIZE)
    for contender in contenders:
        try:
            with contender.open(one_layer(config), folder) as cache:
                for _ in range(2):
                    cache.update(states, states.clone(), 0)
        except Exception as error:
            reasons.append(f"left out: {contender.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            able.append(contender)
    return able, reasons


def one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same with its first layer alone."""
    single: PreTrainedConfig = copy.deepcopy(config.get_text_config(decoder=True))
    if getattr(single, "layer_types", None):
        single.layer_types = single.layer_types[:1]
    single.num_hidden_layers = 1
    return single


def branch(cache: Cache) -> Cache:
    """Another cache that holds the same; what either is fed from now on is nothing to the other."""
    if not isinstance(cache, QuantizedCache):
        return copy.deepcopy(cache)
    twin = copy.copy(cache)  # quanto's tensors cannot be copied, but no layer ever writes into its tensors
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def close(cache: Cache) -> None:
    """Gives up files and memory."""
    if isinstance(cache, OffloadedNVMeCache):
        cache.close()


def stored_bytes(cache: Cache) -> int:
    """Bytes of all keys and values, scales and shifts."""
    if isinstance(cache, OffloadedNVMeCache):
        return sum(cache.memory_usage().values())
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(_nbytes(getattr(layer, name, None)) for layer in cache.layers for name in names)


def _make_exact(config: PreTrainedConfig, folder: Path) -> Cache:
    return DynamicCache(config=config)


def _make_ours(options: dict[str, Any], config: PreTrainedConfig, folder: Path) -> Cache:
    return OffloadedNVMeCache(config=config, offload_dir=folder, host_budget="8GiB", **options)


def _nbytes(tensor: Any) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # quanto's: made of codes, scales and shifts
        names, _ = tensor.__tensor_flatten__()
        return sum(_nbytes(getattr(tensor, name)) for name in names)
    return 0 if tensor is None else int(tensor.nbytes)
