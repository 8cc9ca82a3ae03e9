"""Decode steps against the floor, the step time that physics allows: `max(compute, bytes read / read rate)`."""

import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from transformers import LlamaConfig

from nvme_cache import OffloadedNVMeCache
from nvme_cache.footprint import footprint_of
from nvme_cache.machine import dequantize_rate
from nvme_cache.placement import Budgets, Tier, place
from nvme_cache.quantization import QuantizationConfig
from nvme_cache.tax import predict

from .drive import INT8
from .measure import Figures, Sample, bytes_per_s, interleave, paired, spread, timed
from .models import fill, token_bytes, wide_config
from .plan import MIB
from .rawfile import RawFile, touched_buffer
from .resident import ResidentCache
from .site import Site
from .synthetic import MODEL, Settings, Step, burst, steps_lasting

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
_BLOCK_SIZE = 256
_SPARE_TOKENS = 128
_BURST_S = 0.05
_COPIED_BYTES = 256 << 20
_READ, _COPY, _COMPUTE, _SOFTWARE, _WITHOUT = "read", "copy", "compute", "software", "without"
_Samples: TypeAlias = dict[tuple[str, object], list[Sample]]


@dataclass(frozen=True, slots=True)
class _Kept:
    """How a cache keeps its blocks: the resident share, and as what."""

    share: float
    quantization: QuantizationConfig | None = None


_KEPT = (*map(_Kept, SHARES), _Kept(0.0, INT8), _Kept(0.5, INT8))


def measure_steps(site: Site, raw: RawFile, drive: Figures) -> Figures:
    """Step time, floor and prediction for each context, setting and resident share.

    Args:
        site: Where to measure.
        raw: What to read for comparison.
        drive: What `measure_drive` found.
    """
    config = wide_config(site.plan.step_layers)
    settings = Settings(config)
    rows = [
        row
        for length in site.plan.step_contexts
        for row in _measure_context(site, raw, config, settings, length, drive)
    ]
    return {"layers": site.plan.step_layers, "token_layer_bytes": token_bytes(config), "rows": rows}


@dataclass(frozen=True, slots=True)
class _Fetching:
    """What the fetch path does with layers of about one size.

    Attributes:
        over_plain: Its rate over that of a plain reader.
        read_cpu_s_per_byte: CPU seconds it takes to read and check a byte.
        dequantize_cpu_s_per_byte: CPU seconds that a byte takes as it becomes keys and values in a slot.
    """

    over_plain: float
    read_cpu_s_per_byte: float
    dequantize_cpu_s_per_byte: float

    @classmethod
    def of(cls, drive: Figures, layer_bytes: int, kept: _Kept) -> "_Fetching":
        row = min(drive["fetch"], key=lambda row: abs(math.log(row["layer_bytes"] / layer_bytes)))
        name = "fetch" if kept.quantization is None else "fetch_int8"
        cpu_s_per_byte = row["contenders"][name]["cpu_s_per_gb"]["median"] / 1e9
        dequantize_s = 0.0 if kept.quantization is None else 1 / dequantize_rate("int8", torch.bfloat16)
        # Twice as many bytes come out as were read: int8 becomes bf16.
        return cls(row[f"{name}_over"]["plain"]["median"], max(0.0, cpu_s_per_byte - 2 * dequantize_s), dequantize_s)


def _measure_context(
    site: Site, raw: RawFile, config: LlamaConfig, settings: Settings, length: int, drive: Figures
) -> list[Figures]:
    layer_bytes = length * token_bytes(config)
    site.say(f"steps: {length:,} tokens, layers of {layer_bytes / MIB:g} MiB")
    read = raw.reader(layer_bytes // site.threads, max(layer_bytes, site.plan.sample_bytes // 4))
    layer_read_s = layer_bytes / max(bytes_per_s([read() for _ in range(3)]))
    count = steps_lasting(_BURST_S, layer_read_s * site.plan.step_layers)
    steps = settings.steps(layer_read_s)
    with ExitStack() as stack:
        caches = {kept: stack.enter_context(_filled_cache(site, config, length, kept)) for kept in _KEPT}
        resident = ResidentCache(config, length, _SPARE_TOKENS + count)
        copy = _copier(layer_bytes, caches[_KEPT[0]]._pager.prefetch_depth(layer_bytes) + 1)
        # One block in memory: what a step takes with it beyond nothing at all is our own code.
        small = stack.enter_context(_filled_cache(site, config, _BLOCK_SIZE, _Kept(1.0)))
        nothing = ResidentCache(config, _BLOCK_SIZE, _SPARE_TOKENS + count)
        contenders: dict[tuple[str, object], Callable[[], Sample]] = {
            (MODEL, _SOFTWARE): partial(burst, steps[MODEL], small, _BLOCK_SIZE, count),
            (MODEL, _WITHOUT): partial(burst, steps[MODEL], nothing, _BLOCK_SIZE, count),
        }
        for name, step in steps.items():
            contenders[name, _READ] = read
            contenders[name, _COPY] = copy
            contenders[name, _COMPUTE] = partial(burst, step, resident, length, count)
            for kept, cache in caches.items():
                contenders[name, kept] = partial(_cold_burst, site, step, cache, length, count)
        for cache in caches.values():
            burst(steps[MODEL], cache, length, 1)  # makes slots and faults them in
        samples = interleave(contenders, site.plan.steps)
    fetching = {kept: _Fetching.of(drive, layer_bytes, kept) for kept in _KEPT}
    return [_row(config, length, name, kept, samples, fetching[kept]) for name in steps for kept in _KEPT]


def _filled_cache(site: Site, config: LlamaConfig, length: int, kept: _Kept) -> OffloadedNVMeCache:
    cache = OffloadedNVMeCache(
        config=config,
        offload_dir=site.folder,
        block_size=_BLOCK_SIZE,
        host_budget=_budget(config, length, kept),
        quantization=kept.quantization,
        io_threads=site.threads,
    )
    fill(cache, config, 0, length)
    return cache


def _cold_burst(site: Site, step: Step, cache: OffloadedNVMeCache, length: int, count: int) -> Sample:
    site.make_cold(cache.offload_path)
    meter = cache._pager.meter
    return burst(step, cache, length, count, lambda: meter.read_bytes)


def _copier(nbytes: int, slots: int) -> Callable[[], Sample]:
    """What copies `nbytes` bytes at a time as resident blocks are: from all over memory, into slots in turn."""
    parts = max(slots + 1, _COPIED_BYTES // nbytes)
    source = touched_buffer(parts * nbytes).bytes.split(nbytes)
    targets = [touched_buffer(nbytes).bytes for _ in range(slots)]

    def copy() -> int:
        for number, part in enumerate(source):
            targets[number % slots].copy_(part)
        return parts * nbytes

    return lambda: timed(copy)


def _row(
    config: LlamaConfig,
    length: int,
    setting: str,
    kept: _Kept,
    samples: _Samples,
    fetching: _Fetching,
) -> Figures:
    steps, computes = samples[setting, kept], [sample.wall_s for sample in samples[setting, _COMPUTE]]
    read_rates, copy_rates = bytes_per_s(samples[setting, _READ]), bytes_per_s(samples[setting, _COPY])
    planned = _planned_bytes(config, length, kept)
    walls = [sample.wall_s for sample in steps]
    floors = [max(compute, step.nbytes / rate) for compute, step, rate in zip(computes, steps, read_rates, strict=True)]
    with_us, without = (statistics.median(s.wall_s for s in samples[MODEL, name]) for name in (_SOFTWARE, _WITHOUT))
    footprint = footprint_of(config, torch.bfloat16)
    predictions = [
        predict(
            footprint,
            context=length,
            compute_s=compute,
            nvme_bytes_per_s=rate * fetching.over_plain,
            quantization=kept.quantization,
            host_share=planned[Tier.HOST] / sum(planned.values()),
            software_s=max(0.0, with_us - without) / config.num_hidden_layers,
            compute_cores=torch.get_num_threads(),
            read_cpu_s_per_byte=fetching.read_cpu_s_per_byte,
            copy_cpu_s_per_byte=copy.cpu_s / copy.nbytes,
            dequantize_cpu_s_per_byte=fetching.dequantize_cpu_s_per_byte,
        ).step_s
        for compute, rate, copy in zip(computes, read_rates, samples[setting, _COPY], strict=True)
    ]
    return {
        "context_tokens": length,
        "layer_bytes": length * token_bytes(config),
        "setting": setting,
        "resident_share": kept.share,
        "stored_as": "exact" if kept.quantization is None else "int8",
        "step_s": spread(walls),
        "step_cpu_s": spread(sample.cpu_s for sample in steps),
        "compute_s": spread(computes),
        "read_rate_bytes_per_s": spread(read_rates),
        "copy_rate_bytes_per_s": spread(copy_rates),
        "step_read_bytes": steps[-1].nbytes,
        "planned_read_bytes": planned[Tier.NVME],
        "planned_copy_bytes": planned[Tier.HOST],
        "software_s": max(0.0, with_us - without),
        "floor_s": spread(floors),
        "predicted_s": spread(predictions),
        "efficiency": paired(floors, walls),
        "measured_over_predicted": paired(walls, predictions),
    }


def _budget(config: LlamaConfig, length: int, kept: _Kept) -> int:
    return round(kept.share * length // _BLOCK_SIZE * _block_bytes(config, kept) * config.num_hidden_layers)


def _block_bytes(config: LlamaConfig, kept: _Kept) -> int:
    """Bytes of a block of one layer, as stored."""
    stored = footprint_of(config, torch.bfloat16).stored_token_bytes(kept.quantization)
    return round(_BLOCK_SIZE * stored / config.num_hidden_layers)


def _planned_bytes(config: LlamaConfig, length: int, kept: _Kept) -> dict[Tier, int]:
    """Bytes of all layers by tier, as the placement plans them."""
    num_layers, block_bytes = config.num_hidden_layers, _block_bytes(config, kept)
    budgets, nothing = Budgets(0, _budget(config, length, kept)), dict.fromkeys(Tier, 0)
    placed = place(length // _BLOCK_SIZE, block_bytes, budgets, num_layers, nothing, nothing)
    return {tier: count * block_bytes * num_layers for tier, count in placed.items()}
