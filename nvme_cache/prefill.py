"""How long the chunks of a prompt should be where each reads what is cached before it from the drive once."""

import math
from dataclasses import dataclass

from transformers import PreTrainedConfig

from .footprint import Footprint
from .placement import BLOCK_SIZE
from .quantization import parse_quantization

_FLOPS_PER_PAIR = 4  # of a query and a key, per number in a head: multiply and add, for scores and for values
_MEMORY_SHARE = 4  # one part in so many of what is free may go to a chunk's activations


@dataclass(frozen=True, slots=True)
class Chunk:
    """Advice for `generate(prefill_chunk_size=...)` with streaming attention.

    Attributes:
        tokens: Tokens of every batch row in a chunk, whole blocks.
        read_over_attend: How long reading the past takes, over attending to it; 1 or less is hidden.
    """

    tokens: int
    read_over_attend: float


def advised_chunk(
    footprint: Footprint,
    config: PreTrainedConfig,
    *,
    nvme_bytes_per_s: float,
    flops_per_s: float,
    memory_bytes: int | None = None,
    batch_size: int = 1,
    quantization: str | None = None,
) -> Chunk:
    """The shortest chunk whose reading hides behind its attention, if memory has room for its activations.

    A chunk of `c` tokens reads each earlier token of a layer once, `token_bytes / nvme_bytes_per_s` seconds, and
    attends to it `c` times, `4 * num_attention_heads * head_dim / flops_per_s` seconds each: reading is hidden from

        c = token_bytes * flops_per_s / (4 * num_attention_heads * head_dim * nvme_bytes_per_s)

    on, however long the past is. Every batch row attends to its own.

    Args:
        footprint: What the cache holds.
        config: The model's.
        nvme_bytes_per_s: What the drive reads.
        flops_per_s: What the device computes in matrix products.
        memory_bytes: Free where the model computes; None if unknown.
        batch_size: Batch rows.
        quantization: How blocks are stored.
    """
    text = config.get_text_config(decoder=True)
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    token_bytes = footprint.stored_token_bytes(parse_quantization(quantization)) / max(1, len(footprint.paged))
    hidden = token_bytes * flops_per_s / (_FLOPS_PER_PAIR * width * nvme_bytes_per_s)
    blocks = math.ceil(hidden / BLOCK_SIZE)
    if memory_bytes is not None:
        widest = 4 * text.hidden_size + 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
        activations = footprint.dtype.itemsize * (widest + 2 * width) * batch_size
        blocks = min(blocks, int(memory_bytes / _MEMORY_SHARE / activations / BLOCK_SIZE))
    tokens = max(1, blocks) * BLOCK_SIZE
    return Chunk(tokens, hidden / tokens)
