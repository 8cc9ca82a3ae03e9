"""Where the time of a generated token goes, with the cache on the drive, half in memory, and all in memory.

    python examples/where_the_time_goes.py MODEL document.txt chart.png

Prints the tax that each setting pays and draws the three side by side (pip install 'nvme-cache[bench]' for the chart).
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from nvme_cache import OffloadedNVMeCache

NEW_TOKENS = 40


def main(model_name: str, document: str, chart: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="auto", device_map="auto")
    inputs = tokenizer(document, return_tensors="pt").to(model.device)

    reports, cached_bytes = {}, 0
    for name, share in {"all on the drive": 0.0, "half in memory": 0.5, "all in memory": None}.items():
        budget = "100GiB" if share is None else round(share * cached_bytes)
        with OffloadedNVMeCache(config=model.config, host_budget=budget) as cache:
            model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
            cached_bytes = sum(cache.memory_usage().values())
            reports[name] = cache.tax
        print(f"\n== {name}\n\n{reports[name]}")
    draw(reports, chart)


def draw(reports: dict, chart: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0] * len(reports)
    parts = {"the model": [report.decode.compute_s for report in reports.values()]}
    for cause in next(iter(reports.values())).decode.tax_s:
        parts[str(cause)] = [report.decode.tax_s[cause] for report in reports.values()]
    for name, seconds in parts.items():
        heights = [1e3 * s / report.decode.tokens for s, report in zip(seconds, reports.values(), strict=True)]
        if any(heights):
            axes.bar(list(reports), heights, bottom=bottom, label=name, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("ms a token")
    axes.set_ylim(0, 1.2 * max(bottom))
    axes.legend(loc="upper center", ncols=len(parts))
    figure.savefig(chart, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).read_text(), sys.argv[3])
