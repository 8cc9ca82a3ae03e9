"""What others put around a model: accelerate's hooks."""

import torch
from transformers import DynamicCache

from .conftest import prompt, tiny_model, tokens


def test_weights_offloaded_by_accelerate(make_cache):
    from accelerate import cpu_offload

    model = tiny_model()
    expected = tokens(model, prompt(60), DynamicCache(config=model.config))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(tokens(model, prompt(60), make_cache(config=model.config, block_size=16)), expected)
