"""Codecs: how the blocks of a layer's keys, or of its values, are stored.

optimum-quanto chooses the scales and rounds. Its kernels, which want a compiler, are never called: dequantizing is
plain torch, straight into the slot. A block is quantized once, when it is sealed.

Numbers that share a scale form a group. Keys are grouped along the tokens, one channel at a time, because a few of
their channels are much larger than the rest; values along the channels, one token at a time (KIVI,
https://arxiv.org/abs/2402.02750). Eight-bit formats are symmetric and take one group for a whole block's column or
row; int4 and int2 have a shift too and groups of about `q_group_size` numbers, always a divisor of the row, so that no
padding ever takes part in a scale.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, Protocol, TypeAlias

import torch

from .errors import ConfigurationError
from .states import LayerSpec, StateSpec

logger = logging.getLogger(__name__)

Axis: TypeAlias = Literal["channel", "token"]

_CHUNK_BYTES = 4 << 20
_BITS = {"int8": 8, "int4": 4, "int2": 2, "float8": 8}
FORMATS = tuple(_BITS)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How sealed blocks are stored.

    Attributes:
        key: Format of keys: "int8", "int4", "int2", "float8" (e4m3); None to keep them exact.
        value: Format of values, likewise.
        q_group_size: Numbers that share a scale and a shift in int4 and int2; where a row cannot be divided so, the
            divisor nearest to it.
        axis_key: What keys are grouped for: each "channel", along the tokens of a block, or each "token".
        axis_value: The same for values.
        sink_tokens: How many of the first tokens, which attention looks at most, stay exact and on the device.

    Raises:
        ConfigurationError: a format, an axis or a number that does not exist.
    """

    key: str | None = "int8"
    value: str | None = "int8"
    q_group_size: int = 64
    axis_key: Axis = "channel"
    axis_value: Axis = "token"
    sink_tokens: int = 4

    def __post_init__(self) -> None:
        for name, known in (("key", (None, *FORMATS)), ("value", (None, *FORMATS))):
            _check_one_of(name, getattr(self, name), known)
        for name in ("axis_key", "axis_value"):
            _check_one_of(name, getattr(self, name), ("channel", "token"))
        for name, least in (("q_group_size", 1), ("sink_tokens", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"{name}={value!r} must be a whole number of at least {least}")

    def codecs(self, spec: LayerSpec, block_size: int) -> "tuple[Codec, Codec]":
        """How a layer's keys and values are stored in blocks of `block_size` tokens; exactly, if not otherwise."""
        keys, values = (
            Quantized(name, axis, self.q_group_size, block_size) if name and _is_quantizable(kind) else Exact()
            for kind, name, axis in (
                (spec.keys, self.key, self.axis_key),
                (spec.values, self.value, self.axis_value),
            )
        )
        for kind, name in ((spec.keys, self.key), (spec.values, self.value)):
            if name and kind.nbytes(1) and not _is_quantizable(kind):
                warn_of_exact((f"keys and values of {kind.dtype}",))
        return keys, values


def parse_quantization(value: object) -> QuantizationConfig | None:
    """A config, the name of one format for keys and values, or None for exact blocks.

    Raises:
        ConfigurationError: anything else.
    """
    if value is None or isinstance(value, QuantizationConfig):
        return value
    _check_one_of("quantization", value, (None, *FORMATS), ", or a QuantizationConfig")
    return QuantizationConfig(key=str(value), value=str(value))


def check_installed(quantization: QuantizationConfig | None) -> QuantizationConfig | None:
    """The same, once it is clear that what it needs can be imported.

    Raises:
        ConfigurationError: optimum-quanto cannot be imported.
    """
    if quantization is not None:
        _quanto()
    return quantization


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of stored blocks; `name` is empty for the numbers themselves, else what they are decoded with."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Codec(Protocol):
    """How blocks, `[num_blocks, batch, heads, block_size, head_dim]`, are stored.

    Every part has as many blocks and batch rows as they, in front.
    """

    def describe(self) -> str:
        """What it takes to decode, as JSON."""

    def parts(self, shape: Sequence[int], dtype: torch.dtype) -> list[Part]:
        """What blocks of `shape` and `dtype` become."""

    def encode(self, blocks: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Stores `blocks` in memory for their parts, all on one device."""

    def decode(self, parts: Sequence[torch.Tensor], states: torch.Tensor) -> None:
        """Lays out the first tokens of stored blocks in `states`, `[num_blocks, batch, heads, length, head_dim]`."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Blocks as they are."""

    def describe(self) -> str:
        return json.dumps({"format": "exact"})

    def parts(self, shape: Sequence[int], dtype: torch.dtype) -> list[Part]:
        return [Part("", tuple(shape), dtype)]

    def encode(self, blocks: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        parts[0].copy_(blocks)

    def decode(self, parts: Sequence[torch.Tensor], states: torch.Tensor) -> None:
        states.copy_(parts[0][:, :, :, : states.shape[3]])


@dataclass(frozen=True, slots=True)
class Quantized:
    """Blocks as small integers, or 8-bit floats, with a scale for each group and below 8 bits a shift.

    `number = code * scale - shift`. Codes of 8 bits are `[num_blocks, batch, heads, block_size, head_dim]`. Smaller
    ones are packed into bytes: `[num_blocks, batch, heads, spans, packed, head_dim]`, where a span is the tokens of a
    group if groups run along the tokens, else the whole block; byte `i` holds the codes of the span's tokens `i`,
    `i + packed`, and so on, lowest bits first. Scales and shifts have the dtype of the numbers and are `[num_blocks,
    batch, heads, block_size / group_size, head_dim]` along the tokens, `[num_blocks, batch, heads, block_size,
    head_dim / group_size]` along the channels.

    A group that holds an inf or a NaN comes back as NaN.

    Attributes:
        format: One of `FORMATS`.
        axis: What groups are for: each channel or each token.
        q_group_size: Numbers in a group, wished for; 8-bit formats take a whole row.
        block_size: Tokens in a block.
    """

    format: str
    axis: Axis
    q_group_size: int
    block_size: int

    def describe(self) -> str:
        return json.dumps(asdict(self))

    def parts(self, shape: Sequence[int], dtype: torch.dtype) -> list[Part]:
        *outer, block_size, head_dim = shape
        group_size = self._group_size(head_dim)
        if self.axis == "channel":
            scales = (*outer, block_size // group_size, head_dim)
        else:
            scales = (*outer, block_size, head_dim // group_size)
        if self._per_byte == 1:
            code = torch.float8_e4m3fn if self.format == "float8" else torch.int8
            return [Part("", tuple(shape), code), Part("scale", scales, dtype)]
        span = self._span(group_size)
        codes = (*outer, block_size // span, -(-span // self._per_byte), head_dim)
        return [Part("", codes, torch.uint8), Part("scale", scales, dtype), Part("shift", scales, dtype)]

    @torch.no_grad()
    def encode(self, blocks: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        group_size = self._group_size(blocks.shape[4])
        if self.axis == "channel":  # one group a column, [group_size, num_groups]
            spans = blocks.unflatten(3, (-1, group_size))
            codes, *scales = _quantize(spans.movedim(4, 0).flatten(1), self.format, axis=-1)
            codes = codes.unflatten(1, (*spans.shape[:4], spans.shape[5])).movedim(0, 4)
        else:  # one group a row, [num_groups, group_size]
            codes, *scales = _quantize(blocks.reshape(-1, group_size), self.format, axis=0)
            codes = codes.view(blocks.shape).unsqueeze(3)
        if self._per_byte > 1:
            codes = _packed(codes, _BITS[self.format])
        for part, tensor in zip(parts, (codes, *scales), strict=True):
            part.copy_(tensor.reshape(part.shape))

    @torch.no_grad()
    def decode(self, parts: Sequence[torch.Tensor], states: torch.Tensor) -> None:
        if states.shape[3] < self.block_size or states.dtype != parts[1].dtype:
            whole = states.new_empty((*states.shape[:3], self.block_size, states.shape[4]), dtype=parts[1].dtype)
            self.decode(parts, whole)
            states.copy_(whole[:, :, :, : states.shape[3]])
        else:
            # A processor finds in its cache what the step before left there; an accelerator wants few large calls.
            size = states.shape[0]
            if states.device.type == "cpu":
                size = max(1, _CHUNK_BYTES * size // states.nbytes)
            for chunk, *own in zip(states.split(size), *(part.split(size) for part in parts), strict=True):
                self._decode(own, chunk)

    def _decode(self, parts: Sequence[torch.Tensor], states: torch.Tensor) -> None:
        packed, *scales = parts
        if self._per_byte == 1:
            self._lay_out(packed.unsqueeze(3), scales, states, 0, self.block_size)
            return
        bits, span = _BITS[self.format], self._span(self._group_size(states.shape[4]))
        codes = torch.empty_like(packed)
        for index in range(self._per_byte):
            start = index * packed.shape[4]
            stop = min(start + packed.shape[4], span)
            if start < stop:
                torch.bitwise_right_shift(packed, bits * index, out=codes)
                if index < self._per_byte - 1:
                    codes.bitwise_and_((1 << bits) - 1)
                self._lay_out(codes[:, :, :, :, : stop - start], scales, states, start, stop)

    def _lay_out(
        self, codes: torch.Tensor, scales: Sequence[torch.Tensor], states: torch.Tensor, start: int, stop: int
    ) -> None:
        """Decodes tokens `start` to `stop` of each span, `[num_blocks, batch, heads, spans, length, head_dim]`."""
        group_size = self._group_size(states.shape[4])
        target = states.unflatten(3, (codes.shape[3], -1))[:, :, :, :, start:stop]
        if self.axis == "channel":
            scales = [scale.unsqueeze(4) for scale in scales]
        else:
            target, codes = target.unflatten(5, (-1, group_size)), codes.unflatten(5, (-1, group_size))
            scales = [scale[:, :, :, None, start:stop, :, None] for scale in scales]
        target.copy_(codes)
        target.mul_(scales[0])
        for shift in scales[1:]:
            target.sub_(shift)

    @property
    def _per_byte(self) -> int:
        return 8 // _BITS[self.format]

    def _span(self, group_size: int) -> int:
        return group_size if self.axis == "channel" else self.block_size

    def _group_size(self, head_dim: int) -> int:
        row = self.block_size if self.axis == "channel" else head_dim
        return row if self._per_byte == 1 else nearest_divisor(row, self.q_group_size)


@cache
def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted` in ratio, the smaller of two."""
    divisors = (divisor for divisor in range(1, number + 1) if number % divisor == 0)
    return min(divisors, key=lambda divisor: (max(divisor, wanted) / min(divisor, wanted), divisor))


@cache
def stored_token_bytes(spec: LayerSpec, quantization: QuantizationConfig | None, block_size: int) -> float:
    """Bytes that a token of one batch row takes in sealed blocks, with its share of what decodes them."""
    if quantization is None:
        return spec.nbytes(1)
    kinds = zip(quantization.codecs(spec, block_size), (spec.keys, spec.values), strict=True)
    blocks = (codec.parts((1, 1, kind.num_heads, block_size, kind.head_dim), kind.dtype) for codec, kind in kinds)
    return sum(part.nbytes for parts in blocks for part in parts) / block_size


def _is_quantizable(kind: StateSpec) -> bool:
    return kind.nbytes(1) > 0 and kind.dtype.itemsize > 1  # floats of 8 bits are as small already


def _quantize(groups: torch.Tensor, name: str, *, axis: int) -> Iterator[torch.Tensor]:
    """Codes, scales and, below 8 bits, shifts of a matrix with one group for each index of `axis`."""
    quanto = _quanto()
    alone = groups.shape[axis] == 1  # which quanto takes for a matrix to be quantized as a whole
    if alone:
        groups = groups.expand(2, -1) if axis == 0 else groups.expand(-1, 2)
    qtype = quanto.qfloat8_e4m3fn if name == "float8" else getattr(quanto, f"q{name}")
    if qtype.bits == 8:
        scales = [_positive(quanto.AbsmaxOptimizer()(groups, qtype, axis))]
        codes = torch.ops.quanto.quantize_symmetric(groups, qtype.dtype, axis, scales[0])
    else:
        scale, shift = quanto.MaxOptimizer()(groups, qtype, axis)
        scales = [_positive(scale), shift]
        codes = torch.ops.quanto.quantize_affine(groups, qtype.bits, axis, None, *scales)
    return (tensor.narrow(axis, 0, 1) if alone else tensor for tensor in (codes, *scales))


def _positive(scale: torch.Tensor) -> torch.Tensor:
    # A group of equal numbers has the scale 0, by which nothing can be divided; with any other its codes are 0.
    return scale.masked_fill_(scale == 0, 1)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes, `[num_blocks, batch, heads, spans, span, head_dim]`, packed along their spans."""
    length = -(-codes.shape[4] // (8 // bits))
    packed = codes.new_zeros((*codes.shape[:4], length, codes.shape[5]))
    for index, part in enumerate(codes.split(length, dim=4)):
        packed[:, :, :, :, : part.shape[4]] |= part << (bits * index)
    return packed


def _quanto() -> Any:
    try:
        from optimum import quanto
    except ImportError as error:
        raise ConfigurationError(
            f"quantization needs optimum-quanto 0.2.6 or newer, which cannot be imported: {error}. Install it "
            "(pip install optimum-quanto) or pass quantization=None."
        ) from error
    return quanto


@cache  # said once
def warn_of_exact(kinds: tuple[str, ...]) -> None:
    """Says which kinds of layers `quantization` leaves alone."""
    logger.warning(
        "quantization is for layers of full attention in 16 bits or more; these stay as they are: %s", ", ".join(kinds)
    )


def _check_one_of(name: str, value: object, known: Sequence[object], more: str = "") -> None:
    if value not in known:
        listed = ", ".join(str(each) if each is None else f'"{each}"' for each in known)
        raise ConfigurationError(f"{name}={value!r} must be one of {listed}{more}")
