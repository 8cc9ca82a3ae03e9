"""What a token and a prompt cost as the context doubles."""

from collections.abc import Mapping
from functools import partial

from .contenders import OURS, STOCK, STREAMED
from .contestant import Burst
from .measure import Figures, interleave, spread
from .site import Site
from .worker import Worker


def measure_growth(site: Site, contenders: Mapping[str, Worker]) -> Figures:
    """Step time and memory with the stock cache, ours, and streaming, and what ours has written, at each context."""
    compared = {name: contenders[name] for name in (STOCK, OURS, STREAMED)}
    rows = []
    for number, length in enumerate(site.plan.growth_contexts):
        site.say(f"growth: {length:,} tokens")
        for worker in compared.values():
            worker.call("extend" if number else "begin", length)
            worker.call("step", 1)
        steps = {name: partial(worker.call, "step", 1) for name, worker in compared.items()}
        rows.append(_row(length, interleave(steps, site.plan.growth), compared[OURS].call("written")))
    for worker in compared.values():
        worker.call("end")
    return {"rows": rows}


def _row(length: int, bursts: Mapping[str, list[Burst]], written: tuple[int, int]) -> Figures:
    written_bytes, sealed_bytes = written
    return {
        "context_tokens": length,
        "contenders": {
            name: {
                "step_s": spread(burst.step_s for burst in found),
                "step_read_bytes": found[-1].read_bytes,
                "peak_above_model_bytes": max(burst.peak_bytes for burst in found),
            }
            for name, found in bursts.items()
        },
        "prompt_written_bytes": written_bytes,
        "written_over_sealed": written_bytes / sealed_bytes,
    }
