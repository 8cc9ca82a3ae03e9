"""Decoding with exact and with quantized blocks where nothing but the cache takes time.

python -m benchmarks.quantized /mnt/nvme [--tokens 16384] [--layers 8]

A slower drive can be had from the kernel, for whatever runs in a control group (v1: blkio.throttle.read_bps_device, v2:
io.max); docs/quantization.md shows how.
"""

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from nvme_cache import OffloadedNVMeCache
from nvme_cache.machine import dequantize_rate

FORMATS = (None, "int8", "int4")
_HEADS, _HEAD_DIM = 8, 128
_STEPS = 3


@torch.no_grad()
def main(
    folder: Annotated[Path, typer.Argument(help="Existing folder on the drive.")],
    tokens: Annotated[int, typer.Option(help="Cached tokens.")] = 16384,
    layers: Annotated[int, typer.Option(help="Layers of 8 KV heads of 128, bf16: 4 KiB a token each.")] = 8,
    rounds: Annotated[int, typer.Option(help="Interleaved; the figures are medians.")] = 7,
) -> None:
    """Prints milliseconds a step, and how many times the tokens per second of exact blocks."""
    config = LlamaConfig(num_hidden_layers=layers)
    states = torch.randn(2, 1, _HEADS, tokens, _HEAD_DIM).to(torch.bfloat16)

    def sweep(cache: OffloadedNVMeCache) -> None:
        for layer_idx in range(layers):
            keys, values = cache.update(*states[:, :, :, :1], layer_idx)
            keys[..., 0].sum(), values[..., 0].sum()  # attention looks at every token

    with ExitStack() as stack:
        caches = {}
        for name in FORMATS:
            options = {"offload_dir": folder, "host_budget": 0, "quantization": name}
            caches[name] = stack.enter_context(OffloadedNVMeCache(config=config, **options))
            for layer_idx in range(layers):
                caches[name].update(*states, layer_idx)
        samples: dict[str | None, list[float]] = {name: [] for name in FORMATS}
        cpu = {name: list(own) for name, own in samples.items()}
        for _ in range(rounds):
            for name, cache in caches.items():
                sweep(cache)
                began_s, cpu_began_s = time.perf_counter(), time.process_time()
                for _ in range(_STEPS):
                    sweep(cache)
                samples[name].append((time.perf_counter() - began_s) / _STEPS)
                cpu[name].append((time.process_time() - cpu_began_s) / _STEPS)
                cache.crop(-_STEPS - 1)
        table = Table("blocks", "stored MiB", "ms a step", "CPU ms", "tokens/s of exact", "a core dequantizes, GB/s")
        for name, cache in caches.items():
            table.add_row(
                name or "exact",
                f"{cache.memory_usage()['nvme'] / 2**20:,.0f}",
                f"{statistics.median(samples[name]) * 1e3:.0f}",
                f"{statistics.median(cpu[name]) * 1e3:.0f}",
                f"{statistics.median(map(float.__truediv__, samples[None], samples[name])):.2f}x",
                "" if name is None else f"{dequantize_rate(name, torch.bfloat16) / 1e9:.1f}",
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
