"""The command."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that wait spinning take the cores they wait for wherever something else runs as well.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import typer
from rich.console import Console

from nvme_cache.errors import NVMeCacheError

from .contenders import all_contenders
from .plan import FULL, QUICK
from .run import run_quality

app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Folder of an instruction-tuned model of full-attention layers.")],
    tokens: Annotated[int | None, typer.Option(help="Length of a window of text; default 4096.", min=768)] = None,
    windows: Annotated[int | None, typer.Option(help="Windows of text; default 2.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="The JSON file; the chart goes beside it.", dir_okay=False)] = Path(
        "benchmarks/quality.json"
    ),
    dtype: Annotated[str, typer.Option(help="Of the model, such as float32; default: its own.")] = "auto",
    peers: Annotated[bool, typer.Option(help="Whether to measure transformers' quantized caches as well.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Only show that everything runs, in under a minute.")] = False,
) -> None:
    """Measure what quantized caches cost in quality: perplexity, divergence from the exact cache, facts found.

    Takes under half an hour on two cores.
    """
    plan = QUICK if quick else FULL
    plan = replace(plan.with_window(tokens or plan.window), windows=windows or plan.windows)
    contenders = [each for each in all_contenders() if peers or not each.name.startswith("quanto")]
    console = Console()
    if not console.is_terminal:
        console.width = 140  # a file has room for whole tables
    try:
        run_quality(model, contenders, plan, out, dtype=dtype, quick=quick, console=console)
    except NVMeCacheError as error:
        console.print(str(error), style="bold red", markup=False)
        raise typer.Exit(2) from error
    console.print(f"figures: {out}")


if __name__ == "__main__":
    app()
