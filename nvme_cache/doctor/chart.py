"""Read rate by request size, as a chart."""

from pathlib import Path

from nvme_cache.bench.charts import MISSING, OURS, line, size_text

from .findings import Findings


def draw_reads(found: Findings, path: Path) -> str:
    """Draws a PNG at `path`, where matplotlib is installed and the drive was measured. Returns what to tell the user.

    Raises:
        OSError: `path` cannot be written.
    """
    if found.drive is None:
        return f"no chart: {found.drive_failure}"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"no chart: {MISSING}"
    figure = Figure(layout="constrained", figsize=(6, 4))
    axes = figure.subplots()
    sizes = [read.request_bytes for read in found.drive.reads]
    spreads = [
        {"median": read.bytes_per_s, "min": read.least_bytes_per_s, "max": read.most_bytes_per_s}
        for read in found.drive.reads
    ]
    line(axes, sizes, spreads, "reads", OURS, scale=1e-9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes], fontsize=8)
    axes.set_xlabel(f"request, {found.drive.threads} threads with one each")
    axes.set_ylabel("GB/s, median and range")
    axes.set_ylim(bottom=0)
    axes.set_title("Read rate by request size")
    where = f"{found.folder.file_system} on {found.folder.device or found.folder.kind}, {found.processor.name}"
    figure.supxlabel(where, fontsize=7, color="#64748b")
    figure.savefig(path, format="png", dpi=150)
    return f"chart: {path}"
