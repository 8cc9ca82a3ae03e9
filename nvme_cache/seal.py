"""Sealing: tokens become blocks, stored as their codecs say, in the tiers that the placement names."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .blocks import BlockRun, Layout, ResidentBlocks, cut, pack
from .buffers import StagingPool, shaped
from .fetch import Filler
from .io import ALIGNMENT, round_up
from .meter import Cause, Meter
from .placement import Tier
from .quantization import Exact, QuantizationConfig
from .shards import MAX_SECTION_BYTES, Shard, staged
from .slots import SlotPool
from .spill import Write, Writer
from .states import LayerSpec, States
from .store import Store
from .transfer import Event, Transfer

_EXACT = Exact(), Exact()
_MAX_QUANTIZED_BYTES = 4 << 20  # of keys, or values, in a shard: while some are decoded, others are read


@dataclass(slots=True)
class Lane:
    """What one device needs to move blocks; `packed` is behind the last tokens sealed."""

    transfer: Transfer
    slots: SlotPool
    segment_slots: SlotPool
    staging: StagingPool
    filler: Filler
    packed: Event


@dataclass(frozen=True, slots=True)
class Sealer:
    """Seals tokens of any layer.

    Attributes:
        store: Where shards go.
        writer: What writes them.
        meter: Told what was sealed, and how long staging buffers were waited for.
        block_size: Tokens in a block.
        quantization: How blocks are stored; None for as they are.
    """

    store: Store
    writer: Writer
    meter: Meter
    block_size: int
    quantization: QuantizationConfig | None

    def sinks_due(self, first_token: int) -> int:
        """How many tokens from position `first_token` on must stay exact."""
        return 0 if self.quantization is None else max(0, self.quantization.sink_tokens - first_token)

    def seal(
        self,
        lane: Lane,
        spec: LayerSpec,
        states: Sequence[States],
        *,
        layer_idx: int,
        first_token: int,
        place: Callable[[int, int], Mapping[Tier, int]],
    ) -> list[BlockRun]:
        """Turns tokens into blocks and sends them to their tiers. Waits only for staging buffers.

        Args:
            lane: Of the device where `states` are.
            spec: The layer's heads and widths, and the dtypes to seal in.
            states: Consecutive keys and values, `[batch, heads, seq_length, head_dim]` each: the sinks that are due,
                then whole blocks' worth of tokens. Their memory must not be written to again.
            layer_idx: The layer.
            first_token: Position of the first token.
            place: Given a number of blocks and the bytes of each, how many go to which tier.

        Returns:
            The new runs, in token order.

        Raises:
            StorageFullError: there is no room; nothing was sealed.
        """
        batch_size, sinks = states[0][0].shape[0], self.sinks_due(first_token)
        codecs = _EXACT if self.quantization is None else self.quantization.codecs(spec, self.block_size)
        block = Layout(spec, batch_size, codecs, 1, self.block_size)
        sizes = [[round_up(part.nbytes, ALIGNMENT) for part in parts] for parts in block.parts]
        limit = (MAX_SECTION_BYTES if codecs == _EXACT else _MAX_QUANTIZED_BYTES) // max(1, *map(sum, sizes))
        laid_out = max(kind.nbytes(self.block_size) * batch_size for kind in block.kinds)
        limit = max(1, min(limit, MAX_SECTION_BYTES // max(1, laid_out)))
        runs = [self._sink_run(lane, spec, batch_size, cut(states, 0, sinks))] if sinks else []
        num_blocks = (sum(keys.shape[2] for keys, _ in states) - sinks) // self.block_size
        start = sinks
        for tier, count in place(num_blocks, block.nbytes).items():
            while count:
                size = count if tier is Tier.DEVICE and codecs == _EXACT else min(count, limit)
                if tier is Tier.HOST:  # pinned memory comes in powers of two
                    size = 1 << (size.bit_length() - 1)
                stays = lane.transfer.is_host or tier is Tier.DEVICE
                pieces = 1 if stays and codecs == _EXACT else size
                layout = Layout(spec, batch_size, codecs, pieces, size // pieces * self.block_size)
                length = size * self.block_size
                part = cut(states, start, length)
                blocks: ResidentBlocks | Shard
                if tier is Tier.NVME:
                    blocks = self._spill(lane, layer_idx, first_token + start, layout, part)
                else:
                    blocks = self._keep(lane, tier, layout, part)
                runs.append(BlockRun(tier, blocks, layout, length))
                start, count = start + length, count - size
        self.meter.sealed_bytes += sum(run.nbytes for run in runs)
        return runs

    def _sink_run(self, lane: Lane, spec: LayerSpec, batch_size: int, states: list[States]) -> BlockRun:
        length = sum(keys.shape[2] for keys, _ in states)
        layout = Layout(spec, batch_size, _EXACT, 1, length)
        return BlockRun(Tier.DEVICE, self._keep(lane, Tier.DEVICE, layout, states), layout, length)

    def _spill(self, lane: Lane, layer_idx: int, first_token: int, layout: Layout, states: list[States]) -> Shard:
        shard = self.store.new_shard(layer_idx, first_token, layout.sections, layout.storage)
        began_s = time.perf_counter()
        buffers = [
            lane.staging.acquire(sum(section.padded_nbytes for section in sections)) for sections in shard.sections
        ]
        self.meter.waited({Cause.STAGING: time.perf_counter() - began_s})
        targets = [staged(buffer, sections) for buffer, sections in zip(buffers, shard.sections, strict=True)]
        self.writer.submit(Write(shard, lane.staging, buffers, states, self._pack(lane, layout, targets, states)))
        return shard

    def _keep(self, lane: Lane, tier: Tier, layout: Layout, states: list[States]) -> ResidentBlocks:
        make = lane.transfer.device_memory if tier is Tier.DEVICE else lane.transfer.host_memory
        keys, values = (
            tuple(shaped(make(part.nbytes), part.shape, part.dtype) for part in parts) for parts in layout.parts
        )
        event = self._pack(lane, layout, (keys, values), states)
        if not lane.transfer.is_host:
            self.writer.hold(event, states, (keys, values))
        return ResidentBlocks((keys, values), layout.nbytes)

    def _pack(
        self, lane: Lane, layout: Layout, targets: Sequence[Sequence[torch.Tensor]], states: Sequence[States]
    ) -> Event:
        transfer = lane.transfer
        # What was packed before came from memory that the model may soon write to again, if a graph replays it.
        transfer.wait(lane.packed)
        with transfer.side_stream(transfer.mark()):
            for index, (codec, parts) in enumerate(zip(layout.codecs, targets, strict=True)):
                near = [transfer.on_device(part) for part in parts]
                exact = isinstance(codec, Exact)
                blocks = near[0] if exact else transfer.empty(layout.shapes[index], layout.kinds[index].dtype)
                at = 0
                for part in states:
                    for block_view, token_view in pack(blocks, at, part[index]):
                        transfer.copy(block_view, token_view)
                    at += part[index].shape[2]
                if not exact:
                    transfer.convert(codec.encode, blocks, near)
                for target, encoded in zip(parts, near, strict=True):
                    if target is not encoded:
                        transfer.copy(target, encoded)
        lane.packed = transfer.record()
        return lane.packed
