"""What was measured, as tables for people."""

from collections.abc import Iterator

from rich.table import Table

from .contenders import ATTENDS_STREAMING, FREE, FREE_STREAMED
from .measure import Figures
from .plan import MIB


def tables(results: Figures) -> Iterator[Table]:
    """A table for each part."""
    drive = results["drive"]
    yield _rates("Reads, GB/s (CPU ms per GB)", drive["read"], "request_bytes")
    yield _rates("Writes of new files, GB/s (CPU ms per GB)", drive["write"], "request_bytes")
    yield _rates("The cache's fetch path, GB/s (CPU ms per GB)", drive["fetch"], "layer_bytes")
    yield _steps(results["steps"])
    yield _peers(results["peers"])
    yield _prefill(results["prefill"])
    yield _growth(results["growth"])


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _rates(title: str, rows: list[Figures], size: str) -> Table:
    table = _table(title, "", *(f"{row[size] / MIB:g} MiB" for row in rows))
    for name in rows[0]["contenders"]:
        cells = []
        for row in rows:
            found = row["contenders"][name]
            cells.append(f"{_median(found, 'rate_bytes_per_s') / 1e9:.2f} ({_median(found, 'cpu_s_per_gb') * 1e3:.0f})")
        table.add_row(name.replace("_", " "), *cells)
    return table


def _steps(steps: Figures) -> Table:
    columns = [
        "context",
        "step",
        "stored",
        "resident",
        "measured ms",
        "floor ms",
        "floor / measured",
        "measured / predicted",
    ]
    table = _table("Decode steps against the floor", *columns)
    last = [steps["rows"][-1][key] for key in ("stored_as", "resident_share")]
    for row in steps["rows"]:
        table.add_row(
            f"{row['context_tokens']:,}",
            row["setting"],
            row["stored_as"],
            f"{row['resident_share']:.0%}",
            *(f"{_median(row, key) * 1e3:.1f}" for key in ("step_s", "floor_s")),
            *(f"{_median(row, key):.2f}" for key in ("efficiency", "measured_over_predicted")),
            end_section=[row[key] for key in ("stored_as", "resident_share")] == last,
        )
    return table


def _peers(peers: Figures) -> Table:
    columns = [
        "context", "cache", "tokens/s", "over stock", "floor / measured", "read MiB", "paging CPU ms", "peak MiB",
        "logits",
    ]  # fmt: skip
    table = _table(f"Side by side: {peers['model']['shape']}, {peers['model']['layers']} layers", *columns)
    for row in peers["rows"]:
        table.add_row(
            f"{row['context_tokens']:,}",
            row["contender"],
            f"{_median(row, 'tokens_per_s'):.2f}",
            f"{_median(row, 'speed_over_stock'):.2f}x",
            f"{_median(row, 'efficiency'):.2f}" if row["step_read_bytes"] else "",
            f"{row['step_read_bytes'] / MIB:,.0f}",
            f"{_median(row, 'paging_cpu_s') * 1e3:,.0f}",
            f"{row['peak_above_model_bytes'] / MIB:,.0f}",
            _logits(row),
        )
    return table


def _prefill(prefill: Figures) -> Table:
    made = _median(prefill, "kv_production_bytes_per_s") / 1e6
    written = prefill["drive_write_rate_bytes_per_s"] / 1e6
    title = f"Prefill of {prefill['prompt_tokens']:,} tokens: makes {made:,.0f} MB/s, the drive takes {written:,.0f}"
    table = _table(title, "cache", "seconds", "all written, seconds", "written MiB", "over stock")
    for name, found in prefill["contenders"].items():
        table.add_row(
            name,
            f"{_median(found, 'prefill_s'):.2f}",
            f"{_median(found, 'all_written_s'):.2f}",
            f"{found['written_bytes'] / MIB:,.0f}",
            f"{_median(prefill, 'ours_over_stock'):.3f}" if found["written_bytes"] else "",
        )
    return table


def _growth(growth: Figures) -> Table:
    names = list(growth["rows"][0]["contenders"])
    columns = [f"{name}: {what}" for name in names for what in ("step ms", "peak MiB")]
    table = _table("As the context doubles", "context", *columns, "read MiB a token", "written MiB", "written / sealed")
    for row in growth["rows"]:
        found = [row["contenders"][name] for name in names]
        memory = [
            f"{figure:,.0f}"
            for one in found
            for figure in (_median(one, "step_s") * 1e3, one["peak_above_model_bytes"] / MIB)
        ]
        read = f"{max(one['step_read_bytes'] for one in found) / MIB:,.0f}"
        written = f"{row['prompt_written_bytes'] / MIB:,.0f}"
        table.add_row(f"{row['context_tokens']:,}", *memory, read, written, f"{row['written_over_sealed']:.3f}")
    return table


def _logits(row: Figures) -> str:
    if row["contender"] in (FREE, FREE_STREAMED):
        return ""  # it has nothing of most layers
    if row["contender"] in ATTENDS_STREAMING:
        return "rounded otherwise"
    return "identical" if row["same_logits"] else "different"


def _median(figures: Figures, key: str) -> float:
    median: float = figures[key]["median"]
    return median
