"""What was measured, as a chart, where matplotlib is installed."""

from pathlib import Path

from nvme_cache.bench.measure import Figures

_WARM = ("#7c2d12", "#c2410c", "#ea580c", "#fb923c", "#fbbf24")
_COLD = ("#1e3a8a", "#2563eb", "#06b6d4", "#059669", "#7c3aed")
_EXACT = "#64748b"


def draw(results: Figures, path: Path) -> str:
    """Draws KL divergence by context and by size into a PNG at `path`. Returns what to tell the user."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no chart: matplotlib is not installed (pip install 'nvme-cache[bench]')"
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_context, by_size = figure.subplots(1, 2, sharey=True)
    warm, cold = iter(_WARM), iter(_COLD)
    for name, found in results["windows"].items():
        if found["overall"]["kl_divergence_nats"] <= 0:
            continue  # exact: it has no place on a logarithmic axis
        is_ours: bool = results["caches"][name]["is_ours"]
        color = _EXACT if name.startswith("exact") else next(warm if is_ours else cold)
        style = {"color": color, "marker": "o" if is_ours else "s"}
        spans = found["by_context"]
        divergences = [span["kl_divergence_nats"] for span in spans]
        by_context.plot(
            [span["to_tokens"] for span in spans], divergences, "-" if is_ours else "--", label=name, **style
        )
        by_size.plot(found["bits_per_element"], found["overall"]["kl_divergence_nats"], linestyle="", **style)
    by_context.set_xscale("log", base=2)
    edges = [span["to_tokens"] for span in next(iter(results["windows"].values()))["by_context"]]
    by_context.set_xticks(edges, [f"{edge:,}" for edge in edges])
    by_context.set_yscale("log")
    by_context.set_xlabel("tokens of context, up to")
    by_context.set_ylabel("KL divergence from the exact cache, nats")
    by_context.set_title("By length of context")
    by_size.legend(*by_context.get_legend_handles_labels(), fontsize=7, loc="upper right")  # where nothing is drawn
    by_size.set_xlabel(f"bits per element stored at {results['plan']['window']:,} tokens")
    by_size.set_xlim(left=0)
    by_size.set_title("By size")
    note = f"{results['model']['name']}, {results['text']['name']}" + (", quick form" if results["quick"] else "")
    figure.supxlabel(note, fontsize=7, color="#64748b")
    figure.savefig(path, dpi=150)
    return f"chart: {path}"
