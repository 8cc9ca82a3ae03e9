"""The attention function behind "nvme_streaming"."""

from typing import Any

import torch
from torch._compile import _disable_dynamo
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nvme_cache.handles import Handle, Streamed

from .masks import LazyMask
from .softmax import OnlineSoftmax


@_disable_dynamo  # graphs end here: compiled code could not wait for drives
def streaming_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that reads keys and values a segment at a time where `update` gave handles, as transformers calls it.

    Args:
        module: What attends.
        query: `[batch, num_attention_heads, q_length, head_dim]`.
        key: `[batch, num_key_value_heads, kv_length, head_dim]`: a handle, or a tensor.
        value: `[batch, num_key_value_heads, kv_length, value_dim]`, likewise.
        attention_mask: As `streaming_mask` gave it, or the caller's own, `[batch, 1 or heads, q_length, kv_length]`.
        dropout: Probability; with any, or with gradients, "sdpa" attends to tensors laid out whole.
        scaling: What scores are multiplied by; None for `head_dim ** -0.5`.
        is_causal: Whether, without a mask, queries see only what precedes them; None for what the module says.
        softcap: `scores = softcap * tanh(scores / softcap)`.
        s_aux: `[num_attention_heads]`, scores of attention sinks.
        position_bias: `[batch or 1, num_attention_heads, q_length, kv_length]`, added to scores.
        kwargs: What other implementations want.

    Returns:
        `[batch, q_length, num_attention_heads, value_dim]` of the query's dtype, and None for the weights.
    """
    streamed = _streamed(key, value)
    if streamed is None:
        key, value = (part.laid_out() if isinstance(part, Handle) else part for part in (key, value))
    differentiates = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    is_special = softcap is not None or s_aux is not None
    wants_stock = differentiates or dropout or (attention_mask is None and query.shape[2] > 1)
    if streamed is None and not is_special and wants_stock:
        mask = attention_mask.laid_out() if isinstance(attention_mask, LazyMask) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal, position_bias=position_bias, **kwargs
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    softmax = OnlineSoftmax(
        query,
        key.shape[1],
        query.shape[3] ** -0.5 if scaling is None else scaling,
        key.shape[2],
        mask=attention_mask,
        is_causal=is_causal,
        bias=position_bias,
        softcap=softcap,
    )
    if streamed is None:
        softmax.add(key, value, 0, None)
    else:
        streamed.read(softmax.add)
    return softmax.result(s_aux).to(query.dtype), None


def _streamed(key: torch.Tensor, value: torch.Tensor) -> Streamed | None:
    """What a pair of handles stands for; None if these are tensors, one of them at least."""
    if isinstance(key, Handle) and isinstance(value, Handle) and key.streamed is value.streamed:
        return key.streamed if (key.which, value.which) == (0, 1) else None
    return None
