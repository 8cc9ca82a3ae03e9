"""Side by side: the same model, the same context, the same minute, another cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from .contenders import ALL, ATTENDS_STREAMING, FREE, FREE_STREAMED, OURS, STOCK, UnavailableError
from .contestant import Burst, Prefill, Task
from .measure import Figures, Sample, bytes_per_s, interleave, paired, spread
from .models import smollm2_config, token_bytes
from .rawfile import RawFile
from .site import Site
from .worker import Worker

_RAW = "raw"


@contextmanager
def workers(site: Site) -> Iterator[dict[str, Worker]]:
    """A process for each contender, in folders of their own."""
    with ExitStack() as stack:
        started: dict[str, Worker] = {}
        for number, name in enumerate(ALL):
            folder = site.folder / f"contender-{number}"
            folder.mkdir()
            started[name] = stack.enter_context(Worker(Task(name, site.plan.model_layers, folder, site.direct)))
        yield started


def measure_peers(site: Site, raw: RawFile, contenders: Mapping[str, Worker]) -> Figures:
    """Steps with every contender at each context.

    Args:
        site: Where.
        raw: What to read for comparison.
        contenders: Processes by name.
    """
    return {
        "model": _model(site),
        "rows": [row for length in site.plan.peer_contexts for row in _compare(site, raw, contenders, length)],
        "unavailable": {name: worker.reason for name, worker in contenders.items() if worker.reason},
    }


def measure_prefill(site: Site, contenders: Mapping[str, Worker], write_rate: float) -> Figures:
    """A prompt processed with everything spilled, and with the stock cache.

    Args:
        site: Where.
        contenders: Processes by name.
        write_rate: What the drive takes, in bytes per second.
    """
    length = site.plan.prefill_tokens
    site.say(f"prefill: {length:,} tokens")
    pair = {name: partial(contenders[name].call, "prefill", length) for name in (STOCK, OURS)}
    runs: dict[str, list[Prefill]] = interleave(pair, site.plan.prefill)
    for name in pair:
        contenders[name].call("end")
    walls = {name: [run.wall_s for run in found] for name, found in runs.items()}
    return {
        "model": _model(site),
        "prompt_tokens": length,
        "same_logits": _same([run.digest for run in runs[OURS]], [run.digest for run in runs[STOCK]]),
        "contenders": {
            name: {
                "prefill_s": spread(walls[name]),
                "prefill_cpu_s": spread(run.cpu_s for run in found),
                "all_written_s": spread(run.written_s for run in found),
                "written_bytes": found[-1].written_bytes,
            }
            for name, found in runs.items()
        },
        "ours_over_stock": paired(walls[OURS], walls[STOCK]),
        "drive_write_rate_bytes_per_s": write_rate,
        "kv_production_bytes_per_s": spread(runs[OURS][-1].written_bytes / wall for wall in walls[STOCK]),
    }


def _compare(site: Site, raw: RawFile, contenders: Mapping[str, Worker], length: int) -> list[Figures]:
    begun: dict[str, Worker] = {}
    for name, worker in contenders.items():
        site.say(f"peers: {length:,} tokens, filling {name}")
        try:
            worker.call("begin", length)
            worker.call("step", 1)
            begun[name] = worker
        except UnavailableError as error:
            if name in (FREE, FREE_STREAMED, STOCK, OURS):
                raise
            site.say(f"peers: without {name}: {str(error).splitlines()[-1]}")
    site.say(f"peers: {length:,} tokens, taking turns")
    request_bytes = length * token_bytes(smollm2_config(1)) // site.threads
    steps: dict[str, Callable[[], Any]] = {_RAW: raw.reader(request_bytes, site.plan.sample_bytes)}
    steps |= {name: partial(worker.call, "step", site.plan.peer_steps) for name, worker in begun.items()}
    found: dict[str, list[Any]] = interleave(steps, site.plan.peers)
    for worker in begun.values():
        worker.call("end")
    reads: list[Sample] = found.pop(_RAW)
    return [_row(length, name, found, bytes_per_s(reads)) for name in found]


def _row(length: int, name: str, bursts: Mapping[str, Sequence[Burst]], rates: Sequence[float]) -> Figures:
    compute = FREE_STREAMED if name in ATTENDS_STREAMING else FREE
    own, stock, ours, free = (bursts[contender] for contender in (name, STOCK, OURS, compute))
    steps = [burst.step_s for burst in own]
    paging = _cpu_beyond(own, free)
    floors = [max(least.step_s, burst.read_bytes / rate) for least, burst, rate in zip(free, own, rates, strict=True)]
    figures: Figures = {
        "context_tokens": length,
        "contender": name,
        "step_s": spread(steps),
        "tokens_per_s": spread(1 / step for step in steps),
        "speed_over_stock": paired([burst.step_s for burst in stock], steps),
        "ours_speed_over": paired(steps, [burst.step_s for burst in ours]),
        "read_rate_bytes_per_s": spread(rates),
        "floor_s": spread(floors),
        "efficiency": paired(floors, steps),
        "step_read_bytes": own[-1].read_bytes,
        "step_drive_bytes": own[-1].drive_bytes,
        "step_cpu_s": spread(burst.cpu_s for burst in own),
        "paging_cpu_s": spread(paging),
        "cpu_beyond_stock_s": spread(_cpu_beyond(own, stock)),
        "peak_above_model_bytes": max(burst.peak_bytes for burst in own),
        "same_logits": all(_same(burst.digests, other.digests) for burst, other in zip(own, stock, strict=True)),
    }
    if own[-1].read_bytes:
        read_gb = own[-1].read_bytes / 1e9
        figures["paging_cpu_s_per_gb"] = spread(cpu_s / read_gb for cpu_s in paging)
    return figures


def _cpu_beyond(bursts: Sequence[Burst], others: Sequence[Burst]) -> list[float]:
    return [burst.cpu_s - other.cpu_s for burst, other in zip(bursts, others, strict=True)]


def _same(digests: Sequence[int], others: Sequence[int]) -> bool:
    return list(digests) == list(others)


def _model(site: Site) -> Figures:
    config = smollm2_config(site.plan.model_layers)
    return {
        "shape": "SmolLM2-135M, random bf16",
        "layers": config.num_hidden_layers,
        "token_bytes": token_bytes(config) * config.num_hidden_layers,
    }
