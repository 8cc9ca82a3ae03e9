"""Decoding steps against the floor: what a step costs beside what computing and moving its bytes cost alone.

The context is not computed but filled in: every layer is given the same random keys and values. Each step then decodes
the same token whatever the cache, so logits must agree bit for bit with those of `DynamicCache` here too.
"""

import shutil
import statistics
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from transformers import DynamicCache, PreTrainedModel

from nvme_cache import OffloadedNVMeCache
from nvme_cache.arguments import cache_argument

from .correctness import same_bits
from .models import large
from .run import GIB, Run, SkippedError

BLOCK_SIZE = 256
_LAYERS_IN_FLIGHT = 6  # slots, the states that the context is filled with, and one layer growing
_FEWEST_STEPS, _MOST_STEPS = 2, 8
_STEPS_S = 5.0  # that long at each setting, unless the fewest take longer
_SPARE_BYTES = 3 * GIB  # for activations, staging and the fragments of allocators
_PINNING_BYTES_PER_S = 2e9  # a cautious guess at how fast host memory is pinned
_SLOWEST = {"h2d": 10e9, "read": 0.5e9, "write": 0.3e9}  # assumed where nothing was measured


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the blocks are: shares of the sealed bytes, the rest on NVMe. None for transformers' own cache."""

    name: str
    host: float | None = None
    device: float = 0.0
    offloading: bool = False


PLAIN = Setting("DynamicCache")
SETTINGS = (
    PLAIN,
    Setting("device 100 %", host=0.0, device=1.0),
    Setting("host 100 %", host=1.0),
    Setting("DynamicCache(offloading=True)", offloading=True),
    Setting("host 50 %", host=0.5),
    Setting("host 0 %", host=0.0),
)


@dataclass
class Bench:
    """A model and a context: everything that the settings share.

    Attributes:
        run: The run.
        model: What decodes.
        context: Tokens that the steps stay within.
        compute_s: Median step with `DynamicCache`, once measured.
        logits: What the first setting measured gave, step by step, each `[vocabulary]`.
    """

    run: Run
    model: PreTrainedModel
    context: int
    compute_s: float | None = None
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens filled in: whole blocks, with room for the steps."""
        return self.context - BLOCK_SIZE

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's keys and values."""
        config = self.model.config
        return 2 * self.cached * config.num_key_value_heads * config.head_dim * self.model.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers' keys and values."""
        return self.layer_bytes * self.model.config.num_hidden_layers

    def placed(self, setting: Setting) -> dict[str, int]:
        """Bytes by tier: whole blocks, the same number in every layer."""
        if setting.host is None:
            stock = {"device": self.total_bytes, "host": 0, "nvme": 0}
            return stock | ({"device": 0, "host": self.total_bytes} if setting.offloading else {})
        blocks = self.cached // BLOCK_SIZE
        device, host = int(setting.device * blocks), int(setting.host * blocks)
        counts = {"device": device, "host": host, "nvme": blocks - device - host}
        return {tier: count * self.total_bytes // blocks for tier, count in counts.items()}

    def make(self, setting: Setting) -> DynamicCache:
        """An empty cache."""
        config, placed = self.model.config, self.placed(setting)
        if setting.host is None:
            return DynamicCache(config=config, **({"offloading": True} if setting.offloading else {}))
        return OffloadedNVMeCache(
            config=config,
            offload_dir=self.run.folder,
            block_size=BLOCK_SIZE,
            device_budget=placed["device"],
            host_budget=placed["host"],
        )

    def floor(self, placed: dict[str, int], rates: dict[str, float]) -> dict[str, float]:
        """Seconds a step takes at least, by what bounds it: computing, crossing to the device, reading the drive."""
        # What is read to a device crosses as well; on CPU the drive fills the slot itself.
        crossing = placed["host"] + (0 if self.run.device.is_cpu else placed["nvme"])
        bounds = {"compute": self.compute_s, "h2d": crossing / rates["h2d"], "nvme": placed["nvme"] / rates["read"]}
        return {bound: seconds for bound, seconds in bounds.items() if seconds is not None}


def measure(run: Run, results: dict[str, Any]) -> None:
    """Fills `results` with an entry for each context and setting."""
    model = large(run.device, run.attentions[-1], quick=run.quick)
    run.device.synchronize()
    config = model.config
    results["model"] = {
        "layers": config.num_hidden_layers,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype),
        "attention": run.attentions[-1],
    }
    run.say(f"overlap: {results['model']}")
    _warm_up(run, model)
    results["entries"] = []
    for context in (1024, 4096) if run.quick else (8 << 10, 32 << 10, 128 << 10):
        bench = Bench(run, model, context)
        for setting in SETTINGS:
            entry: dict[str, Any] = {"context": context, "setting": setting.name}
            results["entries"].append(entry)
            try:
                _check_room(bench, setting)
                entry |= _measure(bench, setting)
            except (SkippedError, torch.OutOfMemoryError) as reason:
                entry["skipped"] = str(reason)
            except Exception:
                entry["skipped"] = traceback.format_exc()
                run.problem(f"{setting.name} at {context} tokens failed")
            run.device.empty_cache()
            run.say(f"overlap: {_line(entry)}")
            if entry.get("identical") is False and not setting.offloading:
                run.problem(f"logits differ at {context} tokens, {setting.name}")


def _warm_up(run: Run, model: PreTrainedModel) -> None:
    """Loads the kernels, so that the first setting measured does not pay for it."""
    bench, cache = Bench(run, model, context=2 * BLOCK_SIZE), DynamicCache(config=model.config)
    _fill(bench, cache)
    for number in range(3):
        _step(bench, cache, number)


def _measure(bench: Bench, setting: Setting) -> dict[str, Any]:
    device = bench.run.device
    device.synchronize()
    model_bytes = device.memory("memory_allocated")
    cache = bench.make(setting)
    try:
        seal_s = _fill(bench, cache)
        placed = cache.memory_usage() if isinstance(cache, OffloadedNVMeCache) else bench.placed(setting)
        _, first = _step(bench, cache, 0)  # brings what was sealed last; the order of layers is known after it
        device.reset_peak()
        before = _counted(cache)
        times, logits = [], [first]
        for number in range(1, 1 + (_FEWEST_STEPS if bench.run.quick else _MOST_STEPS)):
            if number > _FEWEST_STEPS and sum(times) > min(_STEPS_S, bench.run.left_s()):
                break
            step_s, step_logits = _step(bench, cache, number)
            times.append(step_s)
            logits.append(step_logits)
        median_s = statistics.median(times)
        if setting == PLAIN:
            bench.compute_s = median_s
        bench.logits = bench.logits or logits
        common = list(zip(logits, bench.logits, strict=False))
        return {
            "steps": len(times),
            "step_s": median_s,
            "slowest_step_s": max(times),
            **_floor(bench, placed, median_s),
            **{name: (total - before[name]) / len(times) for name, total in _counted(cache).items()},
            "seal_s": seal_s,
            "identical": all(same_bits(*pair) for pair in common),
            **{f"{tier}_bytes": nbytes for tier, nbytes in placed.items()},
            "peak_device_bytes": max(0, device.memory("max_memory_allocated") - model_bytes),
            "process_rss_bytes": psutil.Process().memory_info().rss,
        }
    finally:
        if isinstance(cache, OffloadedNVMeCache):
            cache.close()


def _fill(bench: Bench, cache: DynamicCache) -> float:
    """Gives every layer the same random states; returns the seconds until all of it is where it belongs."""
    config, device = bench.model.config, bench.run.device
    torch.manual_seed(2)
    shape = (1, config.num_key_value_heads, bench.cached, config.head_dim)
    keys, values = (torch.randn(shape, dtype=bench.model.dtype, device=device.torch) for _ in range(2))
    device.synchronize()
    began = time.perf_counter()
    with torch.no_grad():
        for layer_idx in range(config.num_hidden_layers):
            cache.update(keys, values, layer_idx)
    if isinstance(cache, OffloadedNVMeCache):
        cache._pager.flush()
    device.synchronize()
    return time.perf_counter() - began


@torch.no_grad()
def _step(bench: Bench, cache: DynamicCache, number: int) -> tuple[float, torch.Tensor]:
    """One decoding step: its seconds, and its logits `[vocabulary]` on CPU."""
    ids = torch.tensor([[3 + number]], device=bench.run.device.torch)
    argument = {cache_argument(bench.model): cache}
    bench.run.device.synchronize()
    began = time.perf_counter()
    logits = bench.model(input_ids=ids, use_cache=True, **argument).logits
    bench.run.device.synchronize()
    return time.perf_counter() - began, logits[0, -1].cpu()


def _floor(bench: Bench, placed: dict[str, int], step_s: float) -> dict[str, Any]:
    if not bench.run.rates:
        return {}
    bounds = bench.floor(placed, bench.run.rates)
    bound = max(bounds, key=lambda name: bounds[name])
    return {"floor_s": bounds[bound], "floor_bound": bound, "efficiency": bounds[bound] / step_s}


def _counted(cache: DynamicCache) -> dict[str, float]:
    """What a paged cache counts, named as what becomes of it a step."""
    if not isinstance(cache, OffloadedNVMeCache):
        return {}
    decode = cache.tax.decode
    return {
        "tax_s_per_step": decode.total_tax_s if decode else 0.0,
        "read_bytes_per_step": cache._pager.meter.read_bytes,
    }


def _check_room(bench: Bench, setting: Setting) -> None:
    """Raises `SkippedError` if device memory, host memory, the drive or the time left do not allow the setting."""
    run, placed = bench.run, bench.placed(setting)
    if setting.offloading and run.device.torch.type != "cuda":
        raise SkippedError("transformers offloads from CUDA devices only")
    spare = _SPARE_BYTES // (64 if run.quick else 1)
    rates = _SLOWEST | run.rates
    host_bytes = placed["host"] * (2 if setting.offloading else 1)  # it keeps the old copy while it makes the new one
    step_s = max(bench.floor(placed, rates).values()) * (2 if setting.offloading else 1.5)
    seal_s = placed["nvme"] / rates["write"] + host_bytes / _PINNING_BYTES_PER_S
    device_bytes = placed["device"] + _LAYERS_IN_FLIGHT * bench.layer_bytes
    needs = {
        "bytes of device memory": (device_bytes + spare, run.device.free_bytes()),
        "bytes of host memory": (host_bytes + spare, _host_available(run, host_bytes + spare)),
        "free bytes on the drive": (placed["nvme"] + spare, shutil.disk_usage(run.folder).free),
        "seconds": (seal_s + 3 * step_s, run.left_s()),
    }
    for what, (needed, there) in needs.items():
        if needed > there:
            raise SkippedError(f"needs {needed:,.0f} {what}, {there:,.0f} are left")


def _host_available(run: Run, needed: int) -> int:
    if run.host_available() < needed:
        run.device.empty_host_cache()  # pinned memory of the settings before is kept for the next
    return run.host_available()


def _line(entry: dict[str, Any]) -> str:
    head = f"{entry['context']} tokens, {entry['setting']}: "
    if "skipped" in entry:
        return head + f"skipped: {entry['skipped']}"
    floor = f", floor {entry['floor_s'] * 1e3:.1f} ms ({entry['floor_bound']})" if "floor_s" in entry else ""
    same = "identical" if entry["identical"] else "DIFFERENT"
    return head + f"step {entry['step_s'] * 1e3:.1f} ms{floor}, sealed in {entry['seal_s']:.1f} s, logits {same}"
