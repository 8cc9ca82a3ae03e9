"""The same tokens and logits, bit for bit, as `DynamicCache`; and again with drive and threads slow at any moment."""

import math
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache, PreTrainedModel

from nvme_cache import OffloadedNVMeCache, io
from nvme_cache.arguments import cache_argument

from .models import TINY, Tiny
from .run import GIB, Run

BLOCK_SIZE = 16
TIERS = ("nvme", "host", "device", "mixed")
_MATRIX_SHARE = 0.65  # of the section's time; the rest is for the repeats
_DELAYS_S = (0, 0, 0, 0.0005, 0.003)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of decoding: batch rows, left-padded by different amounts; prompt tokens; options of `generate`."""

    rows: int = 1
    prompt_length: int = 60
    options: dict[str, Any] = field(default_factory=dict)


MODES = {
    "greedy": Mode(rows=3),
    "sampling": Mode(rows=2, options={"do_sample": True, "top_k": 20}),
    "beams": Mode(rows=2, options={"num_beams": 3}),
    "prompt lookup": Mode(options={"prompt_lookup_num_tokens": 3}),
    "chunked prefill": Mode(rows=2, options={"prefill_chunk_size": 17}),
    "long prompt": Mode(prompt_length=700),
}


@dataclass(frozen=True, slots=True)
class Generated:
    """Token ids `[rows, length]` and logits `[steps, rows, vocabulary]`, on CPU."""

    tokens: torch.Tensor
    logits: torch.Tensor


def check(run: Run, results: dict[str, Any]) -> None:
    """Fills `results` with one entry for each combination tried, and with the outcome of the repeats."""
    began = time.monotonic()
    section_s = math.inf if run.quick else run.left_s()
    _check_matrix(run, results, until=began + _MATRIX_SHARE * section_s)
    _check_repeats(run, results, until=began + section_s)


def _check_matrix(run: Run, results: dict[str, Any], until: float) -> None:
    cases = _cases(run)
    entries: list[dict[str, Any]] = []
    results["matrix"] = {"planned": len(cases) * len(TIERS), "entries": entries}
    build = cache(lambda tiny, attention: tiny.build(run.device, attention))
    for number, (tiny, attention, mode) in enumerate(cases, 1):
        if time.monotonic() > until:
            run.say(f"correctness: time is up after {number - 1} of {len(cases)} combinations")
            break
        model = build(tiny, attention)
        stock = generate(model, DynamicCache(config=model.config), MODES[mode])
        for tier in TIERS:
            entry = {"model": str(tiny), "attention": attention, "mode": mode, "tier": tier}
            entry |= _compared(run, model, MODES[mode], _budgets(tier, tiny, MODES[mode]), stock)
            entries.append(entry)
            if not entry["identical"]:
                run.problem(f"{tiny}, {attention}, {mode}, {tier}: {_told(entry)}")
        if number % len(run.attentions) == 0:
            run.say(f"correctness: {number} of {len(cases)} combinations in every tier")


def _cases(run: Run) -> list[tuple[Tiny, str, str]]:
    """Every combination, in rounds: the first tries each model with each attention once, the modes taking turns."""
    models, modes = TINY[:4] if run.quick else TINY, list(MODES)
    rounds = range(1 if run.quick else len(modes))
    return [
        (tiny, attention, modes[(index + number) % len(modes)])
        for number in rounds
        for index, (tiny, attention) in enumerate(product(models, run.attentions))
    ]


def _check_repeats(run: Run, results: dict[str, Any], until: float) -> None:
    planned = 3 if run.quick else 200
    repeats: dict[str, Any] = {"planned": planned, "done": 0, "identical": 0, "entries": []}
    results["repeats"] = repeats
    tiny, attention, mode = TINY[0], run.attentions[-1], Mode(prompt_length=80, options={"max_new_tokens": 12})
    model = tiny.build(run.device, attention)
    stock = generate(model, DynamicCache(config=model.config), mode)
    for seed in range(planned):
        if time.monotonic() > until:
            break
        with slow_at_any_moment(seed):
            entry = _compared(run, model, mode, _budgets("mixed", tiny, mode), stock)
        repeats["done"] += 1
        repeats["identical"] += entry["identical"]
        if not entry["identical"]:
            repeats["entries"].append(entry | {"seed": seed})
            run.problem(f"{tiny}, {attention}, repeat {seed}: {_told(entry)}")
        if repeats["done"] % 25 == 0:
            run.say(f"correctness: {repeats['done']} of {planned} repeats with random delays")


def generate(model: PreTrainedModel, kv_cache: DynamicCache, mode: Mode) -> Generated:
    """Generates from the same random prompt every time."""
    generator = torch.Generator().manual_seed(1)
    period = torch.randint(3, 250, (mode.rows, 20), generator=generator)
    ids = period.repeat(1, -(-mode.prompt_length // 20))[:, : mode.prompt_length]  # so that prompt lookup finds some
    mask = torch.ones_like(ids)
    for row in range(1, mode.rows):
        ids[row, : 2 * row + 1], mask[row, : 2 * row + 1] = 0, 0
    torch.manual_seed(5)
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        return_dict_in_generate=True,
        output_logits=True,
        **{cache_argument(model): kv_cache},
        **({"max_new_tokens": 14, "do_sample": False} | mode.options),
    )
    return Generated(output.sequences.cpu(), torch.stack(output.logits).cpu())


@contextmanager
def slow_at_any_moment(seed: int) -> Iterator[None]:
    """Every read and write waits first, for a time drawn at random."""
    draw = random.Random(seed)

    def delayed(function: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            time.sleep(draw.choice(_DELAYS_S))
            function(*args)

        return run

    with mock.patch.multiple(io, read_all=delayed(io.read_all), write_all=delayed(io.write_all)):
        yield


def difference(ours: Generated, stock: Generated) -> dict[str, Any]:
    """`identical`, and if not: the first step whose logits differ in any bit, and the largest difference."""
    same_tokens = torch.equal(ours.tokens, stock.tokens)
    if same_tokens and same_bits(ours.logits, stock.logits):
        return {"identical": True}
    pairs = list(zip(ours.logits, stock.logits, strict=False))
    steps = [step for step, pair in enumerate(pairs) if not same_bits(*pair)]
    gaps = [float((pair[0].double() - pair[1].double()).abs().max()) for pair in pairs]
    return {
        "identical": False,
        "tokens_identical": same_tokens,
        "steps": [len(ours.logits), len(stock.logits)],
        "first_differing_step": steps[0] if steps else None,
        "first_step_max_abs_diff": gaps[steps[0]] if steps else 0.0,
        "max_abs_diff": max(gaps, default=0.0),
    }


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals itself, and 0 is not -0."""
    return first.shape == second.shape and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


def _compared(
    run: Run, model: PreTrainedModel, mode: Mode, budgets: dict[str, int], stock: Generated
) -> dict[str, Any]:
    options = {"offload_dir": run.folder, "block_size": BLOCK_SIZE} | budgets
    try:
        with OffloadedNVMeCache(config=model.config, **options) as paged:
            entry = difference(generate(model, paged, mode), stock)
            entry |= {f"{tier}_bytes": int(nbytes) for tier, nbytes in paged.memory_usage().items()}
        if not entry["identical"]:  # unless the device gives different bits whenever it is asked
            again = generate(model, DynamicCache(config=model.config), mode)
            entry["stock_repeats_itself"] = difference(again, stock)["identical"]
    except Exception:
        return {"identical": False, "error": traceback.format_exc()}
    return entry


def _told(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return str(entry["error"])
    return (
        f"logits differ from step {entry['first_differing_step']} on, there by {entry['first_step_max_abs_diff']:.3g}; "
        f"tokens identical: {entry['tokens_identical']}; DynamicCache repeats itself: {entry['stock_repeats_itself']}"
    )


def _budgets(tier: str, tiny: Tiny, mode: Mode) -> dict[str, int]:
    """All blocks in one tier; "mixed": one block of each layer on the device, one in host memory, the rest on NVMe."""
    if tier != "mixed":
        return {"device_budget": 0, "host_budget": 0} | ({} if tier == "nvme" else {f"{tier}_budget": GIB})
    rows = mode.rows * mode.options.get("num_beams", 1)
    block = 2 * BLOCK_SIZE * tiny.num_key_value_heads * tiny.head_dim * tiny.dtype.itemsize * rows
    return {"device_budget": 4 * block, "host_budget": 4 * block}
