"""Random models: tiny ones of several kinds, and one shaped like Llama-3.1-8B."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from .run import GIB, Device

_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
_EIGHT_B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_EIGHT_B_LAYER_BYTES = 440 << 20  # weights of one layer in bf16
_EIGHT_B_REST_BYTES = 2 * GIB  # embeddings and head


@dataclass(frozen=True, slots=True)
class Tiny:
    """A tiny model: family, dtype, key-value heads out of four, head size."""

    family: str
    dtype: torch.dtype
    num_key_value_heads: int
    head_dim: int

    def __str__(self) -> str:
        kind = {1: "MQA", 2: "GQA", 4: "MHA"}[self.num_key_value_heads]
        return f"{self.family} {kind} {self.head_dim} {str(self.dtype).removeprefix('torch.')}"

    def build(self, device: Device, attention: str) -> PreTrainedModel:
        """The model with random weights, the same every time."""
        model_class, config_class, extra = _FAMILIES[self.family]
        config = config_class(
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=256,
            max_position_embeddings=4096,
            attn_implementation=attention,
            **extra,
        )
        torch.manual_seed(0)
        model = model_class(config).eval().to(self.dtype).to(device.torch)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model


TINY = (
    Tiny("llama", torch.bfloat16, 2, 128),
    Tiny("qwen3", torch.float32, 2, 64),
    Tiny("mistral", torch.bfloat16, 4, 64),
    Tiny("gemma3", torch.float32, 4, 128),
    Tiny("llama", torch.float32, 4, 64),
    Tiny("qwen3", torch.bfloat16, 4, 128),
    Tiny("mistral", torch.float32, 2, 128),
    Tiny("gemma3", torch.bfloat16, 2, 64),
)


def large(device: Device, attention: str, *, quick: bool) -> PreTrainedModel:
    """A Llama shaped like Llama-3.1-8B in bf16, with as many of its layers as half the device's memory holds."""
    layers = int((device.total_bytes() / 2 - _EIGHT_B_REST_BYTES) // _EIGHT_B_LAYER_BYTES)
    shape = _EIGHT_B | {"num_hidden_layers": max(2, min(layers, _EIGHT_B["num_hidden_layers"]))}
    if quick:
        shape |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 256}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(**shape, attn_implementation=attention)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device.torch):  # made where it will be: 16 GB need not cross
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
