"""The commands that look after snapshots: inspect, ls, pin, unpin, rm, prune."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nvme_cache.errors import NVMeCacheError
from nvme_cache.units import in_bytes

from .folder import read_manifest
from .manifest import Manifest
from .store import SnapshotStore

Snapshot = Annotated[Path, typer.Argument(metavar="DIR", help="What save_pretrained was given.")]
Store = Annotated[
    Path, typer.Argument(metavar="STORE", help="Folder of a SnapshotStore.", exists=True, file_okay=False)
]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="As ls prints them, or their beginnings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def inspect(snapshot: Snapshot, json_: AsJson = False) -> None:
    """Say what a snapshot holds, and of which model.

    Reads the manifest alone.
    """
    with _explained():
        manifest = read_manifest(snapshot)
    if json_:
        typer.echo(json.dumps(asdict(manifest), indent=1))
        return
    console = _console()
    model, table = manifest.model, Table(show_header=False, box=None, title=str(snapshot), title_justify="left")
    kinds = Counter(layer.kind for layer in manifest.layers)
    in_blocks = sum(run.length for run in manifest.runs) // max(1, kinds["NVMeLayer"])
    table.add_row("model", f"{model.model_type}, {', '.join(model.architectures) or 'architecture not said'}")
    table.add_row("computed in", f"{model.dtype or 'a dtype not said'}, transformers {model.transformers}")
    table.add_row("weights", model.weights or "not compared")
    table.add_row("tokens", f"{manifest.num_tokens:,} in each of {manifest.batch_size:,} batch rows")
    table.add_row("in blocks", f"{in_blocks:,}, of {manifest.block_size:,} tokens each; the newest are apart")
    table.add_row("stored as", _format(manifest))
    table.add_row("layers", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    table.add_row("bytes", f"{in_bytes(manifest.nbytes)} in {len(manifest.files):,} files")
    if manifest.prefill_token_s is not None:
        table.add_row("took", f"{manifest.prefill_token_s * manifest.num_tokens:.3g} s to compute")
    console.print(table)


def list_snapshots(store: Store, json_: AsJson = False) -> None:
    """List the snapshots of a store, the one that was used last first."""
    found = _open(store)
    entries = found.entries()
    if json_:
        rows = [
            {
                "name": entry.name,
                "path": str(entry.path),
                "model_type": entry.manifest.model.model_type,
                "tokens": entry.manifest.num_tokens,
                "batch_size": entry.manifest.batch_size,
                "bytes": entry.manifest.nbytes,
                "last_used_s": entry.last_used_s,
                "pinned": entry.is_pinned,
            }
            for entry in entries
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    used = in_bytes(found.used_bytes)
    table = Table(title=f"{len(entries):,} snapshots take {used} on the drive", title_justify="left")
    for name in ("name", "model", "stored as", "last used"):
        table.add_column(name, no_wrap=name == "name")
    for name in ("tokens", "bytes"):
        table.add_column(name, justify="right")
    for entry in entries:
        manifest = entry.manifest
        rows_held = f" x {manifest.batch_size}" if manifest.batch_size > 1 else ""
        table.add_row(
            entry.name + (" *" if entry.is_pinned else ""),
            manifest.model.model_type,
            _format(manifest),
            datetime.fromtimestamp(entry.last_used_s).isoformat(" ", "minutes"),
            f"{manifest.num_tokens:,}{rows_held}",
            in_bytes(manifest.nbytes),
        )
    if any(entry.is_pinned for entry in entries):
        table.caption = "* pinned"
    _console().print(table)


def pin(store: Store, names: Names) -> None:
    """Keep snapshots whatever their age."""
    with _explained():
        for name in names:
            _open(store).pin(name)


def unpin(store: Store, names: Names) -> None:
    """Let snapshots go again when others need the room."""
    with _explained():
        for name in names:
            _open(store).pin(name, pinned=False)


def remove(store: Store, names: Names) -> None:
    """Delete snapshots, pinned or not, unless they are open.

    Exit status 1 if one is.
    """
    with _explained():
        in_use = [name for name in names if not _open(store).remove(name)]
    for name in in_use:
        Console(stderr=True).print(f"{name} is open in some process and stays", style="bold red", markup=False)
    if in_use:
        raise typer.Exit(1)


def prune(
    store: Store,
    size_limit: Annotated[str, typer.Option(help="Most bytes on the drive, such as 200GiB.")],
    ttl_days: Annotated[float | None, typer.Option(help="Also delete what nobody used for so long.")] = None,
) -> None:
    """Delete what was not used for longest until a store keeps to a limit; neither pinned nor open ones."""
    with _explained():
        limited = SnapshotStore(store, size_limit=size_limit, ttl_s=None if ttl_days is None else ttl_days * 86_400)
        removed = limited.prune()
    for name in removed:
        typer.echo(name)
    used = limited.used_bytes
    if used > limited.size_limit:
        Console(stderr=True).print(f"{in_bytes(used)} are pinned or open", style="bold red")
        raise typer.Exit(1)


def _open(store: Path) -> SnapshotStore:
    return SnapshotStore(store, size_limit=0)  # which counts only when something is saved or pruned


def _format(manifest: Manifest) -> str:
    if manifest.quantization is None:
        return "exact"
    formats = [manifest.quantization.get(name) or "exact" for name in ("key", "value")]
    return formats[0] if formats[0] == formats[1] else f"{formats[0]} keys, {formats[1]} values"


def _console() -> Console:
    console = Console()
    if console.is_terminal:
        console.width = min(console.width, 100)
    return console


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except NVMeCacheError as error:
        Console(stderr=True).print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
