"""A million tokens of context in two gigabytes of memory, checked against attention computed from the tokens anew.

python -m benchmarks.million_tokens /mnt/nvme

Layers have the shape of Llama-3.1-8B's: 32 heads, 8 of keys and values, 128 wide, bf16; 4 KiB a token and layer. Keys
and values are random and come back from their seeds for the reference, which adds up chunk by chunk in float64.
"""

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AttentionInterface, LlamaConfig

from nvme_cache import OffloadedNVMeCache
from nvme_cache.attention import STREAMING
from nvme_cache.bench.contestant import forget_peak, status_bytes
from nvme_cache.units import in_bytes

_HEADS, _KEY_HEADS, _HEAD_DIM = 32, 8, 128
_CHUNK = 8192
_MOST_BYTES = 2 << 30


class LayerGroup(nn.Module):
    """The attention of a few layers, without the rest of a model.

    Args:
        num_layers: How many.
        cache: What holds their keys and values.
    """

    def __init__(self, num_layers: int, cache: OffloadedNVMeCache) -> None:
        super().__init__()
        self.config = LlamaConfig(num_hidden_layers=num_layers, attn_implementation=STREAMING)
        self._cache = cache

    def fill(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Gives a layer tokens as a chunk of a prompt would."""
        self._cache.update(keys, values, layer_idx)

    def forward(self, layer_idx: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Output `[1, 1, 32, 128]` of one layer for a new token."""
        held = self._cache.update(keys, values, layer_idx)
        attend = AttentionInterface()[STREAMING]
        output: torch.Tensor = attend(self, queries, *held, None, scaling=_HEAD_DIM**-0.5)[0]
        return output


def main(
    folder: Annotated[Path, typer.Argument(help="Existing folder on the drive.", exists=True, file_okay=False)],
    tokens: Annotated[int, typer.Option(help="Cached tokens.")] = 1_000_000,
    layers: Annotated[int, typer.Option(help="Layers.")] = 2,
    steps: Annotated[int, typer.Option(help="Tokens to decode.")] = 3,
) -> None:
    """Prints memory, time and error; the exit status is 1 if memory or error is larger than it may be."""
    console = Console()
    with (
        torch.inference_mode(),
        tempfile.TemporaryDirectory(dir=folder, prefix="benchmark-") as place,
        OffloadedNVMeCache(offload_dir=place, host_budget=0, device_budget=0) as cache,
    ):
        group = LayerGroup(layers, cache)
        forget_peak()
        before = status_bytes("VmRSS")
        began = time.perf_counter()
        for layer_idx in range(layers):
            for keys, values in _history(layer_idx, tokens):
                group.fill(layer_idx, keys, values)
        fill_s = time.perf_counter() - began
        times, outputs = [], []
        for step in range(steps):
            began = time.perf_counter()
            outputs.append([group(layer_idx, *_new(layer_idx, step)) for layer_idx in range(layers)])
            times.append(time.perf_counter() - began)
        peak_bytes, stored = status_bytes("VmHWM") - before, cache.memory_usage()
    console.print("checking against the reference")
    # The last step's: it attends to all that came before.
    errors = [_error(outputs[-1][layer_idx], _reference(layer_idx, tokens, steps)) for layer_idx in range(layers)]
    rounding = torch.finfo(torch.bfloat16).eps / 2
    table = Table(title=f"{tokens:,} tokens, {layers} layers of Llama-3.1-8B's shape", show_header=False)
    table.add_row("keys and values on the drive", in_bytes(stored["nvme"]))
    table.add_row("most memory above the start, filling included", in_bytes(peak_bytes))
    table.add_row("filling", f"{fill_s:.1f} s")
    table.add_row("a token", f"{min(times):.2f} s, {stored['nvme'] / min(times) / 1e9:.2f} GB/s")
    table.add_row("largest error, of what bf16 rounds off", f"{max(errors) / rounding:.2f}")
    console.print(table)
    raise typer.Exit(peak_bytes > _MOST_BYTES or max(errors) > 1.01 * rounding)


def _history(layer_idx: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, tokens, _CHUNK):
        generator = torch.Generator().manual_seed(layer_idx << 32 | start)
        shape = (2, 1, _KEY_HEADS, min(_CHUNK, tokens - start), _HEAD_DIM)
        keys, values = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        yield keys, values


def _new(layer_idx: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 << 60 | layer_idx << 32 | step)

    def random(heads: int) -> torch.Tensor:
        return torch.empty(1, heads, 1, _HEAD_DIM, dtype=torch.bfloat16).normal_(generator=generator)

    return random(_HEADS), random(_KEY_HEADS), random(_KEY_HEADS)


def _reference(layer_idx: int, tokens: int, steps: int) -> torch.Tensor:
    """The last step's attention, `[1, 1, 32, 128]` in float64."""
    queries = _new(layer_idx, steps - 1)[0].double().view(_KEY_HEADS, -1, _HEAD_DIM) * _HEAD_DIM**-0.5
    largest = torch.full((*queries.shape[:2], 1), -math.inf, dtype=torch.float64)
    weights, output = torch.zeros_like(largest), torch.zeros_like(queries)
    newer = [_new(layer_idx, step)[1:] for step in range(steps)]
    for keys, values in (*_history(layer_idx, tokens), *newer):
        scores = queries @ keys[0].double().transpose(1, 2)
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        scores, before = (scores - now).exp(), (largest - now).exp()
        weights = weights * before + scores.sum(-1, keepdim=True)
        output, largest = output * before + scores @ values[0].double(), now
    return (output / weights).view(1, 1, _HEADS, _HEAD_DIM)


def _error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error, numbers far smaller than the rest aside."""
    least = expected.abs().mean() / 10
    return float(((output.double() - expected).abs() / expected.abs().clamp(min=least)).max())


if __name__ == "__main__":
    typer.run(main)
