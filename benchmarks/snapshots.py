"""How long saving, opening, forking and going on from a snapshot take, and how long computing it again.

python -m benchmarks.snapshots /mnt/nvme --model DIR
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from nvme_cache import OffloadedNVMeCache
from nvme_cache.arguments import cache_argument
from nvme_cache.drive import drive_of
from nvme_cache.units import in_bytes

_LAYERS, _HEADS, _HEAD_DIM = 32, 8, 128  # of Llama-3.1-8B


def main(
    folder: Annotated[Path, typer.Argument(help="Existing folder on the drive.", exists=True, file_okay=False)],
    model: Annotated[str, typer.Option(help="Folder of a model, to compute a document with.")],
    document: Annotated[Path, typer.Option(help="Text.")] = Path("examples/us_constitution.txt"),
    gigabytes: Annotated[float, typer.Option(help="Size of the random snapshot, of Llama-3.1-8B's shape.")] = 1.0,
) -> None:
    """Prints two tables: a random snapshot by itself, and the first token about a document."""
    console = Console()
    with tempfile.TemporaryDirectory(dir=folder, prefix="benchmark-") as place:
        console.print(_random(Path(place), gigabytes))
        console.print(_first_token(Path(place), model, document))


def _random(place: Path, gigabytes: float) -> Table:
    config = LlamaConfig(num_hidden_layers=_LAYERS)
    tokens = round(gigabytes * 1e9 / (_LAYERS * 2 * _HEADS * _HEAD_DIM * 2)) + 100  # with something in the tail
    ids = torch.zeros(1, tokens, dtype=torch.long)
    snapshot = place / "random"
    with OffloadedNVMeCache(config=config, offload_dir=place, host_budget=0) as cache:
        for layer_idx in range(_LAYERS):
            states = torch.randn(2, 1, _HEADS, tokens, _HEAD_DIM).to(torch.bfloat16)
            cache.update(states[0], states[1], layer_idx)
        cache._pager.flush()
        save_s = _seconds(lambda: cache.save_pretrained(snapshot, token_ids=ids), 3)
        disk_before = _taken(place)
        forks: list[OffloadedNVMeCache] = []
        fork_s = _seconds(lambda: forks.append(cache.fork()), 5)
        forked_bytes = _taken(place) - disk_before
        for fork in forks:
            fork.close()

    opened: list[OffloadedNVMeCache] = []

    def open_snapshot() -> None:
        opened.append(OffloadedNVMeCache.from_pretrained(snapshot, config=config, offload_dir=place, host_budget=0))

    open_s = _seconds(open_snapshot, 5)
    for cache in opened:
        cache.close()
    table = Table(title=f"A snapshot of {in_bytes(_taken(snapshot))}, {tokens:,} tokens", title_justify="left")
    for name in ("saved", "forked", "bytes that took", "opened"):
        table.add_column(name, justify="right")
    table.add_row(_ms(save_s), _ms(fork_s), f"{forked_bytes:,}", _ms(open_s))
    return table


def _first_token(place: Path, model_name: str, document: Path) -> Table:
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16)
    ids = tokenizer(document.read_text(), return_tensors="pt")["input_ids"]
    snapshot, argument = place / "document", cache_argument(model)
    options: dict[str, Any] = {"offload_dir": place, "host_budget": 0}

    @torch.no_grad()
    def one_more(cache: OffloadedNVMeCache) -> torch.Tensor:
        logits: torch.Tensor = model(ids[:, -1:], **{argument: cache}, use_cache=True).logits
        return logits

    with OffloadedNVMeCache(config=model.config, **options) as cache:
        began = time.perf_counter()
        with torch.no_grad():
            model(ids[:, :-1], **{argument: cache}, use_cache=True, logits_to_keep=1)
        cache.save_pretrained(snapshot, token_ids=ids[:, :-1], model=model)
        expected = one_more(cache)
        prefill_s = time.perf_counter() - began
        again_s = _seconds(lambda: one_more(cache), 3)
    restored_s, forward_s = [], []
    for _ in range(5):
        began = time.perf_counter()
        with OffloadedNVMeCache.from_pretrained(snapshot, model=model, **options) as cache:
            logits = one_more(cache)
            restored_s.append(time.perf_counter() - began)
            forward_s.append(_seconds(lambda cache=cache: one_more(cache), 1))
        assert torch.equal(logits, expected)
    rate = drive_of(place).read_bytes_per_s
    bound_s = _taken(snapshot) / rate + again_s
    table = Table(title=f"{model_name}, {ids.shape[1]:,} tokens of {document.name}", title_justify="left")
    for name in ("prefill to first token", "restored to first token", "faster by", "bytes / drive rate + a forward"):
        table.add_column(name, justify="right")
    restored = statistics.median(restored_s)
    table.add_row(_ms(prefill_s), _ms(restored), f"{prefill_s / restored:.0f}x", _ms(bound_s))
    return table


def _seconds(call: Callable[[], object], rounds: int) -> float:
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def _taken(folder: Path) -> int:
    """Bytes on the drive, links counted once."""
    return int(
        subprocess.run(["du", "-s", "-B1", folder], check=True, capture_output=True, text=True).stdout.split()[0]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


if __name__ == "__main__":
    sys.exit(typer.run(main))
