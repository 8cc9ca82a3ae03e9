"""The caches that are compared: stock in memory, ours on the drive, and the usual ways to keep layers in files."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig

from nvme_cache import OffloadedNVMeCache
from nvme_cache.states import States

from .models import token_bytes
from .resident import ResidentCache
from .site import drop_pages

STOCK, OURS, OURS_UNVERIFIED, OLLM = "DynamicCache", "nvme-cache", "nvme-cache, unverified", "ollm"
STREAMED, HALF_STREAMED = "nvme-cache, streaming", "nvme-cache, streaming, half in memory"
SAFETENSORS, TORCH_SAVE = "safetensors per layer", "torch.save per layer"
# Three layers in memory for all: what is left is the model's own work.
FREE, FREE_STREAMED = "a cache that costs nothing", "a cache that costs nothing, streaming"
ALL = (
    FREE, FREE_STREAMED, STOCK, HALF_STREAMED, STREAMED, OURS, OURS_UNVERIFIED, OLLM, SAFETENSORS, TORCH_SAVE
)  # fmt: skip
ATTENDS_STREAMING = (FREE_STREAMED, STREAMED, HALF_STREAMED)


class UnavailableError(Exception):
    """A contender that cannot run here; the message says why."""


class FilePerLayerCache(DynamicCache):
    """The prompt's keys and values in one file a layer, read whole at every step; newer tokens in memory.

    Args:
        config: Of the model.
        folder: Where the files go.
        save: Writes a layer's keys and values to a file.
        load: Reads them back.
    """

    def __init__(
        self, config: LlamaConfig, folder: Path, save: Callable[[States, Path], None], load: Callable[[Path], States]
    ) -> None:
        super().__init__(config=config)
        self._folder, self._save, self._load = folder, save, load
        self._newer: dict[int, States] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens and returns all there are, `[1, heads, length, head_dim]` each."""
        path = self._folder / f"layer-{layer_idx}"
        new = key_states, value_states
        if layer_idx not in self._newer:
            self._save(new, path)
            self._newer[layer_idx] = key_states[:, :, :0], value_states[:, :, :0]
            return new
        self._newer[layer_idx] = _concatenated(self._newer[layer_idx], new)
        return _concatenated(self._load(path), self._newer[layer_idx])


def make_cache(name: str, config: LlamaConfig, folder: Path, length: int, spare: int) -> DynamicCache:
    """The contender `name` for `length` tokens and room for `spare` more, whose files go to `folder`, an empty one.

    Raises:
        UnavailableError: it cannot run here.
    """
    if name in (FREE, FREE_STREAMED):
        return ResidentCache(config, 0, length + spare)
    if name in (OURS, OURS_UNVERIFIED, STREAMED, HALF_STREAMED):
        half = length * token_bytes(config) * config.num_hidden_layers // 2
        return OffloadedNVMeCache(
            config=config,
            offload_dir=folder,
            device_budget=0,
            host_budget=half if name == HALF_STREAMED else 0,
            verify=name != OURS_UNVERIFIED,
        )
    if name == OLLM:
        return _ollm_cache(folder)
    if name == SAFETENSORS:
        return FilePerLayerCache(config, folder, _save_safetensors, _load_safetensors)
    if name == TORCH_SAVE:
        return FilePerLayerCache(config, folder, torch.save, torch.load)
    return DynamicCache(config=config)


def make_cold(cache: DynamicCache, folder: Path, *, direct: bool) -> None:
    """Drops the contender's files from the page cache; ours are not in it where the drive is read directly."""
    if not (direct and isinstance(cache, OffloadedNVMeCache)):
        drop_pages(*(path for path in folder.rglob("*") if path.is_file()))


def _ollm_cache(folder: Path) -> DynamicCache:
    """Ollm's `KVCache`, from its file alone: importing ollm whole needs an accelerator's libraries."""
    package = importlib.util.find_spec("ollm")
    if package is None or package.origin is None:
        raise UnavailableError("ollm is not installed (pip install --no-deps ollm)")
    spec = importlib.util.spec_from_file_location("ollm_kvcache", Path(package.origin).with_name("kvcache.py"))
    if spec is None or spec.loader is None:
        raise UnavailableError("this ollm has no kvcache.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        cache: DynamicCache = module.KVCache(cache_dir=str(folder), device="cpu")
    except Exception as error:
        raise UnavailableError(f"this ollm's cache does not work here: {error!r}") from error
    update = cache.update

    def update_as_called_today(
        key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> States:
        return update(key_states, value_states, layer_idx)  # it takes no arguments that came later

    cache.update = update_as_called_today  # type: ignore[method-assign]
    return cache


def _save_safetensors(states: States, path: Path) -> None:
    save_file({"keys": states[0].contiguous(), "values": states[1].contiguous()}, path)


def _load_safetensors(path: Path) -> States:
    tensors = load_file(path)
    return tensors["keys"], tensors["values"]


def _concatenated(past: States, new: States) -> States:
    return torch.cat([past[0], new[0]], dim=-2), torch.cat([past[1], new[1]], dim=-2)
