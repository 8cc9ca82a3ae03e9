"""Restoring: a snapshot becomes the layers of a cache that reads its blocks where they are, when they are needed."""

import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError

from nvme_cache import io
from nvme_cache.blocks import BlockRun, Layout, ResidentBlocks
from nvme_cache.errors import ConfigurationError, NVMeCacheError, SnapshotCorruptedError, SnapshotMismatchError
from nvme_cache.layers import NVMeLayer
from nvme_cache.pager import Pager
from nvme_cache.placement import Tier
from nvme_cache.quantization import Exact, QuantizationConfig
from nvme_cache.resident import Tensors, restore_state
from nvme_cache.shards import Shard, dtype_called
from nvme_cache.states import LayerSpec, StateSpec

from .folder import Use, read_file, read_manifest
from .identity import check_identity
from .manifest import Layer, Manifest, ModelIdentity, PagedLayer, Run, StatesKind
from .remote import Remote, RemoteShard
from .save import TOKEN_IDS

_ATTEMPTS = 10  # at opening a snapshot that is saved again and again meanwhile


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is open: its files stay where they are for as long as this object, or a shard of it, exists.

    Attributes:
        folder: Where it is.
        use: What keeps its files; None where nothing does.
        manifest: What is known of it without reading a block.
        tensors: What is not in blocks.
    """

    folder: Path | Remote
    use: Use | None
    manifest: Manifest
    tensors: Tensors

    @classmethod
    def open(cls, folder: Path | Remote, identity: ModelIdentity) -> "Snapshot":
        """Opens the snapshot in `folder` for a model. Reads the manifest and what is not in blocks.

        Raises:
            SnapshotCorruptedError: there is no snapshot, or a file of it is missing, short or not what was written.
            SnapshotMismatchError: it is of another model, or another version of the format.
            SnapshotIOError: it is elsewhere and cannot be reached.
        """
        if isinstance(folder, Path):
            folder = folder.absolute()
            if not folder.is_dir():
                raise SnapshotCorruptedError(f"there is no snapshot at {folder}: no such folder")
        for attempt in range(_ATTEMPTS):
            use = Use(folder) if isinstance(folder, Path) else None
            manifest = _manifest(folder)
            check_identity(manifest.model, identity, folder)
            try:
                if isinstance(folder, Path):
                    _check_files(folder, manifest)
                return cls(folder, use, manifest, _read_states(folder, manifest))
            except SnapshotCorruptedError:
                if attempt == _ATTEMPTS - 1 or _manifest(folder) == manifest:  # else it was saved again
                    raise
        raise AssertionError("unreachable")

    @cached_property  # every run asks
    def quantization(self) -> QuantizationConfig | None:
        """How its blocks are stored."""
        if self.manifest.quantization is None:
            return None
        with self._explained():
            return QuantizationConfig(**self.manifest.quantization)

    @property
    def token_ids(self) -> torch.Tensor:
        """`[batch, num_tokens]`, the tokens it holds."""
        with self._explained():
            token_ids = self.tensors[TOKEN_IDS]
            shape = self.manifest.batch_size, self.manifest.num_tokens
            if token_ids.shape != shape or token_ids.dtype.is_floating_point:
                raise ValueError(f"the token ids are {tuple(token_ids.shape)}, not {shape}")
            return token_ids

    def fill(self, layers: list[Any], pager: Pager, device: torch.device) -> None:
        """Gives the layers of a new cache what the snapshot holds.

        Args:
            layers: As they are made for the model's config.
            pager: What moves their blocks.
            device: Where tails and states go.

        Raises:
            SnapshotCorruptedError: what the snapshot says makes no sense.
            SnapshotMismatchError: it has layers of other kinds.
        """
        direct = self._reads_direct()
        for layer_idx, entry in enumerate(self.manifest.layers):
            if layer_idx == len(layers):  # some models have more layers in their cache than in their config
                layers.append(_another(layers, entry.kind, pager))
            if type(layers[layer_idx]).__name__ != entry.kind:
                raise SnapshotMismatchError(
                    f"layer {layer_idx} in the snapshot {self.folder} is of kind {entry.kind}, in this model of kind "
                    f"{type(layers[layer_idx]).__name__}: use the model it was made with, or prefill again"
                )
            with self._explained():
                self._fill(layers[layer_idx], layer_idx, entry, pager, device, direct=direct)
        if len(layers) > len(self.manifest.layers):
            raise SnapshotMismatchError(
                f"the snapshot {self.folder} has {len(self.manifest.layers)} layers, this model {len(layers)}"
            )

    def _fill(
        self, layer: Any, layer_idx: int, entry: Layer, pager: Pager, device: torch.device, *, direct: bool
    ) -> None:
        if not isinstance(layer, NVMeLayer):
            restore_state(layer, entry.state or {}, self.tensors, device)
            return
        if (paged := entry.paged) is None:
            return
        spec = _spec(paged)
        room_bytes, runs = pager.host_bytes_of_a_layer, []
        for at, described in enumerate(paged.runs):
            run = self._run(layer_idx, at, described, spec, pager, device, direct=direct)
            if run.tier is Tier.NVME and run.nbytes <= room_bytes:
                run, room_bytes = run.warm(), room_bytes - run.nbytes
            runs.append(run)
        length = paged.length - sum(run.length for run in runs)
        keys, values = (self.tensors[f"layer.{layer_idx}.tail.{name}"] for name in ("keys", "values"))
        for states, kind in ((keys, spec.keys), (values, spec.values)):
            shape = paged.batch_size, kind.num_heads, length, kind.head_dim
            if states.shape != shape or states.dtype != kind.dtype or length > pager.longest_tail:
                raise ValueError(f"the tail of layer {layer_idx} is {tuple(states.shape)}, not {shape} of {kind.dtype}")
        layer.restore(spec, paged.batch_size, runs, (keys, values), device)

    def _run(
        self, layer_idx: int, at: int, run: Run, spec: LayerSpec, pager: Pager, device: torch.device, *, direct: bool
    ) -> BlockRun:
        sealed = _spec(run)
        if sealed.extents != spec.extents:
            raise ValueError(f"a run of layer {layer_idx} has other heads or widths than the layer")
        exact = Exact(), Exact()
        quantization = self.quantization
        codecs = quantization.codecs(sealed, pager.block_size) if run.quantized and quantization else exact
        layout = Layout(sealed, run.batch_size, codecs, run.num_pieces, run.piece_length)
        if run.quantized and (layout.is_exact or run.piece_length != pager.block_size):
            raise ValueError(f"a run of layer {layer_idx} cannot be quantized")
        rows = None if run.rows is None else torch.tensor(run.rows, dtype=torch.int64, device="cpu")
        if run.file is None:
            parts = [self.tensors[f"layer.{layer_idx}.run.{at}.{name}"] for name in ("keys", "values")]
            if [(part.shape, part.dtype) for part in parts] != [
                (shape, kind.dtype) for shape, kind in zip(layout.shapes, layout.kinds, strict=True)
            ] or not layout.is_exact:
                raise ValueError(f"a run of layer {layer_idx} is not of the shape it should have")
            keys, values = ((part.to(device, copy=True),) for part in parts)
            return BlockRun(Tier.DEVICE, ResidentBlocks((keys, values), layout.nbytes), layout, run.length, rows)
        if layout.nbytes > run.nbytes:
            raise ValueError(f"{run.file} is too small for its blocks")
        described = layer_idx, run.first_token, layout.sections
        if isinstance(self.folder, Path):
            shard = Shard(self.folder / run.file, *described, storage=layout.storage, direct=direct)
        else:
            shard = RemoteShard(self.folder, run.file, pager.store, *described, storage=layout.storage)
        if shard.file_nbytes != run.nbytes:
            raise ValueError(f"{run.file} should have {shard.file_nbytes} bytes, not {run.nbytes}")
        shard.adopt(run.checksums, self.use)
        return BlockRun(Tier.NVME, shard, layout, run.length, rows)

    def _reads_direct(self) -> bool:
        folder = self.folder
        return isinstance(folder, Path) and all(
            io.reads_direct(folder / name) for name in sorted(self.manifest.files)[:1]
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (ConfigurationError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise SnapshotCorruptedError(f"the snapshot {self.folder} makes no sense: {error}") from error


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Looks at names and sizes, not into the files.

    Raises:
        SnapshotCorruptedError: a file is missing, no file, or of another size.
    """
    for name, nbytes in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except OSError as error:
            raise SnapshotCorruptedError(
                error.errno, f"the snapshot {folder} lacks {name}: {error.strerror}. Prefill again."
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise SnapshotCorruptedError(f"{folder / name} is not a file but a link or something else")
        if found.st_size != nbytes:
            raise SnapshotCorruptedError(
                f"{folder / name} has {found.st_size:,} bytes, not {nbytes:,}: it was cut short or exchanged"
            )


def _manifest(folder: Path | Remote) -> Manifest:
    return read_manifest(folder) if isinstance(folder, Path) else folder.manifest()


def _read_states(folder: Path | Remote, manifest: Manifest) -> Tensors:
    path = f"{folder}/{manifest.states.file}"
    try:
        content = read_file(Path(path)) if isinstance(folder, Path) else folder.read(manifest.states.file)
    except NVMeCacheError:
        raise
    except OSError as error:
        raise SnapshotCorruptedError(error.errno, f"cannot read {path}: {error.strerror}") from error
    if xxhash.xxh3_128(content).hexdigest() != manifest.states.xxh3:
        raise SnapshotCorruptedError(f"{path} is not what was written: its checksum differs. Prefill again.")
    try:
        tensors: Tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise SnapshotCorruptedError(f"{path} is no safetensors file: {error}") from error
    return tensors


def _another(layers: Sequence[Any], kind: str, pager: Pager) -> Any:
    """A layer more of the given kind."""
    if kind == NVMeLayer.__name__:
        return NVMeLayer(pager, len(layers))
    for layer in layers:
        if type(layer).__name__ == kind:
            return deepcopy(layer)  # its state is about to be replaced
    raise SnapshotMismatchError(f"this model has no layer of kind {kind}, which the snapshot has")


def _spec(entry: PagedLayer | Run) -> LayerSpec:
    def kind(states: StatesKind) -> StateSpec:
        return StateSpec(states.num_heads, states.head_dim, dtype_called(states.dtype))

    return LayerSpec(kind(entry.keys), kind(entry.values))
