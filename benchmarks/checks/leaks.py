"""Device memory, open files and threads stay flat over many generations with fresh caches."""

import threading
from pathlib import Path
from typing import Any

from nvme_cache import OffloadedNVMeCache

from .correctness import BLOCK_SIZE, Mode, generate
from .models import TINY
from .run import Run

_MODE = Mode(prompt_length=100, options={"max_new_tokens": 6})


def check(run: Run, results: dict[str, Any]) -> None:
    """Fills `results` with what was in use after the first, the second and the last generation."""
    planned = 5 if run.quick else 100
    model = TINY[0].build(run.device, run.attentions[-1])
    seen: list[dict[str, int]] = []
    while len(seen) < planned and (len(seen) < 2 or run.left_s() > 0):
        options = {"block_size": BLOCK_SIZE, "device_budget": 0, "host_budget": 40000}
        with OffloadedNVMeCache(config=model.config, offload_dir=run.folder, **options) as cache:
            generate(model, cache, _MODE)
        del cache
        run.device.synchronize()
        seen.append(_in_use(run))
        if len(seen) % 25 == 0:
            run.say(f"leaks: {len(seen)} of {planned} generations")
    results |= {"planned": planned, "done": len(seen), "first": seen[0], "second": seen[1], "last": seen[-1]}
    results["flat"] = {name: seen[-1][name] <= value for name, value in seen[1].items()}
    for name, flat in results["flat"].items():
        if not flat:
            run.problem(f"{name} grew from {seen[1][name]:,} to {seen[-1][name]:,} in {len(seen)} generations")


def _in_use(run: Run) -> dict[str, int]:
    return {
        "device_reserved_bytes": run.device.memory("memory_reserved"),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }
