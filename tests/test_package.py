"""The package's face: public names, cheap import, one-way imports, small modules, and what it relies on upstream."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

import nvme_cache

PACKAGE = Path(nvme_cache.__file__).parent
LEVELS = [
    {"cgroup", "errors", "io", "placement", "states"},
    {"units", "stand_in"},
    {"arguments", "guards", "quantization", "transfer"},
    {"buffers", "footprint", "meter", "threads"},
    {"drive", "shards", "tax"},
    {"blocks", "store"},
    {"slots", "spill", "history", "machine", "segments", "prefill"},
    {"fetch", "estimate", "handles"},
    {"seal", "attention"},
    {"pager"},
    {"laid_out", "feed"},
    {"layers", "resident"},
    {"report", "estimate_table", "sweep", "snapshots"},
    {"streaming"},
    {"cache"},
    {"reuse"},
    {"integration"},
    {"demo", "bench"},
    {"doctor"},
    {"cli"},
]


def test_public_names_are_complete_and_sorted():
    assert nvme_cache.__all__ == sorted(nvme_cache.__all__)
    submodules = {path.stem for path in PACKAGE.iterdir()}
    defined = {name for name in vars(nvme_cache) if name[0] != "_" and name not in submodules}
    assert defined == set(nvme_cache.__all__)


def test_importing_starts_nothing():
    """No accelerator start-up, no quantization library, no compiler, no folder."""
    program = """
import sys, threading, nvme_cache, nvme_cache.tax, torch
assert threading.active_count() == 1, threading.enumerate()
loaded = [name for name in ("optimum.quanto", "matplotlib", "typer", "torch._dynamo") if name in sys.modules]
assert not loaded, loaded
assert not torch.cuda.is_initialized()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_imports_point_one_way():
    level = {name: rank for rank, names in enumerate(LEVELS) for name in names}
    for path in PACKAGE.glob("*.py"):
        if path.stem == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                for name in names:
                    assert level[name] < level[path.stem], f"{path.stem} imports {name}"


def test_modules_fit_in_the_head():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path.name


def test_only_one_module_knows_streams():
    for path in PACKAGE.glob("*.py"):
        if path.stem not in ("transfer", "demo"):
            text = path.read_text()
            for word in ("torch.Stream", "torch.accelerator", "torch.cuda", "current_stream", "non_blocking"):
                assert word not in text, f"{path.name}: {word}"


class TestUpstream:
    """Names and signatures of transformers and torch that the package relies on; one place to look when they move."""

    def test_cache_is_built_from_layers(self):
        assert "layers" in inspect.signature(Cache.__init__).parameters
        assert list(inspect.signature(DynamicCache.__init__).parameters)[1:3] == ["ddp_cache_data", "config"]
        assert Cache(layers=[]).layers == []

    def test_full_attention_is_a_dynamic_layer_and_nothing_else_is(self):
        from .conftest import tiny_model

        kinds = [type(layer) is DynamicLayer for layer in DynamicCache(config=tiny_model("gemma3").config).layers]
        assert kinds == [False, True, False, True]
        assert issubclass(DynamicLayer, CacheLayerMixin)

    @pytest.mark.parametrize("name", ["update", "lazy_initialization", "get_mask_sizes", "get_seq_length"])
    def test_layer_methods(self, name):
        ours = inspect.signature(getattr(nvme_cache.cache.NVMeLayer, name)).parameters
        theirs = inspect.signature(getattr(DynamicLayer, name)).parameters
        assert [p for p in theirs if p not in ("args", "kwargs")] == [p for p in ours if p not in ("args", "kwargs")]

    def test_every_public_method_of_a_dynamic_layer_is_ours_too(self):
        public = {name for name in dir(DynamicLayer) if not name.startswith("_")}
        assert public <= set(dir(nvme_cache.cache.NVMeLayer))

    def test_encoder_decoder_crops_dynamic_caches_only(self):
        assert issubclass(nvme_cache.OffloadedNVMeCache, DynamicCache)
        assert EncoderDecoderCache(DynamicCache(), DynamicCache()).self_attention_cache is not None

    def test_storages_count_their_references(self):
        storage = torch.zeros(4).untyped_storage()
        alone = torch._C._storage_Use_Count(storage._cdata)
        view = torch.tensor([], dtype=torch.uint8).set_(storage)
        assert torch._C._storage_Use_Count(storage._cdata) == alone + 1
        del view

    def test_functions_can_be_kept_out_of_graphs_without_importing_the_compiler(self):
        assert torch._compile._disable_dynamo(lambda: 1)() == 1

    def test_streams_and_events(self):
        assert {"wait_event", "__enter__", "__exit__"} <= set(dir(torch.Stream))
        assert {"record", "synchronize"} <= set(dir(torch.Event))
        assert callable(torch.accelerator.current_stream)
