"""The attention function behind "nvme_streaming"."""

from contextlib import AbstractContextManager, nullcontext
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
        dropout: Probability; with any, or with gradients, tensors laid out whole are attended to as elsewhere.
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
    differentiates = torch.is_grad_enabled() and any(
        part is not None and part.requires_grad for part in (query, key, value, s_aux, position_bias)
    )
    if streamed is not None and (differentiates or dropout):
        (key, value), streamed = streamed.laid_out(), None  # this once
    elif streamed is None:
        key, value = (part.laid_out() if isinstance(part, Handle) else part for part in (key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if streamed is None and (differentiates or dropout or (attention_mask is None and query.shape[2] > 1)):
        mask = attention_mask.laid_out() if isinstance(attention_mask, LazyMask) else attention_mask
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, mask, dropout, scaling, is_causal, position_bias=position_bias, **kwargs
            )
        if differentiates or dropout:
            return _eagerly(query, key, value, mask, dropout, scaling, is_causal, softcap, s_aux, position_bias), None
    with _full_precision(query.device):
        softmax = OnlineSoftmax(
            query,
            key.shape[1],
            scaling,
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


def _eagerly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    is_causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """What autograd can go through, for models that "sdpa" cannot serve."""
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is None and is_causal and query.shape[2] > 1:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        mask = mask.tril(scores.shape[3] - scores.shape[2])
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        own = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], dim=-1)
    weights = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights[..., : key.shape[2]].to(value.dtype)
    weights = torch.nn.functional.dropout(weights, p=dropout)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def _full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Keeps autocast from rounding in between."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _streamed(key: torch.Tensor, value: torch.Tensor) -> Streamed | None:
    """What a pair of handles stands for; None if these are tensors, one of them at least."""
    if isinstance(key, Handle) and isinstance(value, Handle) and key.streamed is value.streamed:
        return key.streamed if (key.which, value.which) == (0, 1) else None
    return None
