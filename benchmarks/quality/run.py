"""The whole benchmark: every part in turn, what it found as JSON, a table and a chart."""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from nvme_cache.arguments import cache_argument
from nvme_cache.bench.machine import describe, version
from nvme_cache.bench.measure import Figures, Say
from nvme_cache.errors import ConfigurationError

from . import needles
from .charts import draw
from .contenders import EXACT, Contender, stored_bytes, working
from .likelihood import Scores, buckets, compare, summaries
from .plan import Plan
from .report import tables
from .storage import examine, states_of
from .text import Text

FORMAT_VERSION = 1


def run_quality(
    model_folder: str,
    contenders: Sequence[Contender],
    plan: Plan,
    out: Path,
    *,
    dtype: str = "auto",
    quick: bool,
    console: Console,
) -> Figures:
    """Measures `contenders`, leaves JSON at `out` and a chart beside it, and prints tables.

    Args:
        model_folder: Folder or hub name of an instruction-tuned model of full-attention layers.
        contenders: The caches, the exact one among them.
        plan: How much is measured.
        out: The JSON file; its folder is made if missing.
        dtype: Of the model; "auto" for its own.
        quick: Whether the figures mean little.
        console: Where progress and tables go.

    Raises:
        ConfigurationError: the text is too short for the windows asked for, or the model made for shorter ones.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def say(line: str) -> None:
        console.print(f"[dim]{time.perf_counter() - began:5.0f} s[/dim]  {escape(line)}", highlight=False)

    with tempfile.TemporaryDirectory(prefix="nvme-cache-quality-") as own_folder:
        folder = Path(own_folder)
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).eval()
        longest = model.config.max_position_embeddings
        if plan.window > longest:
            raise ConfigurationError(f"tokens={plan.window:,} is more than the {longest:,} that {model_folder} reads")
        text = Text.tokenized(tokenizer)
        windows = text.windows(plan.window, plan.windows)
        able, reasons = working(_chosen(contenders, plan.caches), model.config, folder)
        results: Figures = {
            "format_version": FORMAT_VERSION,
            "quick": quick,
            "machine": describe(folder) | {"optimum-quanto": version("optimum-quanto")},
            "model": {"name": Path(model_folder).name, "dtype": str(model.dtype).removeprefix("torch.")},
            "text": text.describe(),
            "plan": plan.as_dict(),
            "caches": {each.name: each.describe() for each in able},
            "notes": reasons,
        }

        def keep(section: str, stages: Iterator[Figures]) -> None:
            for results[section] in stages:
                results["elapsed_s"], results["cpu_s"] = time.perf_counter() - began, time.process_time()
                out.write_text(json.dumps(results, indent=1) + "\n")  # what has been measured survives what comes after

        keep("storage", _storage(model, able, windows[0], plan, folder, say))
        keep("windows", _windows(model, able, windows, plan, folder, say))
        keep("stepwise", _stepwise(model, _chosen(able, plan.stepwise), windows[0], plan, folder, say))
        keep("needles", _needles(model, tokenizer, _chosen(able, plan.needles), text, plan, folder, say))
    for table in tables(results):
        console.print(table)
    for line in [*reasons, draw(results, out.with_suffix(".png"))]:
        say(line)
    return results


def _storage(
    model: PreTrainedModel, contenders: list[Contender], ids: torch.Tensor, plan: Plan, folder: Path, say: Say
) -> Iterator[Figures]:
    say("storage: one layer's keys and values in each cache")
    keys, values = states_of(model, ids[:, : plan.probe])
    yield {each.name: examine(each, model.config, keys, values, folder) for each in contenders}


def _windows(
    model: PreTrainedModel, contenders: list[Contender], windows: list[torch.Tensor], plan: Plan, folder: Path, say: Say
) -> Iterator[Figures]:
    elements = _elements_per_token(model) * plan.window
    found: dict[str, list[Scores]] = {each.name: [] for each in contenders}
    bits: dict[str, float] = {}

    def look(name: str, cache: Cache) -> None:
        bits[name] = 8 * stored_bytes(cache) / elements

    by_chunks = sorted(contenders, key=lambda each: each.chunks(plan.window), reverse=True)
    for number, ids in enumerate(windows):
        for chunks, group in groupby(by_chunks, key=lambda each: each.chunks(plan.window)):
            together = list(group)
            say(f"window {number + 1} of {len(windows)}: {', '.join(each.name for each in together)}")
            scores = compare(model, together, ids, chunks, warm_up=plan.warm_up, folder=folder, look=look)
            for name, own in scores.items():
                found[name].append(own)
            so_far = {name: Scores.joined(parts) for name, parts in found.items() if parts}
            summed = summaries(so_far, buckets(plan.warm_up, plan.window))
            yield {name: {"bits_per_element": bits[name], **own} for name, own in summed.items()}


def _stepwise(
    model: PreTrainedModel, contenders: list[Contender], ids: torch.Tensor, plan: Plan, folder: Path, say: Say
) -> Iterator[Figures]:
    say(f"{plan.steps:,} tokens one at a time: {', '.join(each.name for each in contenders)}")
    end = plan.prompt + plan.steps
    chunks = [plan.prompt] + [1] * plan.steps
    scores = compare(model, contenders, ids[:, : end + 1], chunks, warm_up=plan.prompt, folder=folder)
    quarter = max(1, plan.steps // 4)
    edges = [(low, low + quarter) for low in range(plan.prompt, end - quarter + 1, quarter)]
    yield summaries(scores, edges)


def _needles(
    model: PreTrainedModel,
    tokenizer: Any,
    contenders: list[Contender],
    text: Text,
    plan: Plan,
    folder: Path,
    say: Say,
) -> Iterator[Figures]:
    documents = [
        needles.document(tokenizer, text, length, plan.facts, number) for number, length in enumerate(plan.documents)
    ]
    found: Figures = {}
    for contender in contenders:
        say(f"{len(documents)} documents with {plan.facts} facts each: {contender.name}")
        results = [
            {"document_tokens": asked.ids.shape[1], **result}
            for asked in documents
            for result in needles.ask(model, tokenizer, contender, asked, plan.answer, folder)
        ]
        found[contender.name] = needles.summary(results)
        yield found


def _chosen(contenders: Sequence[Contender], names: tuple[str, ...] | None) -> list[Contender]:
    return [each for each in contenders if names is None or each.name in (EXACT, *names)]


def _elements_per_token(model: PreTrainedModel) -> int:
    """Numbers in the keys and values of one token, in all layers."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), **{cache_argument(model): cache})
    return stored_bytes(cache) // model.dtype.itemsize
