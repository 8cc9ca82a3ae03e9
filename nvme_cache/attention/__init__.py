"""Attention that reads blocks as they arrive, registered with transformers under the name `STREAMING`.

Importing this makes the name known. The first cache does so too, and `enable(model, attention="streaming")`.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from nvme_cache.handles import STREAMING

from .masks import streaming_mask
from .streaming import streaming_attention

__all__ = ["STREAMING", "streaming_attention", "streaming_mask"]

AttentionInterface.register(STREAMING, streaming_attention)
AttentionMaskInterface.register(STREAMING, streaming_mask)
