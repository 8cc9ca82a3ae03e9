"""Estimates as JSON and as a table."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .estimate import Estimate, Plan, Report, Verdict
from .units import in_bytes

_LEGEND = "where: % of blocks on device/in host memory/on NVMe; tax %: of compute"
_COLOURS = {Verdict.PAYS: "green", Verdict.COSTS: "yellow", Verdict.TOO_LARGE: "bold red", Verdict.NOTHING: "yellow"}


def as_json(report: Report) -> str:
    """All figures; keys end in their units."""
    machine = dataclasses.asdict(report.machine)
    del machine["assumptions"]
    rows = [_figures(estimated) for estimated in report.estimates]
    return json.dumps({"model": report.model, "machine": machine, "notes": report.notes, "rows": rows}, indent=1)


def show(report: Report, console: Console) -> None:
    """Prints a table of figures, then what to do about each plan, then what all rests on."""
    console.print(_table(f"Paging the cache of {report.model}", report.estimates))
    console.print(f"{_LEGEND}\n", style="dim", highlight=False)
    console.print(_verdicts(report.estimates))
    console.print()
    for note in report.notes:
        console.print(f"* {note}", style="dim", highlight=False, markup=False)


def _figures(estimated: Estimate) -> dict[str, Any]:
    """An estimate as what JSON takes; keys end in their units, and what is infinite is None."""
    plan = estimated.plan
    prediction = dataclasses.asdict(estimated.prediction)
    return {
        "context_tokens": plan.context,
        "batch_rows": plan.batch_size,
        "quantization": plan.quantization,
        "device_budget_bytes": plan.device_budget,
        "host_budget_bytes": plan.host_budget,
        **{name: None if value == math.inf else value for name, value in prediction.items()},
        "verdict": str(estimated.verdict),
        "reason": estimated.reason,
        "fix": estimated.fix or None,
    }


def _table(title: str, estimates: Sequence[Estimate]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding, table.show_edge = (0, 0), False
    for name in ("context", "quant.", "B/token", "cache", "where", "floor", "tax", "tax %", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for estimated in estimates:
        prediction = estimated.prediction
        tiers = (prediction.device_bytes, prediction.host_bytes, prediction.nvme_bytes)
        paged = sum(tiers)
        table.add_row(
            *_named(estimated.plan),
            f"{prediction.token_bytes:,.0f}",
            in_bytes(paged + prediction.resident_bytes),
            "/".join(f"{100 * nbytes / paged:.0f}" for nbytes in tiers) if paged else "-",
            _in_seconds(prediction.floor_s),
            _in_seconds(prediction.tax_s),
            f"{100 * prediction.tax_share:,.0f}",
            f"{prediction.tokens_per_s:.3g}",
        )
    return table


def _verdicts(estimates: Sequence[Estimate]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    grid.add_column()
    for estimated in estimates:
        said = f"[{_COLOURS[estimated.verdict]}]{estimated.verdict}[/]: {estimated.reason}."
        if estimated.fix:
            said += f" Try {estimated.fix}."
        elif estimated.verdict in (Verdict.COSTS, Verdict.TOO_LARGE):
            said += " Nothing tried helps."
        grid.add_row(*_named(estimated.plan), said)
    return grid


def _named(plan: Plan) -> tuple[str, str]:
    return f"{plan.context:,}", plan.quantization or "none"


def _in_seconds(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
