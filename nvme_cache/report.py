"""The per-token tax as measured: a report to print, to keep as JSON and to draw."""

import io
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from .meter import Cause, Meter, Step
from .units import in_bytes

_WIDTH = 80
_MEANING = {
    Cause.DRIVE: "waiting for the drive",
    Cause.CHECK: "waiting for blocks to be checked",
    Cause.COPY: "waiting for copies between memories",
    Cause.DEQUANTIZE: "waiting for blocks to be dequantized",
    Cause.STAGING: "waiting for a free staging buffer",
    Cause.SOFTWARE: "our own code",
}
_BOUNDS = {"compute": "the model", "drive": "the drive"}
_COLOURS = {
    "compute": "#9aa5b1",
    Cause.DRIVE: "#d1495b",
    Cause.CHECK: "#edae49",
    Cause.COPY: "#00798c",
    Cause.DEQUANTIZE: "#66a182",
    Cause.STAGING: "#7a5195",
    Cause.SOFTWARE: "#2e4057",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Steps of one kind, added up.

    Attributes:
        steps: How many.
        tokens: Tokens they left in the cache: generated, or of the prompt.
        wall_s: Seconds they took.
        tax_s: Seconds of it that paging took from the model, by cause.
        read_bytes: Read from the drive.
        copied_bytes: Copied into slots from other tiers.
        busy_s: Seconds during which background threads worked.
        reading_s: Seconds during which they read.
        p50_s: Median seconds per token; 0 if no token was kept.
        p95_s: The same, exceeded by one step in twenty.
    """

    steps: int
    tokens: int
    wall_s: float
    tax_s: dict[Cause, float]
    read_bytes: int
    copied_bytes: int
    busy_s: float
    reading_s: float
    p50_s: float
    p95_s: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Summary":
        """The summary of at least one step."""
        times = sorted(_wall_s(step) / _tokens(step) for step in steps if _tokens(step)) or [0.0]
        return cls(
            steps=len(steps),
            tokens=sum(map(_tokens, steps)),
            wall_s=sum(map(_wall_s, steps)),
            tax_s={cause: sum(step.tax_s[cause] for step in steps) for cause in Cause},
            read_bytes=sum(step.read_bytes for step in steps),
            copied_bytes=sum(step.copied_bytes for step in steps),
            busy_s=sum(step.busy_s for step in steps),
            reading_s=sum(step.reading_s for step in steps),
            p50_s=statistics.median(times),
            p95_s=times[math.ceil(0.95 * len(times)) - 1],
        )

    @property
    def total_tax_s(self) -> float:
        """Seconds that paging took from the model."""
        return sum(self.tax_s.values())

    @property
    def compute_s(self) -> float:
        """Seconds that were the model's own, and of whatever came between its forwards."""
        return self.wall_s - self.total_tax_s

    @property
    def tax_share(self) -> float:
        """The tax over `compute_s`: 0.16 says that a token takes 16 % longer than without paging."""
        return self.total_tax_s / self.compute_s if self.compute_s else 0.0

    @property
    def read_bytes_per_s(self) -> float:
        """Rate of the drive while it was read."""
        return self.read_bytes / self.reading_s if self.reading_s else 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the background work that the model's computing hid."""
        waited_s = self.total_tax_s - self.tax_s[Cause.SOFTWARE]
        return max(0.0, 1 - waited_s / self.busy_s) if self.busy_s else 1.0

    @property
    def floor_s(self) -> float:
        """Seconds that physics allows: computing, or reading at the rate reached, whichever is longer."""
        return max(self.compute_s, self.reading_s)

    @property
    def bound(self) -> str:
        """What the floor is made of: "compute" or "drive"."""
        return "compute" if self.compute_s >= self.reading_s else "drive"

    @property
    def efficiency(self) -> float:
        """`floor_s` over `wall_s`; 1 is as fast as it gets."""
        return min(1.0, self.floor_s / self.wall_s) if self.wall_s else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Every figure under its name, whose end is its unit."""
        figures = asdict(self) | {"tax_s": {str(cause): seconds for cause, seconds in self.tax_s.items()}}
        derived = ("total_tax_s", "compute_s", "tax_share", "read_bytes_per_s", "hidden_share", "floor_s", "bound")
        return figures | {name: getattr(self, name) for name in (*derived, "efficiency")}


class TaxReport:
    """What paging has cost a cache so far, for prompts and for generated tokens.

    `print` it for a table. A report is a snapshot: ask the cache for another one later.

    Attributes:
        prefill: Steps that processed a prompt or a chunk of one; None if there were none.
        decode: Steps that generated; None if there were none.
    """

    def __init__(self, meter: Meter) -> None:
        meter.settle(wait=True)
        steps = [replace(step, tax_s=dict(step.tax_s)) for step in meter.steps]
        self._decode_steps = [step for step in steps if not step.is_prefill]
        prefill_steps = [step for step in steps if step.is_prefill]
        self.prefill = Summary.of(prefill_steps) if prefill_steps else None
        self.decode = Summary.of(self._decode_steps) if self._decode_steps else None
        self._written_bytes = meter.written_bytes

    def to_dict(self) -> dict[str, Any]:
        """All figures, and those of each generating step in turn; names end in their units."""
        return {
            "prefill": self.prefill and self.prefill.to_dict(),
            "decode": self.decode and self.decode.to_dict(),
            "written_bytes": self._written_bytes,
            "decode_steps": [
                {
                    "past_length": step.past_length,
                    "tokens": _tokens(step),
                    "wall_s": _wall_s(step),
                    "tax_s": {str(cause): seconds for cause, seconds in step.tax_s.items()},
                    "read_bytes": step.read_bytes,
                    "copied_bytes": step.copied_bytes,
                }
                for step in self._decode_steps
            ],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_dict()` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws where each generating step's time went, stacked, into an image file.

        Raises:
            ValueError: there is none.
            ImportError: matplotlib is not installed; the message has the command.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install 'nvme-cache[bench]'") from error
        steps = self._decode_steps
        if not steps:
            raise ValueError("nothing to draw: no token has been generated yet")
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        layers = {"compute": [_wall_s(step) - sum(step.tax_s.values()) for step in steps]}
        layers |= {str(cause): [step.tax_s[cause] for step in steps] for cause in Cause}
        shown = {name: seconds for name, seconds in layers.items() if name == "compute" or any(seconds)}
        bottom = [0.0] * len(steps)
        for name, seconds in shown.items():
            heights = [1e3 * value for value in seconds]
            axes.bar(range(len(steps)), heights, bottom=bottom, width=1.0, label=name, color=_COLOURS[name])
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set(xlabel="step", ylabel="ms a step", title="Where the time went", ylim=(0, None))
        axes.margins(x=0)
        axes.legend(loc="lower right", reverse=True)
        figure.savefig(path, dpi=120)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self.decode is not None:
            parts += [_table("Generating", "token", self.decode.tokens, self.decode), _remarks(self.decode, "token")]
        if self.prefill is not None:
            title = "Prompt" if self.prefill.steps == 1 else "Prompts"
            parts += [_table(title, "step", self.prefill.steps, self.prefill), _remarks(self.prefill, "step")]
        if not parts:
            return "Nothing measured yet: no step has been taken."
        return Group(*parts, f"Written to the drive so far: {in_bytes(self._written_bytes)}.")

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")

    def __repr__(self) -> str:
        return str(self)


def _tokens(step: Step) -> int:
    return step.new_length if step.kept_length is None else step.kept_length


def _wall_s(step: Step) -> float:
    # An accelerator may still be at work on the last step when the host is done with it.
    return max(step.wall_s, sum(step.tax_s.values()))


def _table(title: str, unit: str, count: int, summary: Summary) -> Table:
    title = f"{title}: {summary.tokens:,} tokens in {summary.steps:,} step{'s' * (summary.steps != 1)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=True, pad_edge=False)
    table.add_column(f"where a {unit}'s time goes", min_width=38)
    table.add_column("ms", justify="right", min_width=10)
    table.add_column("of it all", justify="right", min_width=10)
    rows = {"the model": summary.compute_s} | {_MEANING[cause]: summary.tax_s[cause] for cause in Cause}
    for name, seconds in rows.items():
        if seconds or name in ("the model", _MEANING[Cause.DRIVE], _MEANING[Cause.SOFTWARE]):
            share = seconds / summary.wall_s if summary.wall_s else 0.0
            table.add_row(name, f"{1e3 * seconds / max(count, 1):,.2f}", f"{share:.1%}")
    table.add_row("together", f"{1e3 * summary.wall_s / max(count, 1):,.2f}", "", style="bold")
    return table


def _remarks(summary: Summary, unit: str) -> str:
    count = summary.tokens if unit == "token" else summary.steps
    tax_ms = 1e3 * summary.total_tax_s / max(count, 1)
    lines = [f"The tax: {tax_ms:,.2f} ms a {unit}, {summary.tax_share:.1%} on top of the model's own time."]
    if unit == "token":
        lines.append(f"P50 {1e3 * summary.p50_s:,.2f} ms, P95 {1e3 * summary.p95_s:,.2f} ms a token.")
    if summary.read_bytes:
        lines.append(
            f"Read {in_bytes(summary.read_bytes / max(count, 1))} a {unit} at {in_bytes(summary.read_bytes_per_s)}/s; "
            f"{summary.hidden_share:.0%} of the background work was hidden."
        )
    if summary.copied_bytes:
        lines.append(f"Copied {in_bytes(summary.copied_bytes / max(count, 1))} a {unit} from memory.")
    lines.append(
        f"The floor: {1e3 * summary.floor_s / max(count, 1):,.2f} ms, set by {_BOUNDS[summary.bound]}; "
        f"efficiency {summary.efficiency:.2f}."
    )
    return "\n".join([*lines, ""])
