"""What was measured, as charts, where matplotlib is installed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .measure import Figures
from .plan import KIB, MIB

MISSING = "matplotlib is not installed (pip install 'nvme-cache[bench]')"
OURS = "#c2410c"
_LIGHT = "#fb923c"
_OTHERS = ("#1f2937", "#2563eb", "#059669", "#7c3aed", "#64748b", "#b45309")
_DRIVE_COLORS = {
    "fetch_unverified": _LIGHT,
    "fetch_int8": "#fdba74",
    "plain": _OTHERS[0],
    "fio_psync": _OTHERS[1],
    "fio_io_uring": _OTHERS[2],
    "fio_overwrite": _OTHERS[3],
}
_BLUES = ("#93c5fd", "#60a5fa", "#3b82f6", "#2563eb", "#1d4ed8", "#1e3a8a")


def draw(results: Figures, out: Path) -> list[str]:
    """Draws `drive.png`, `steps.png`, `peers.png` and `growth.png` into `out`. Returns what to tell the user."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [f"no charts: {MISSING}"]
    charts: dict[str, Callable[[Any, Figures], None]] = {
        "drive": _drive,
        "steps": _steps,
        "peers": _peers,
        "growth": _growth,
    }
    machine = results["machine"]
    where = f"{machine['cpus']} CPUs {machine['cpu']}, {machine['file_system']} on {machine['device']['name']}"
    for name, chart in charts.items():
        figure = Figure(layout="constrained")
        chart(figure, results[name])
        figure.supxlabel(where + (", quick form" if results["quick"] else ""), fontsize=7, color="#64748b")
        figure.savefig(out / f"{name}.png", dpi=150)
    return [f"charts: {', '.join(f'{name}.png' for name in charts)} in {out}"]


def _drive(figure: Any, drive: Figures) -> None:
    figure.set_size_inches(11, 4)
    titles = {"read": "Reads", "write": "Writes of new files", "fetch": "The cache's fetch path"}
    for axes, (kind, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        rows, size = drive[kind], "layer_bytes" if kind == "fetch" else "request_bytes"
        sizes = [row[size] for row in rows]
        for name in rows[0]["contenders"]:
            cells = [row["contenders"][name]["rate_bytes_per_s"] for row in rows]
            line(axes, sizes, cells, name.replace("_", " "), _DRIVE_COLORS.get(name, OURS), scale=1e-9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [size_text(nbytes) for nbytes in sizes])
        axes.set_xlabel("layer" if kind == "fetch" else "request")
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend(fontsize=7)


def _steps(figure: Any, steps: Figures) -> None:
    rows = [row for row in steps["rows"] if row["stored_as"] == "exact"]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    contexts = list(dict.fromkeys(row["context_tokens"] for row in rows))
    figure.set_size_inches(11, 4)
    for axes, setting in zip(figure.subplots(1, len(settings), sharey=True), settings, strict=True):
        for number, context in enumerate(contexts):
            found = [row for row in rows if (row["setting"], row["context_tokens"]) == (setting, context)]
            shares, color = [row["resident_share"] * 100 for row in found], _BLUES[number]
            line(axes, shares, [row["step_s"] for row in found], f"{context:,} tokens", color, scale=1e3)
            axes.plot(shares, [row["predicted_s"]["median"] * 1e3 for row in found], "--", color=color, linewidth=1)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xlabel("resident, %")
        axes.set_title(setting)
    figure.axes[0].set_ylabel("ms a step; dashed: as planned")
    figure.axes[0].legend(fontsize=7)


def _peers(figure: Any, peers: Figures) -> None:
    contexts = list(dict.fromkeys(row["context_tokens"] for row in peers["rows"]))
    figure.set_size_inches(5.8 * len(contexts), 4)
    for axes, context in zip(figure.subplots(1, len(contexts), squeeze=False)[0], contexts, strict=True):
        rows = [row for row in peers["rows"] if row["context_tokens"] == context][::-1]
        rates = [row["tokens_per_s"]["median"] for row in rows]
        colors = [OURS if row["contender"].startswith("nvme-cache") else _OTHERS[4] for row in rows]
        bars = axes.barh([row["contender"] for row in rows], rates, color=colors)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.margins(x=0.15)
        axes.set_xlabel("tokens/s")
        axes.set_title(f"{context:,} cached tokens")


def _growth(figure: Any, growth: Figures) -> None:
    figure.set_size_inches(11, 4)
    step, memory, written = figure.subplots(1, 3)
    rows = growth["rows"]
    contexts = [row["context_tokens"] for row in rows]
    for name, color in zip(rows[0]["contenders"], (_OTHERS[0], OURS, _LIGHT), strict=True):
        found = [row["contenders"][name] for row in rows]
        line(step, contexts, [one["step_s"] for one in found], name, color, scale=1e3)
        memory.plot(contexts, [one["peak_above_model_bytes"] / MIB for one in found], "o-", color=color, label=name)
    written.plot(contexts, [row["prompt_written_bytes"] / MIB for row in rows], "o-", color=OURS, label="nvme-cache")
    titles = {"a token: step time, ms": step, "memory beyond the model, MiB": memory, "a prompt: MiB written": written}
    for title, axes in titles.items():
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
        axes.set_xlabel("cached tokens")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend(fontsize=7)


def line(axes: Any, at: Sequence[float], spreads: Sequence[Figures], label: str, color: str, *, scale: float) -> None:
    """Medians as a line, with bars from the least to the greatest."""
    medians = [one["median"] * scale for one in spreads]
    below = [median - one["min"] * scale for median, one in zip(medians, spreads, strict=True)]
    above = [one["max"] * scale - median for median, one in zip(medians, spreads, strict=True)]
    axes.errorbar(at, medians, yerr=[below, above], marker="o", markersize=3, capsize=2, label=label, color=color)


def size_text(nbytes: int) -> str:
    """Such as "64 KiB" or "4 MiB"."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
