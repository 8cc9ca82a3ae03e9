"""Models that are more than a stack of attention: linear layers between, an encoder before."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, WhisperConfig, WhisperForConditionalGeneration

from nvme_cache.integration import cache_argument

from .conftest import assert_parity, prompt, tiny_hybrid, tiny_t5, tokens


def test_hybrid_of_linear_and_full_attention_step_by_step(make_cache):
    model = tiny_hybrid()
    cache = make_cache(config=model.config, block_size=16)
    assert_parity(model, cache, 60, 2, new_tokens=64)
    assert cache.memory_usage()["nvme"] > 0
    for rows in (lambda c: c.batch_repeat_interleave(2), lambda c: c.batch_select_indices(torch.tensor([3, 0]))):
        rows(cache)
        for layer in cache.layers:
            states = layer.keys if hasattr(layer, "keys") else layer.recurrent_states[0]
            assert states.shape[0] == cache.layers[1].batch_size


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_encoder_decoder(options, make_cache):
    model = tiny_t5()
    config = model.config.get_text_config(decoder=True)
    stock = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    ours = EncoderDecoderCache(make_cache(config=config, block_size=8), DynamicCache(config=config))
    expected = tokens(model, prompt(20, 2), stock, **options)
    assert torch.equal(tokens(model, prompt(20, 2), ours, **options), expected)
    ours.reset()
    stock.reset()
    if stock.get_seq_length() == 0:  # in older versions upstream's own reset, which the cross-attention has, keeps it
        other = prompt(20, 2) + 1
        fresh = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        assert torch.equal(tokens(model, other, ours, **options), tokens(model, other, fresh, **options))


def test_cross_attention_may_be_paged_too(make_cache):
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=80,
        vocab_size=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    features = torch.randn(2, 8, 100)
    name = cache_argument(model)

    def run(cache):
        with torch.no_grad():
            logits = [
                model(input_features=features, decoder_input_ids=prompt(1, 2), **{name: cache}, use_cache=True).logits
                for _ in range(30)
            ]
        return torch.stack(logits)

    expected = run(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    assert torch.equal(run(EncoderDecoderCache(make_cache(block_size=8), make_cache(block_size=8))), expected)
