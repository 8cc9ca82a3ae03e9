"""Random models and random keys and values: speed depends on shapes, not on what was learnt."""

import math
import time
from collections.abc import Iterator

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from nvme_cache.arguments import cache_argument

_NOISE_TOKENS = 4096
_TRIAL = 20  # multiplications


def smollm2_config(num_layers: int) -> LlamaConfig:
    """SmolLM2-135M's shape (30 layers there): 768 bytes of bf16 keys and values per token and layer."""
    return LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=1 << 18,
        tie_word_embeddings=True,
    )


def wide_config(num_layers: int) -> LlamaConfig:
    """Much to read and little to compute: 1 KiB of bf16 keys and values per token and layer."""
    return LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=1024,
        max_position_embeddings=1 << 18,
        tie_word_embeddings=True,
    )


def random_model(config: LlamaConfig) -> LlamaForCausalLM:
    """The same bf16 model of `config` in every process."""
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.eval()
    return model


def state_shape(config: LlamaConfig, length: int) -> tuple[int, int, int, int]:
    """Of keys, and of values: `(1, num_key_value_heads, length, head_dim)`."""
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    return 1, config.num_key_value_heads, length, config.head_dim


def token_bytes(config: LlamaConfig) -> int:
    """Bytes of bf16 keys and values of one token in one layer."""
    return 2 * math.prod(state_shape(config, 1)) * torch.bfloat16.itemsize


def random_states(config: LlamaConfig, start: int, end: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each layer's index with random keys and values of tokens `start` to `end`, the same in every process.

    Yields:
        `layer_idx` and two bf16 tensors, `[1, num_key_value_heads, end - start, head_dim]` each.
    """
    generator = torch.Generator().manual_seed(start)
    shape = (2, *state_shape(config, min(end - start, _NOISE_TOKENS)))
    repeats = -(-(end - start) // _NOISE_TOKENS)
    for layer_idx in range(config.num_hidden_layers):
        noise = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        keys, values = noise.repeat(1, 1, 1, repeats, 1)[:, :, :, : end - start]
        yield layer_idx, keys.clone(), values.clone()  # files would else hold the memory of both


@torch.no_grad()
def fill(cache: DynamicCache, config: LlamaConfig, start: int, end: int) -> None:
    """Puts random tokens `start` to `end` into every layer, as a prompt would."""
    for layer_idx, keys, values in random_states(config, start, end):
        cache.update(keys, values, layer_idx)


@torch.no_grad()
def forward(model: LlamaForCausalLM, cache: DynamicCache, ids: torch.Tensor, position: int) -> torch.Tensor:
    """Runs the tokens `ids`, `[1, length]`, from `position` on. Returns the last one's logits, `[1, 1, vocabulary]`.

    The position is given because not every cache compared can tell how long it is.
    """
    positions = torch.arange(position, position + ids.shape[1]).unsqueeze(0)
    options = {cache_argument(model): cache}
    output = model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **options)
    logits: torch.Tensor = output.logits
    return logits


class MatrixWork:
    """An amount of real torch work that can be made to last."""

    def __init__(self) -> None:
        self._left, self._right, self._product = (torch.randn(192, 192) for _ in range(3))

    def __call__(self, count: int) -> None:
        """Multiplies `count` times."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._product)

    def count_for(self, seconds: float) -> int:
        """How many multiplications take about `seconds` when nothing else runs."""

        def trial_s() -> float:
            began = time.perf_counter()
            self(_TRIAL)
            return time.perf_counter() - began

        return max(1, round(seconds / min(trial_s() for _ in range(10)) * _TRIAL))
