"""Shared by the suite: tiny models, a folder for shards, and generation with every bit kept."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from nvme_cache import OffloadedNVMeCache, QuantizationConfig
from nvme_cache.arguments import cache_argument
from nvme_cache.attention import STREAMING

from .fake_quantized import FakeQuantizedCache

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}


def tiny_model(family="llama", dtype=torch.float32, **overrides):
    model_class, config_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**(SIZES | extra | overrides))).eval().to(dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def tiny_hybrid():
    """Linear attention and full attention by turns."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=32, head_dim=16,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        vocab_size=256, layer_types=["linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def tiny_t5():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
    # Weights of the usual size would answer everything with zeros.
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, initializer_factor=5.0)).eval()
    model.generation_config.eos_token_id = None
    return model


class Attention(nn.Module):
    """What a cache sees of a model: a module with a config, which updates a layer."""

    def __init__(self, cache, layer_idx=0):
        super().__init__()
        self.config = LlamaConfig(attn_implementation=STREAMING)
        self.cache, self.layer_idx = cache, layer_idx

    def forward(self, keys, values):
        return self.cache.update(keys, values, self.layer_idx)


def prompt(length, rows=1):
    return torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(1))


def tokens(model, ids, cache, **options):
    """The sequences that `generate` makes of `ids` with `cache`."""
    options = {"max_new_tokens": 24, "do_sample": False} | options
    torch.manual_seed(5)
    return model.generate(ids, **{cache_argument(model): cache}, **options)


def tiers(mixed_bytes):
    """Budgets by where blocks end up; in "mixed" that many bytes on the device, twice as many on the host."""
    return {
        "nvme": {},
        "host": {"host_budget": 1 << 30},
        "device": {"device_budget": 1 << 30},
        "mixed": {"device_budget": mixed_bytes, "host_budget": 2 * mixed_bytes},
    }


# How sealed blocks are stored: `quantization` of every cache that `make_cache` makes unless told otherwise.
MIXED = QuantizationConfig(key="int8", value="int4", sink_tokens=3)
exact_and_int8 = pytest.mark.parametrize("quantization", [None, "int8"], ids=["exact", "int8"])
exact_int8_and_mixed = pytest.mark.parametrize("quantization", [None, "int8", MIXED], ids=["exact", "int8", "mixed"])


def stock_for(cache, config=None):
    """transformers' own cache, with what `cache` stores quantized replaced by what quanto makes of it."""
    quantization = cache._pager._sealer.quantization
    if quantization is None:
        return DynamicCache(config=config)
    return FakeQuantizedCache(config, cache._pager.block_size, quantization)


class Pair:
    """Ours on the devices given, in turn, and transformers' cache on the host, given the same tokens layer after layer;
    what comes back must be the same.
    """

    def __init__(self, cache, num_layers=4, devices=("cpu",)):
        self.ours, self.stock = cache, stock_for(cache)
        self.devices = [torch.device(devices[layer_idx % len(devices)]) for layer_idx in range(num_layers)]

    @torch.no_grad()  # else what comes back is a copy
    def forward(self, length, batch_size=1, order=None):
        for layer_idx in order or range(len(self.devices)):
            device = self.devices[layer_idx]
            new = torch.randn(2, batch_size, 2, length, 16)
            expected = self.stock.update(*new.clone(), layer_idx)
            for ours, part in zip(self.ours.update(*new.to(device), layer_idx), expected, strict=True):
                assert ours.device == device
                assert torch.equal(ours.cpu(), part)


@dataclass
class Generated:
    tokens: torch.Tensor
    logits: torch.Tensor


def generate(model, cache, prompt_length, batch_size=1, new_tokens=24, **options):
    """Greedy generation from a fixed random prompt; batches are left-padded by different amounts."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 250, (batch_size, prompt_length), generator=generator).to(model.device)
    mask = torch.ones_like(ids)
    for row in range(1, batch_size):
        padding = min(2 * row + 1, prompt_length - 1)
        ids[row, :padding], mask[row, :padding] = 0, 0
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{cache_argument(model): cache},
        **options,
    )
    return Generated(output.sequences, torch.stack(output.logits))


def assert_same(ours: Generated, stock: Generated):
    assert torch.equal(ours.tokens, stock.tokens)
    assert torch.equal(ours.logits, stock.logits)


def assert_parity(model, cache, *args, **options):
    """The same tokens and the same logits, bit for bit, as with transformers' own cache."""
    stock = stock_for(cache, model.config)
    assert_same(generate(model, cache, *args, **options), generate(model, stock, *args, **options))


@pytest.fixture
def offload_dir(tmp_path) -> Path:
    folder = tmp_path / "offload"
    folder.mkdir()
    return folder


@pytest.fixture
def quantization():
    """How `make_cache` stores blocks: as they are, unless a test is parametrized with something else."""


@pytest.fixture
def make_cache(offload_dir, quantization):
    """Caches with everything on NVMe and fewer slots than layers unless told otherwise; closed, they leave nothing."""
    usual = {"device_budget": 0, "host_budget": 0, "prefetch_depth": 2, "quantization": quantization}
    caches = []

    def make(**options) -> OffloadedNVMeCache:
        caches.append(OffloadedNVMeCache(**{"offload_dir": offload_dir} | usual | options))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()
    assert list(offload_dir.iterdir()) == []
