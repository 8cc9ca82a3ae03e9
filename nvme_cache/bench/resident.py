"""A cache that costs nothing: its layers lie in memory ready for attention. What decoding takes with it is compute."""

from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from nvme_cache.buffers import shaped
from nvme_cache.drive import Drive
from nvme_cache.transfer import transfer_for

from .models import state_shape, token_bytes


class ResidentCache(DynamicCache):
    """Tokens to attend to, in buffers that the layers take turns with; new tokens are appended in place.

    Args:
        config: Of the model.
        length: Random tokens to begin with.
        spare: Room for more.
    """

    def __init__(self, config: LlamaConfig, length: int, spare: int) -> None:
        super().__init__(config=config)
        self._length = length
        self._last_layer = config.num_hidden_layers - 1
        shape = (2, *state_shape(config, length + spare))
        nbytes = (length + spare) * token_bytes(config)
        memory = transfer_for(torch.device("cpu")).host_memory
        # As many as the paged cache has slots: attention finds as little of them in the processor's caches.
        count = Drive().prefetch_depth(length * token_bytes(config)) + 1
        self._buffers = [shaped(memory(nbytes), shape, torch.bfloat16).normal_() for _ in range(count)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens and returns all there are, `[1, heads, length, head_dim]` each."""
        keys, values = self._buffers[layer_idx % len(self._buffers)]
        end = self._length + key_states.shape[2]
        keys[:, :, self._length : end].copy_(key_states)
        values[:, :, self._length : end].copy_(value_states)
        if layer_idx == self._last_layer:
            self._length = end
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens there are."""
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of what `update` will return."""
        return self._length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest `-tokens_to_remove` tokens."""
        self._length += tokens_to_remove
