"""What paging a model's cache would cost on a machine, whether it pays, and the cheapest change if it does not."""

import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedConfig

from .arguments import check_at_least, parse_dtype, parse_host_budget
from .drive import Drive
from .footprint import Footprint, footprint_of, read_config
from .machine import Machine, machine_of
from .placement import BLOCK_SIZE, Budgets, Tier, place
from .prefill import advised_chunk
from .quantization import parse_quantization
from .tax import Prediction, predict
from .units import in_bytes, parse_size

ACCEPTABLE_TAX = 0.3  # share of compute: the most that teams put up with, says the article the project starts from
LOOKUP_TOKENS = 2.0  # a sweep, with prompt lookup where answers quote the prompt
_SOFTWARE_S = 1.2e-4  # Python per paged layer and step; measured with all blocks resident, on 2 vCPUs of an AMD EPYC
_READ_CPU_S_PER_BYTE = 7.5e-11  # to read and check; docs/performance.md, layers of 64 MiB
_NARROWER = ("int8", "int4")
_SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)


class Verdict(StrEnum):
    """Whether to page."""

    PAYS = "pays"
    COSTS = "costs more than it saves"
    TOO_LARGE = "will not fit"
    NOTHING = "nothing to page"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, as text from the command line; None for what is to be found out.

    Attributes:
        model: Folder with a config.json, or hub name.
        contexts: Tokens in each batch row, each for a plan of its own.
        quantizations: As for `nvme_cache.tax.predict`, "none" for none; likewise.
        batch_size: Batch rows.
        dtype: Of weights, keys and values; None for the config's.
        device_budget: Bytes of blocks in device memory, or text such as "8GiB".
        host_budget: Bytes of blocks in host memory, likewise; "auto" as the cache does.
        disk_budget: Most bytes of shards, likewise; None for what the drive has.
        memory: Bytes free where the model computes, likewise; None for this machine's.
        nvme: Rate of the drive, such as "7GB/s"; None to measure it.
        pcie: Rate of the link, likewise; "none" if the model computes on the host.
        compute_ms: Milliseconds of a step without paging; None for a rule.
    """

    model: str
    contexts: Sequence[int]
    quantizations: Sequence[str]
    batch_size: int = 1
    dtype: str | None = None
    device_budget: int | str = 0
    host_budget: int | str = "auto"
    disk_budget: int | str | None = None
    memory: int | str | None = None
    nvme: str | None = None
    pcie: str | None = None
    compute_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cache is to be used.

    Attributes:
        context: Tokens in each batch row.
        batch_size: Batch rows.
        quantization: As for `nvme_cache.tax.predict`.
        device_budget: Bytes of blocks in device memory.
        host_budget: Bytes of blocks in host memory.
        tokens_per_sweep: Tokens accepted in a step.
        prefetch_depth: Layers fetched ahead; None for what suits the drive.
    """

    context: int
    batch_size: int = 1
    quantization: str | None = None
    device_budget: int = 0
    host_budget: int = 0
    tokens_per_sweep: float = 1.0
    prefetch_depth: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What comes of a plan.

    Attributes:
        plan: The plan.
        prediction: Bytes, seconds, rates.
        verdict: Whether it pays.
        reason: Why, in words.
        fix: The cheapest change that makes it pay, or at least fit; empty if none was found or none is needed.
    """

    plan: Plan
    prediction: Prediction
    verdict: Verdict
    reason: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Estimates for one model on one machine.

    Attributes:
        model: As it was asked for.
        machine: What they hold for.
        estimates: One a plan.
        notes: What they rest on, in words.
    """

    model: str
    machine: Machine
    estimates: Sequence[Estimate]
    notes: Sequence[str]


def run(request: Request) -> Report:
    """Reads the config, measures what is not given, and estimates every plan asked for.

    Raises:
        ConfigurationError: a value cannot work, or there is no such model.
        OffloadDirectoryError: the default folder for shards cannot be used.
    """
    for context in request.contexts:
        check_at_least("context", context, 1)
    check_at_least("batch", request.batch_size, 1)
    config = read_config(request.model)
    footprint = footprint_of(config, parse_dtype(request.dtype))
    for name in request.quantizations:
        _token_bytes(footprint, None if name == "none" else name)  # names one there is not, before anything is measured
    machine = machine_of(
        nvme=request.nvme,
        pcie=request.pcie,
        compute_ms=request.compute_ms,
        memory=request.memory,
        disk_budget=request.disk_budget,
        formats=[name for name in dict.fromkeys((*request.quantizations, *_NARROWER)) if name != "none"],
        dtype=footprint.dtype,
    )
    notes = [*machine.assumptions, f"pays: where paging adds at most {ACCEPTABLE_TAX:.0%} to a token"]
    made_for = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if made_for and max(request.contexts) > made_for:
        notes.append(f"context: the model is made for {made_for:,} tokens")
    if machine.flops_per_s is not None and footprint.paged:
        notes.append(_about_chunks(request, config, footprint, machine))
    estimates = [estimate(footprint, plan, machine) for plan in _plans(request, footprint, machine)]
    if len(set(request.quantizations)) > 1:
        longest = [found for found in estimates if found.plan.context == max(request.contexts)]
        fastest = min(longest, key=lambda found: found.prediction.step_s).plan
        named = fastest.quantization or "exact blocks"
        notes.append(f"quantization: {named} the fastest here at {fastest.context:,} tokens")
    return Report(request.model, machine, estimates, notes)


def _about_chunks(request: Request, config: PreTrainedConfig, footprint: Footprint, machine: Machine) -> str:
    assert machine.flops_per_s is not None
    chunk = advised_chunk(
        footprint,
        config,
        nvme_bytes_per_s=machine.nvme_bytes_per_s,
        flops_per_s=machine.flops_per_s,
        memory_bytes=machine.memory_bytes,
        batch_size=request.batch_size,
    )
    said = f"prefill: with streaming attention in chunks of {chunk.tokens:,} tokens (prefill_chunk_size): "
    if chunk.read_over_attend <= 1:
        return said + "reading back what came before takes no longer than attending to it"
    return said + f"more do not fit; reading what came before takes {chunk.read_over_attend:.1f} times its attention"


def _plans(request: Request, footprint: Footprint, machine: Machine) -> list[Plan]:
    """A plan for every context with every quantization."""
    host_bytes = parse_host_budget(request.host_budget)
    if request.host_budget == "auto" and machine.pcie_bytes_per_s is None:
        # Half of what is available once the weights are there.
        host_bytes = max(0, host_bytes - footprint.weight_bytes // 2)
    device_bytes = parse_size("device_budget", request.device_budget)
    return [
        Plan(context, request.batch_size, None if name == "none" else name, device_bytes, host_bytes)
        for context, name in itertools.product(request.contexts, request.quantizations)
    ]


def estimate(footprint: Footprint, plan: Plan, machine: Machine) -> Estimate:
    """What comes of `plan`, with the cheapest change that helps if it does not pay."""
    given = _evaluate(footprint, plan, machine)
    if given.verdict in (Verdict.PAYS, Verdict.NOTHING):
        return given
    fitting = ""
    for words, changed in _changes(footprint, plan, machine):
        verdict = _evaluate(footprint, changed, machine).verdict
        if verdict is Verdict.PAYS:
            return dataclasses.replace(given, fix=words)
        if verdict is Verdict.COSTS and not fitting:
            fitting = words
    if given.verdict is Verdict.TOO_LARGE and fitting:
        return dataclasses.replace(given, fix=f"{fitting}, which fits but costs more than it saves")
    shorter = plan.context // 2
    while shorter:
        if _evaluate(footprint, dataclasses.replace(plan, context=shorter), machine).verdict is Verdict.PAYS:
            return dataclasses.replace(given, fix=f"a context of {shorter:,} tokens")
        shorter //= 2
    return given


def _evaluate(footprint: Footprint, plan: Plan, machine: Machine) -> Estimate:
    shares = _shares(footprint, plan)
    on_host = machine.pcie_bytes_per_s is None
    cores = len(os.sched_getaffinity(0)) if on_host else 0
    prediction = predict(
        footprint,
        context=plan.context,
        batch_size=plan.batch_size,
        quantization=plan.quantization,
        device_share=shares[Tier.DEVICE],
        host_share=shares[Tier.HOST],
        compute_s=machine.step_compute_s(footprint, plan.context, plan.batch_size),
        nvme_bytes_per_s=machine.nvme_bytes_per_s,
        pcie_bytes_per_s=machine.pcie_bytes_per_s,
        tokens_per_sweep=plan.tokens_per_sweep,
        software_s=_SOFTWARE_S,
        compute_cores=cores,
        read_cpu_s_per_byte=_READ_CPU_S_PER_BYTE,
        copy_cpu_s_per_byte=cores / machine.copy_bytes_per_s if on_host and machine.copy_bytes_per_s else 0.0,
        dequantize_cpu_s_per_byte=1 / machine.dequantize_bytes_per_s.get(plan.quantization or "", math.inf),
    )
    if not prediction.token_bytes:
        return Estimate(plan, prediction, Verdict.NOTHING, "no layer of this model is paged")
    if reason := _what_does_not_fit(footprint, plan, machine, prediction):
        return Estimate(plan, prediction, Verdict.TOO_LARGE, reason)
    # With prompt lookup a step makes more tokens; what it saves is held against what paging costs.
    cost = prediction.step_s / plan.tokens_per_sweep / prediction.compute_s - 1
    reason = f"paging adds {cost:.0%} to a token" if cost < 1 else f"a token takes {1 + cost:,.1f} times as long"
    return Estimate(plan, prediction, Verdict.PAYS if cost <= ACCEPTABLE_TAX else Verdict.COSTS, reason)


def _shares(footprint: Footprint, plan: Plan) -> dict[Tier, float]:
    """Of the sealed bytes, by tier, as the cache places a prompt's blocks."""
    used_by_all: Counter[Tier] = Counter()
    num_blocks = max(1, plan.context // BLOCK_SIZE)
    budgets = Budgets(plan.device_budget, plan.host_budget)
    for layer in footprint.paged:
        token_bytes = layer.stored_token_bytes(parse_quantization(plan.quantization))
        block_bytes = math.ceil(token_bytes * min(BLOCK_SIZE, plan.context) * plan.batch_size)
        if not block_bytes:
            continue
        counts = place(num_blocks, block_bytes, budgets, len(footprint.paged), Counter(), used_by_all)
        for tier, count in counts.items():
            used_by_all[tier] += count * block_bytes
    total = max(1, used_by_all.total())
    return {tier: used_by_all[tier] / total for tier in Tier}


def _what_does_not_fit(footprint: Footprint, plan: Plan, machine: Machine, prediction: Prediction) -> str:
    if prediction.nvme_bytes > machine.disk_bytes:
        return f"{in_bytes(prediction.nvme_bytes)} of blocks for {in_bytes(machine.disk_bytes)} of disk"
    if machine.memory_bytes is None:
        return ""
    layer_bytes = max(layer.token_bytes for layer in footprint.paged) * plan.context * plan.batch_size
    depth = plan.prefetch_depth
    if depth is None:
        is_exact = plan.quantization is None
        depth = Drive(machine.nvme_bytes_per_s).prefetch_depth(layer_bytes, is_exact=is_exact)
    slots_bytes = layer_bytes * min(depth + 1, len(footprint.paged))
    held = footprint.weight_bytes + prediction.resident_bytes + prediction.device_bytes
    if machine.pcie_bytes_per_s is None:
        held += prediction.host_bytes
    if held + slots_bytes > machine.memory_bytes:
        return (
            f"{in_bytes(footprint.weight_bytes)} of weights, {in_bytes(slots_bytes)} of slots and "
            f"{in_bytes(held - footprint.weight_bytes)} of cache for {in_bytes(machine.memory_bytes)} of memory"
        )
    return ""


def _changes(footprint: Footprint, plan: Plan, machine: Machine) -> Iterator[tuple[str, Plan]]:
    """Plans that differ from `plan`, in words, the fewest changes first, and of as many the cheapest."""
    now = _token_bytes(footprint, plan.quantization)
    narrower = [name for name in _NARROWER if _token_bytes(footprint, name) < now]
    levers: list[list[tuple[str, dict[str, Any]]]] = [
        [(f"prompt lookup ({LOOKUP_TOKENS:g} tokens a sweep)", {"tokens_per_sweep": LOOKUP_TOKENS})],
        [(name, {"quantization": name}) for name in narrower],
        [("prefetch_depth=1", {"prefetch_depth": 1}), ("prefetch_depth=0", {"prefetch_depth": 0})],
        [("host", {"host_budget": share}) for share in _SHARES],
    ]
    if machine.pcie_bytes_per_s is not None and machine.memory_bytes is not None:
        levers.append([("device", {"device_budget": share}) for share in _SHARES])
    for count in range(1, len(levers) + 1):
        for chosen in itertools.combinations(levers, count):
            for changes in itertools.product(*chosen):
                fields = {name: value for _, change in changes for name, value in change.items()}
                sealed_bytes = _token_bytes(footprint, fields.get("quantization", plan.quantization))
                sealed_bytes *= plan.context * plan.batch_size
                words = []
                for word, change in changes:
                    for name in change.keys() & {"host_budget", "device_budget"}:
                        fields[name] = math.ceil(sealed_bytes * change[name])
                        word = f"a {word} budget of {in_bytes(fields[name])}"
                    words.append(word)
                changed = dataclasses.replace(plan, **fields)
                grows = changed.host_budget >= plan.host_budget and changed.device_budget >= plan.device_budget
                if grows and changed.host_budget <= max(machine.host_bytes, plan.host_budget):
                    yield " and ".join(words), changed


def _token_bytes(footprint: Footprint, quantization: str | None) -> float:
    return footprint.stored_token_bytes(parse_quantization(quantization))
