"""The manifest of a snapshot: all that is known of it without reading a block, as JSON that people can read.

Every field has a type, checked when the file is read, and the whole a checksum, so that a manifest is either what was
written or an error. `docs/snapshots.md` describes the format.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import xxhash
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from nvme_cache.errors import SnapshotCorruptedError, SnapshotMismatchError

FORMAT = "nvme-cache snapshot"
VERSION = 1
MANIFEST = "manifest.json"

FILE_NAME = re.compile(r"(layer-\d{3,}-\d{6,}|states)-[0-9a-f]{16}\.safetensors")
_MOST_BLOCK_SIZE = 1 << 18
_T = TypeVar("_T")


@strict
@dataclass
class ModelIdentity:
    """Whose keys and values these are.

    Attributes:
        model_type: Of the config, such as "llama".
        architectures: Classes the weights were made for, where the config says so.
        dtype: The model's dtype, where known.
        config: Every other field of the config that says what keys and values are.
        transformers: Version of transformers that made them.
        weights: A digest of the weights, if the model was given.
    """

    model_type: str
    architectures: list[str]
    dtype: str | None
    config: dict[str, Any]
    transformers: str
    weights: str | None


@strict
@dataclass
class StatesFile:
    """The file that holds what is not in blocks: token ids, tails, states of layers that stay resident."""

    file: str
    nbytes: int
    xxh3: str


@strict
@dataclass
class StatesKind:
    """Heads, width and dtype of keys or of values."""

    num_heads: int
    head_dim: int
    dtype: str


@strict
@dataclass
class Run:
    """Blocks sealed together.

    Attributes:
        file: Their shard; None if the file of states holds them.
        nbytes: Size of the shard's file in bytes.
        first_token: Position of the first token when they were sealed.
        length: How many of their tokens count, from the first.
        num_pieces: Pieces.
        piece_length: Tokens in each.
        batch_size: Batch rows as sealed.
        keys: Heads, width and dtype of the keys as sealed.
        values: The same of the values.
        quantized: Whether they are stored as the snapshot's quantization says; else exactly.
        rows: For each present batch row the row as sealed; None if they are the same.
        checksums: For each tensor of the shard the xxh3-64 of its pieces, separated by spaces.
    """

    file: str | None
    nbytes: int
    first_token: int
    length: int
    num_pieces: int
    piece_length: int
    batch_size: int
    keys: StatesKind
    values: StatesKind
    quantized: bool
    rows: list[int] | None
    checksums: dict[str, str]


@strict
@dataclass
class PagedLayer:
    """A layer of full attention: its runs, and what follows them in the file of states.

    Attributes:
        batch_size: Present batch rows.
        length: Tokens in all.
        keys: Heads, width and dtype of the keys at present.
        values: The same of the values.
        runs: Sealed blocks, oldest first.
    """

    batch_size: int
    length: int
    keys: StatesKind
    values: StatesKind
    runs: list[Run]


@strict
@dataclass
class Layer:
    """One layer of the cache.

    Attributes:
        kind: Name of the class that holds its states: ours for full attention, transformers' own for others.
        paged: A paged layer that holds tokens.
        state: Attributes of one of transformers' own; tensors are named and lie in the file of states.
    """

    kind: str
    paged: PagedLayer | None
    state: dict[str, Any] | None


@strict
@dataclass
class Manifest:
    """A snapshot.

    Attributes:
        model: Whose it is.
        batch_size: Rows of the token ids.
        num_tokens: Tokens held.
        block_size: Tokens in a block.
        quantization: Fields of the `QuantizationConfig`; None if every block is exact.
        croppable: Whether every layer can give up its newest tokens.
        prefill_token_s: Seconds it took to compute a token of the prompt, where that was measured.
        states: What is not in blocks.
        layers: All layers.
    """

    model: ModelIdentity
    batch_size: int
    num_tokens: int
    block_size: int
    quantization: dict[str, Any] | None
    croppable: bool
    prefill_token_s: float | None
    states: StatesFile
    layers: list[Layer]

    @property
    def runs(self) -> Iterator[Run]:
        """All runs of all layers."""
        for layer in self.layers:
            if layer.paged is not None:
                yield from layer.paged.runs

    @property
    def files(self) -> dict[str, int]:
        """Every file beside the manifest, with its size in bytes."""
        shards = {run.file: run.nbytes for run in self.runs if run.file is not None}
        return {**shards, self.states.file: self.states.nbytes}

    @property
    def nbytes(self) -> int:
        """Size of those files in bytes."""
        return sum(self.files.values())

    def encode(self) -> bytes:
        """The manifest as written."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "xxh3": _checksum(body)}, indent=1).encode()

    @classmethod
    def decode(cls, encoded: bytes, where: object) -> "Manifest":
        """Reads a manifest.

        Args:
            encoded: The bytes of the file.
            where: What to call it in errors.

        Raises:
            SnapshotCorruptedError: this is not what was written.
            SnapshotMismatchError: another version of the format.
        """
        try:
            body = json.loads(encoded)
            version = body.pop("version") if body.pop("format") == FORMAT else None
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise SnapshotCorruptedError(f"{where} is not the manifest of a snapshot: {error}") from error
        if version != VERSION:
            raise SnapshotMismatchError(
                f"{where} has version {version!r} of the format, this nvme-cache reads version {VERSION}; prefill again"
            )
        if body.pop("xxh3", None) != _checksum({"format": FORMAT, "version": VERSION, **body}):
            raise SnapshotCorruptedError(f"{where} is not what was written: its checksum differs. Prefill again.")
        try:
            manifest = _built(cls, body)
            _check(manifest)
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise SnapshotCorruptedError(f"{where} makes no sense: {error}") from error
        return manifest


def _checksum(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(canonical.encode()).hexdigest()


def _built(kind: type[_T], body: Any) -> _T:
    """An instance of one of the dataclasses above."""
    if not isinstance(body, dict):
        raise TypeError(f"{kind.__name__} must be an object")
    nested: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        value = body.get(field.name)
        if field.type in _NESTED and value is not None:
            nested[field.name] = _built(_NESTED[field.type], value)
        elif field.type in _LISTS and isinstance(value, list):
            nested[field.name] = [_built(_LISTS[field.type], each) for each in value]
    return kind(**{**body, **nested})


_NESTED: dict[Any, type] = {
    ModelIdentity: ModelIdentity,
    StatesFile: StatesFile,
    StatesKind: StatesKind,
    PagedLayer | None: PagedLayer,
}
_LISTS: dict[Any, type] = {list[Run]: Run, list[Layer]: Layer}


def _check(manifest: Manifest) -> None:
    """Raises ValueError where fields contradict each other or lead out of the folder."""
    for name, nbytes in manifest.files.items():
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a file of a snapshot")
        if nbytes < 0:
            raise ValueError(f"{name} has {nbytes} bytes")
    if min(manifest.batch_size, manifest.num_tokens, manifest.block_size) < 1:
        raise ValueError("a snapshot holds at least one token, in blocks of at least one")
    if manifest.block_size > _MOST_BLOCK_SIZE:  # memory for the tail of every layer depends on it
        raise ValueError(f"a block of {manifest.block_size:,} tokens is more than anyone uses")
    for layer in manifest.layers:
        if layer.paged is not None:
            _check_paged(layer.paged)


def _check_paged(layer: PagedLayer) -> None:
    for kind in (layer.keys, layer.values, *(kind for run in layer.runs for kind in (run.keys, run.values))):
        if min(kind.num_heads, kind.head_dim) < 0:
            raise ValueError("heads and widths cannot be negative")
    for run in layer.runs:
        counts = run.num_pieces, run.piece_length, run.batch_size, run.length
        if min(counts) < 1 or run.length > run.num_pieces * run.piece_length or run.first_token < 0:
            raise ValueError(f"a run of {run.length} tokens does not fit {run.num_pieces} pieces of {run.piece_length}")
        rows = range(run.batch_size) if run.rows is None else run.rows
        if len(rows) != layer.batch_size or not set(rows) <= set(range(run.batch_size)):
            raise ValueError(f"a run of {run.batch_size} batch rows cannot serve {layer.batch_size}")
    if sum(run.length for run in layer.runs) > layer.length:
        raise ValueError("the runs of a layer hold more tokens than it has")
