"""Saving: what a cache holds becomes a folder, without moving bytes that are on the drive already."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash

from nvme_cache import io
from nvme_cache.blocks import BlockRun, Layout, ResidentBlocks, WarmBlocks
from nvme_cache.buffers import HostBuffer
from nvme_cache.layers import NVMeLayer
from nvme_cache.pager import Pager
from nvme_cache.resident import Tensors, can_step_back, state_of
from nvme_cache.shards import Shard, dtype_name, staged
from nvme_cache.states import LayerSpec, StateSpec
from nvme_cache.transfer import transfer_for

from .folder import bring, saving, sync, tidy, write_file, write_manifest
from .manifest import Layer, Manifest, ModelIdentity, PagedLayer, Run, StatesFile, StatesKind

TOKEN_IDS, ATTENTION_MASK = "token_ids", "attention_mask"
_FILE_BYTES = 8 << 10  # for the ends of pages, names and locks
_RUN_BYTES, _PIECE_BYTES = 1 << 10, 40  # in the manifest


def save(
    folder: Path,
    *,
    layers: Sequence[Any],
    pager: Pager,
    identity: ModelIdentity,
    token_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prefill_token_s: float | None,
) -> Manifest:
    """Saves a cache. Shards on the drive are linked, or copied where they cannot be; everything else is written.

    Args:
        folder: Where to; made if need be. A snapshot that is there is replaced, as a whole.
        layers: All layers of the cache.
        pager: Of the cache; writes under way are finished first.
        identity: Whose keys and values these are.
        token_ids: `[batch, num_tokens]`, the tokens that the layers hold.
        attention_mask: `[batch, num_tokens]`, 0 where they are padding.
        prefill_token_s: Seconds it took to compute one of them, where known.

    Raises:
        NVMeCacheError: a write under way failed, or a layer of a kind that cannot be stored.
        OSError: the folder cannot be written to.
    """
    pager.flush()
    pager.check()
    with saving(folder) as ending:
        saved = _Saved(folder, ending, pager.block_size)
        entries = [saved.layer(layer, layer_idx) for layer_idx, layer in enumerate(layers)]
        saved.tensors[TOKEN_IDS] = token_ids.cpu().contiguous()
        saved.tensors[ATTENTION_MASK] = attention_mask.cpu().to(torch.uint8).contiguous()
        quantization = pager.quantization
        manifest = Manifest(
            model=identity,
            batch_size=token_ids.shape[0],
            num_tokens=token_ids.shape[1],
            block_size=pager.block_size,
            quantization=None if quantization is None else asdict(quantization),
            croppable=all(map(can_step_back, layers)),
            prefill_token_s=prefill_token_s,
            states=saved.states(),
            layers=entries,
        )
        for path in saved.new_files:
            sync(path)
        sync(folder)  # names, too, before the manifest speaks of them
        write_manifest(folder, manifest, ending)
        tidy(folder, manifest)
    return manifest


def bytes_to_save(layers: Sequence[Any]) -> int:
    """The most that a snapshot of these layers takes on the drive."""
    nbytes, tensors = 4 * _FILE_BYTES, Tensors()
    for layer in layers:
        if not isinstance(layer, NVMeLayer):
            state_of(layer, "layer", tensors)
            nbytes += sum(tensor.nbytes for tensor in tensors.values()) + _FILE_BYTES
            tensors.clear()
        elif layer.held is not None:
            nbytes += layer.tail_bytes() + _FILE_BYTES
            for run in layer.held[1].runs:
                parts = sum(map(len, run.layout.parts))
                nbytes += run.nbytes + parts * (io.ALIGNMENT + run.layout.num_pieces * _PIECE_BYTES)
                nbytes += _FILE_BYTES + _RUN_BYTES
    return nbytes


def whole_mask(token_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask for all tokens: those behind a prompt are none of them padding."""
    whole = torch.ones(token_ids.shape, dtype=torch.uint8)
    if mask is not None:
        length = min(mask.shape[1], whole.shape[1])
        whole[:, :length] = mask[:, :length].to(whole)
    return whole


class _Saved:
    """What one save has put into its folder."""

    def __init__(self, folder: Path, ending: str, block_size: int) -> None:
        self.new_files: list[Path] = []
        self.tensors: Tensors = {}
        self._folder = folder
        self._ending = ending
        self._block_size = block_size
        self._count = 0
        self._direct: bool | None = None

    def layer(self, layer: Any, layer_idx: int) -> Layer:
        """The entry of a layer, whatever it holds saved."""
        if not isinstance(layer, NVMeLayer):
            state = state_of(layer, f"layer.{layer_idx}", self.tensors)
            return Layer(kind=type(layer).__name__, paged=None, state=state)
        paged = None
        if layer.held is not None:
            spec, history = layer.held
            for name, states in zip(("keys", "values"), history.tail.states(), strict=True):
                self.tensors[f"layer.{layer_idx}.tail.{name}"] = states.clone(memory_format=torch.contiguous_format)
            paged = PagedLayer(
                batch_size=layer.batch_size,
                length=history.length,
                **_kinds(spec),
                runs=list(self._runs(layer_idx, history.runs)),
            )
        return Layer(kind=type(layer).__name__, paged=paged, state=None)

    def states(self) -> StatesFile:
        """Writes the file of states."""
        path = self._folder / f"states-{self._ending}.safetensors"
        content = safetensors.torch.save(self.tensors)
        write_file(path, content)
        return StatesFile(file=path.name, nbytes=len(content), xxh3=xxhash.xxh3_128(content).hexdigest())

    def _runs(self, layer_idx: int, runs: Sequence[BlockRun]) -> Iterator[Run]:
        first_token = 0
        for at, run in enumerate(runs):
            blocks = run.blocks.shard if isinstance(run.blocks, WarmBlocks) else run.blocks
            if isinstance(blocks, Shard):
                shard, file = blocks, self._link(blocks)
            elif run.layout.length < self._block_size:  # the first few tokens of a quantized layer
                shard, file = None, None
                for name, parts in zip(("keys", "values"), blocks.parts, strict=True):
                    self.tensors[f"layer.{layer_idx}.run.{at}.{name}"] = parts[0].cpu().clone()
            else:
                shard = self._write(layer_idx, first_token, run.layout, blocks)
                file = shard.path.name
            sections = () if shard is None else [*shard.sections[0], *shard.sections[1]]
            yield Run(
                file=file,
                nbytes=0 if shard is None else shard.file_nbytes,
                first_token=first_token if shard is None else shard.first_token,
                length=run.length,
                num_pieces=run.layout.num_pieces,
                piece_length=run.layout.piece_length,
                batch_size=run.layout.batch_size,
                **_kinds(run.layout.spec),
                quantized=not run.layout.is_exact,
                rows=None if run.rows is None else run.rows.tolist(),
                checksums={each.name: " ".join(f"{value:016x}" for value in each.checksums) for each in sections},
            )
            first_token += run.length

    def _link(self, shard: Shard) -> str:
        if shard.path.parent.resolve() == self._folder.resolve():  # opened from this very snapshot
            return shard.path.name
        shard.complete()
        path = self._path(shard.layer_idx)
        bring(shard.path, path)
        self.new_files.append(path)
        return path.name

    def _write(self, layer_idx: int, first_token: int, layout: Layout, blocks: ResidentBlocks) -> Shard:
        if self._direct is None:
            self._direct = io.supports_direct(self._folder)
        shard = Shard(
            self._path(layer_idx), layer_idx, first_token, layout.sections, storage=layout.storage, direct=self._direct
        )
        memory = transfer_for(torch.device("cpu"))
        buffers = []
        for sections, parts in zip(shard.sections, blocks.parts, strict=True):
            buffer = HostBuffer(memory.host_memory(sum(section.padded_nbytes for section in sections)))
            for target, part in zip(staged(buffer, sections), parts, strict=True):
                target.copy_(part)
            buffers.append(buffer)
        shard.write(buffers)
        self.new_files.append(shard.path)
        return shard

    def _path(self, layer_idx: int) -> Path:
        self._count += 1
        return self._folder / f"layer-{layer_idx:03d}-{self._count:06d}-{self._ending}.safetensors"


def _kinds(spec: LayerSpec) -> dict[str, StatesKind]:
    def kind(states: StateSpec) -> StatesKind:
        return StatesKind(num_heads=states.num_heads, head_dim=states.head_dim, dtype=dtype_name(states.dtype))

    return {"keys": kind(spec.keys), "values": kind(spec.values)}
