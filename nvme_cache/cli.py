"""The `nvme-cache` command."""

import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from .snapshots import commands

app = typer.Typer(help="Page the KV cache of Hugging Face models to NVMe.", no_args_is_help=True)

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_DOCUMENT = Path("examples/us_constitution.txt")
DEFAULT_QUESTIONS = [
    "What are the two chambers of Congress?",
    "Who is the Commander in Chief of the Army and Navy?",
    "What does the Fourth Amendment protect against?",
]


@app.callback()
def main() -> None:
    """Page the KV cache of Hugging Face models to NVMe."""


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="Folder or hub name of an instruction-tuned model.")] = DEFAULT_MODEL,
    document: Annotated[Path, typer.Option(help="Text file to ask about.", exists=True, dir_okay=False)] = (
        DEFAULT_DOCUMENT
    ),
    question: Annotated[list[str] | None, typer.Option(help="What to ask; may be given several times.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 60,
    offload_dir: Annotated[Path | None, typer.Option(help="Existing folder for shards, on a fast drive.")] = None,
) -> None:
    """Ask about a long document twice, with the cache in memory and on NVMe, and compare every bit.

    Exit status 1 if a token or a logit differs.
    """
    import torch

    from .demo import Request, ask

    console = Console()
    questions = question or DEFAULT_QUESTIONS
    text = document.read_text()

    def request(title: str, *, on_nvme: bool) -> Request:
        folder = None if offload_dir is None else str(offload_dir)
        return Request(title, model, text, questions, max_new_tokens, on_nvme, folder)

    with tempfile.TemporaryDirectory() as folder:
        try:
            memory = ask(request("in memory", on_nvme=False), Path(folder))
            nvme = ask(request("on NVMe  ", on_nvme=True), Path(folder))
        except subprocess.CalledProcessError as error:
            raise typer.Exit(2) from error
    for asked, answer in zip(questions, nvme.texts, strict=True):
        console.print(Panel(answer, title=asked, title_align="left"))

    table = Table(title=f"{model}, {nvme.prompt_tokens:,} tokens of {document.name}", title_justify="left")
    table.add_column()
    table.add_column("DynamicCache in memory", justify="right")
    table.add_column("OffloadedNVMeCache", justify="right")
    table.add_row("reading, tokens/s", *(f"{run.prompt_tokens / run.prefill_s:,.0f}" for run in (memory, nvme)))
    table.add_row("answering, tokens/s", *(f"{len(run.tokens) / run.answer_s:.1f}" for run in (memory, nvme)))
    table.add_row("host peak above the model", *(_mib(run.host_peak_bytes) for run in (memory, nvme)))
    if memory.device_peak_bytes:
        table.add_row("device peak above the model", *(_mib(run.device_peak_bytes) for run in (memory, nvme)))
    table.add_row("cache in memory", _mib(memory.usage["memory"]), _mib(nvme.usage["device"] + nvme.usage["host"]))
    table.add_row("cache on NVMe", _mib(0), _mib(nvme.usage["nvme"]))
    table.add_row("shards safetensors opened", "0", f"{nvme.shards}")
    console.print(table)

    same_tokens = memory.tokens == nvme.tokens
    same_logits = torch.equal(memory.logits, nvme.logits)
    console.print(f"tokens: {_verdict(same_tokens)} ({len(nvme.tokens)} generated)")
    console.print(f"logits: {_verdict(same_logits)} ({nvme.logits.numel():,} compared bit for bit)")
    if not (same_tokens and same_logits):
        raise typer.Exit(1)


@app.command()
def bench(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Existing folder on the drive to measure; default: where shards go.",
            exists=True,
            file_okay=False,
            writable=True,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only show that everything runs, in under a minute.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for bench.json and charts.", file_okay=False)] = Path("benchmarks"),
) -> None:
    """Measure the drive, decode steps against the floor, other caches, and growth: JSON, tables, charts.

    Takes under ten minutes. Needs some gigabytes on the drive while it runs.
    """
    from .bench import run_bench
    from .errors import NVMeCacheError
    from .store import default_offload_dir

    console = Console()
    if not console.is_terminal:
        console.width = 140  # a file has room for whole tables
    try:
        path = run_bench(folder or default_offload_dir(), out, quick=quick, console=console)
    except NVMeCacheError as error:
        console.print(str(error), style="bold red", markup=False)
        raise typer.Exit(2) from error
    console.print(f"figures: {path}")


@app.command()
def doctor(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Existing folder on the drive to examine; default: where shards go."),
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Draw read rate by request size, as a PNG.", dir_okay=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what this machine gives to a cache, what default settings follow, and what to do about each problem.

    Takes some ten seconds, needs 256 MiB on the drive meanwhile, and leaves
    nothing. The text is fit for bug reports: your home folder is written "~".
    Exit status 1 if the folder cannot be used.
    """
    from .doctor import as_json, as_text, draw_reads, examine
    from .errors import NVMeCacheError

    if chart is not None and not chart.parent.is_dir():
        raise typer.BadParameter(f"{chart.parent} is no folder", param_hint="--chart")
    aside = Console(stderr=True)
    try:
        with aside.status("Measuring"):
            found = examine(folder)
    except NVMeCacheError as error:
        aside.print(str(error), style="bold red", markup=False)
        raise typer.Exit(1) from error
    if json:
        typer.echo(as_json(found))
    else:
        console = Console()
        console.width = min(console.width, 80)  # as wide as what is pasted into a report reads well
        console.print(as_text(found))
    if chart is not None:
        aside.print(draw_reads(found, chart), markup=False)


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="Folder with a config.json, or hub name.")],
    context: Annotated[list[int] | None, typer.Option(help="Tokens cached; may be given several times.")] = None,
    batch: Annotated[int, typer.Option(help="Batch rows.")] = 1,
    quantization: Annotated[
        list[str] | None,
        typer.Option(help="none, int8, int4, int2 or float8; may be given several times."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of weights and cache; default: the config's.")] = None,
    device_budget: Annotated[str, typer.Option(help="Blocks kept in device memory, such as 8GiB.")] = "0GB",
    host_budget: Annotated[str, typer.Option(help="Blocks kept in host memory; auto: as the cache does.")] = "auto",
    disk_budget: Annotated[str | None, typer.Option(help="Most bytes of shards; default: what the drive has.")] = None,
    memory: Annotated[str | None, typer.Option(help="Free where the model computes; default: this machine's.")] = None,
    nvme: Annotated[str | None, typer.Option(help="Rate of the drive, such as 7GB/s; default: measured.")] = None,
    pcie: Annotated[str | None, typer.Option(help="Rate of the link, or none; default: measured.")] = None,
    compute_ms: Annotated[float | None, typer.Option(help="A step's without paging; default: a rule.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="The same figures as JSON, and nothing else.")] = False,
) -> None:
    """Tell what paging a model's cache would cost, whether it pays, and the cheapest change if not.

    From the config alone: nothing is downloaded but that, no weights are read.
    """
    from .errors import NVMeCacheError
    from .estimate import Request, run
    from .estimate_table import as_json, show

    request = Request(
        model=model,
        contexts=context or [32_768, 131_072],
        quantizations=quantization or ["none", "int8", "int4"],
        batch_size=batch,
        dtype=dtype,
        device_budget=device_budget,
        host_budget=host_budget,
        disk_budget=disk_budget,
        memory=memory,
        nvme=nvme,
        pcie=pcie,
        compute_ms=compute_ms,
    )
    try:
        report = run(request)
    except NVMeCacheError as error:
        Console(stderr=True).print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if json_:
        typer.echo(as_json(report))
    else:
        console = Console()
        console.width = min(console.width, 80)
        show(report, console)


app.command()(commands.inspect)
app.command("ls")(commands.list_snapshots)
app.command()(commands.pin)
app.command()(commands.unpin)
app.command("rm")(commands.remove)
app.command()(commands.prune)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _verdict(same: bool) -> str:
    return "[green]identical[/green]" if same else "[bold red]DIFFERENT[/bold red]"


if __name__ == "__main__":
    app()
