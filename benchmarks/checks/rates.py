"""What the machine can move: between host and device, and to and from the drive by our own path."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from typing import Any

import torch
from transformers import LlamaConfig

from nvme_cache import OffloadedNVMeCache
from nvme_cache.buffers import HostBuffer
from nvme_cache.shards import Section, Sections, Shard
from nvme_cache.store import Store
from nvme_cache.transfer import transfer_for

from .run import GIB, MIB, Device, Run

Copies = tuple[torch.Tensor, torch.Tensor]

_SIZES_BYTES = (MIB, 16 * MIB, 64 * MIB)
_THREADS = (1, 2, 4)
_BLOCKS_SHAPE = (32, 1, 8, 256, 128)  # 16 MiB of bf16: half a shard, as a prompt of an 8B model makes them
_SHARD_BYTES = 32 * MIB


def measure(run: Run, results: dict[str, Any]) -> None:
    """Fills `results` with rates in bytes per second, and `run.rates` with the best of each kind."""
    results["copies"] = []
    for size in _SIZES_BYTES:
        entry = {"size_bytes": size} | _copy_rates(run.device, size, total=64 * MIB if run.quick else 2 * GIB)
        results["copies"].append(entry)
        run.say(f"rates: copies of {size // MIB} MiB: {_in_gb(entry)}")
    results["drive"] = []
    for threads in _while_time_is_left(run):
        entry = {"threads": threads} | _drive_rates(run, threads)
        results["drive"].append(entry)
        run.say(f"rates: shards, {threads} threads: {_in_gb(entry)}")
    results["fetch"] = []
    for threads in _while_time_is_left(run):
        entry = {"io_threads": threads} | _fetch_rate(run, threads)
        results["fetch"].append(entry)
        run.say(f"rates: drive to slots through a cache, {threads} threads: {_in_gb(entry)}")
    results["quantized"] = []
    for name in ("int8", "int4"):
        if run.left_s() > 0:
            entry = {"quantization": name} | _fetch_rate(run, max(_THREADS), name)
            results["quantized"].append(entry)
            run.say(f"rates: drive to slots through a cache, {name}: {_in_gb(entry)}")
    for name, entries in (("h2d", results["copies"]), ("read", results["drive"]), ("write", results["drive"])):
        run.rates[name] = max(entry[f"{name}_bytes_per_s"] for entry in entries)
    results["best"] = {f"{name}_bytes_per_s": rate for name, rate in run.rates.items()}


def _while_time_is_left(run: Run) -> Iterator[int]:
    for threads in _THREADS:
        if threads == _THREADS[0] or run.left_s() > 0:
            yield threads


def _copy_rates(device: Device, size: int, total: int) -> dict[str, float]:
    """Rates of contiguous copies from and to pinned memory, alone and both ways at once (the sum of the two)."""
    span = max(size, min(total, 256 * MIB))  # more than the processor's caches hold
    transfer = transfer_for(device.torch)
    hosts = [transfer.host_memory(span)[:span].view(-1, size).fill_(1) for _ in range(2)]
    devices = [transfer.device_memory(span)[:span].view(-1, size).fill_(1) for _ in range(2)]
    down, up = (devices[0], hosts[0]), (hosts[1], devices[1])
    return {
        "h2d_bytes_per_s": _rate(device, [down], total // size),
        "d2h_bytes_per_s": _rate(device, [up], total // size),
        "both_bytes_per_s": _rate(device, [down, up], total // size),
    }


def _rate(device: Device, pairs: Sequence[Copies], count: int) -> float:
    """Bytes per second of `count` copies of each pair's rows from its second to its first, each pair on a stream."""
    streams = [device.stream() for _ in pairs]

    def enqueue(count: int) -> None:
        for number in range(count):
            for stream, (target, source) in zip(streams, pairs, strict=True):
                row = number % len(source)
                with stream:
                    target[row].copy_(source[row], non_blocking=True)

    device.synchronize()
    enqueue(1)
    device.synchronize()
    elapsed_s = _timed(lambda: (enqueue(count), device.synchronize()))
    return count * len(pairs) * pairs[0][0][0].nbytes / elapsed_s


def _drive_rates(run: Run, threads: int) -> dict[str, float]:
    """Rates at which `threads` threads write shards and read them back, checksums included."""
    room = shutil.disk_usage(run.folder).free // 4
    count = max(threads, min(threads if run.quick else 64, room // _SHARD_BYTES))
    transfer = transfer_for(run.device.torch)
    with closing(Store(run.folder, None)) as store, ThreadPoolExecutor(threads) as pool:
        shards = [store.new_shard(0, 0, _sections()) for _ in range(count)]
        groups = [shards[thread::threads] for thread in range(threads)]
        buffers = [[HostBuffer(transfer.host_memory(_SHARD_BYTES // 2)) for _ in range(2)] for _ in groups]
        for buffer in chain.from_iterable(buffers):
            buffer.bytes.random_(0, 256)
        written_s = _timed(lambda: list(pool.map(_write, groups, buffers)))
        read_s = _timed(lambda: list(pool.map(_read, groups, buffers)))
    return {
        "write_bytes_per_s": count * _SHARD_BYTES / written_s,
        "read_bytes_per_s": count * _SHARD_BYTES / read_s,
    }


def _sections() -> tuple[Sections, Sections]:
    keys, values = (Section.of(name, _BLOCKS_SHAPE, torch.bfloat16) for name in ("keys", "values"))
    return (keys,), (values,)


def _write(shards: Sequence[Shard], buffers: Sequence[HostBuffer]) -> None:
    for shard in shards:
        shard.write(buffers)


def _read(shards: Sequence[Shard], buffers: Sequence[HostBuffer]) -> None:
    for shard in shards:
        for (section,), buffer in zip(shard.sections, buffers, strict=True):
            views = [[buffer.view[: section.padded_nbytes]]]
            shard.read([section], views)
            shard.verify([section], views)


def _fetch_rate(run: Run, io_threads: int, quantization: str | None = None) -> dict[str, float]:
    """Rates from drive to slots while nothing is computed: sweeps of one-token updates over all layers.

    `fetch` is of bytes as stored, `slots` of the keys and values that come of them.
    """
    layers, tokens, sweeps = (5, 2048, 2) if run.quick else (8, 16384, 3)
    config = LlamaConfig(num_hidden_layers=layers)
    states = torch.randn(2, 1, 8, tokens, 128).to(torch.bfloat16).to(run.device.torch)
    options = {"device_budget": 0, "host_budget": 0, "io_threads": io_threads, "quantization": quantization}
    with torch.no_grad(), OffloadedNVMeCache(config=config, offload_dir=run.folder, **options) as cache:

        def sweep(count: int) -> None:
            for layer_idx in list(range(layers)) * count:
                cache.update(*states[:, :, :, :1], layer_idx)
            run.device.synchronize()

        for layer_idx in range(layers):
            cache.update(*states, layer_idx)
        cache._pager.flush()
        sweep(1)
        before = cache._pager.meter.read_bytes
        elapsed_s = _timed(lambda: sweep(sweeps))
        return {
            "fetch_bytes_per_s": (cache._pager.meter.read_bytes - before) / elapsed_s,
            "slots_bytes_per_s": sweeps * layers * states.nbytes / elapsed_s,
        }


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _in_gb(entry: dict[str, float]) -> str:
    rates = {name: rate for name, rate in entry.items() if name.endswith("_bytes_per_s")}
    return ", ".join(f"{name.removesuffix('_bytes_per_s')} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
