"""Models that are more than a stack of attention: linear layers between, an encoder before, images among the words."""

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    MllamaConfig,
    MllamaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

from nvme_cache import CacheMisuseError
from nvme_cache.arguments import cache_argument

from .conftest import assert_parity, exact_and_int8, prompt, stock_for, tiny_hybrid, tiny_t5, tokens


@exact_and_int8
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


def test_layers_are_fetched_ahead_across_linear_ones(make_cache, monkeypatch):
    model = tiny_hybrid()
    cache = make_cache(config=model.config, block_size=16)
    tokens(model, prompt(60), cache, max_new_tokens=3)
    fetches = []
    fetch = cache._pager.fetch
    monkeypatch.setattr(cache._pager, "fetch", lambda *args, **how: fetches.append(how["steal"]) or fetch(*args, **how))
    name, states = cache_argument(model), prompt(9)
    with torch.no_grad():
        for i in range(9):
            model(states[:, i : i + 1], **{name: cache})
    assert not any(fetches)  # none because its layer had to have it at once


def both_caches(paged, config):
    return EncoderDecoderCache(paged, DynamicCache(config=config))


@exact_and_int8
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_encoder_decoder(options, make_cache):
    model = tiny_t5()
    config = model.config.get_text_config(decoder=True)
    ours = both_caches(make_cache(config=config, block_size=8), config)
    answers = []
    for text in (prompt(20, 2), prompt(20, 2) + 1):
        stock = both_caches(stock_for(ours.self_attention_cache, config), config)
        expected = tokens(model, text, stock, **options)
        assert torch.equal(tokens(model, text, ours, **options), expected)
        answers.append(expected)
        ours.reset()
        if ours.cross_attention_cache.get_seq_length():  # in older versions upstream's own reset keeps the length
            ours.cross_attention_cache = DynamicCache(config=config)
    assert not torch.equal(*answers)


def test_another_input_without_a_reset_is_refused(make_cache):
    model = tiny_t5()
    config = model.config.get_text_config(decoder=True)
    cache = both_caches(make_cache(config=config, block_size=8), config)
    answer = tokens(model, prompt(20, 2), cache)
    with pytest.raises(CacheMisuseError, match=r"24 tokens of an earlier call.*reset\(\)"):
        tokens(model, prompt(20, 2) + 1, cache)
    with pytest.raises(CacheMisuseError, match=r"reset\(\)"):  # upstream would compute the whole answer once more
        tokens(model, prompt(20, 2), cache, decoder_input_ids=torch.cat([answer, prompt(3, 2)], dim=1))


@exact_and_int8
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
    name = cache_argument(model)

    def run(features, cache):
        with torch.no_grad():
            logits = [
                model(input_features=features, decoder_input_ids=prompt(1, 2), **{name: cache}, use_cache=True).logits
                for _ in range(30)
            ]
        return torch.stack(logits)

    ours = EncoderDecoderCache(make_cache(block_size=8), make_cache(block_size=8))
    for features in torch.randn(2, 2, 8, 100):
        stock = EncoderDecoderCache(stock_for(ours.self_attention_cache), stock_for(ours.cross_attention_cache))
        assert torch.equal(run(features, ours), run(features, stock))
        ours.reset()


@exact_and_int8
def test_images_among_the_words_in_one_call_after_another(make_cache):
    """The model itself remembers where an image put the positions, and looks at the cache to know when to use it."""
    torch.manual_seed(0)
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096, "pad_token_id": 0,
            "bos_token_id": 0, "eos_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 64,
              "fullatt_block_indexes": [1], "patch_size": 14, "spatial_merge_size": 1}  # fmt: skip
    image, start, end = 252, 254, 255
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=image, video_token_id=253,
                              vision_start_token_id=start, vision_end_token_id=end)  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None

    def run(make):
        results = []
        for height, width, after in ((4, 6, 10), (2, 2, 30)):
            shown = torch.tensor([[start] + [image] * height * width + [end]])
            ids = torch.cat([prompt(20), shown, prompt(after) + 1], dim=1)
            pixels = torch.randn(height * width, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(height))
            inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
            cache = make()
            results.append(tokens(model, ids, cache, mm_token_type_ids=(ids == image).long(), **inputs))
            assert cache.get_seq_length() == results[-1].shape[1] - 1
            results.append(tokens(model, torch.cat([results[-1], prompt(5)], dim=1), cache))
            results.append(model.model.rope_deltas)
        return results

    cache = make_cache(config=config.get_text_config(), block_size=16)
    ours = run(lambda: make_cache(config=config.get_text_config(), block_size=16))
    assert all(map(torch.equal, ours, run(lambda: stock_for(cache, config))))
    assert not torch.equal(ours[2], ours[5])


@exact_and_int8
@pytest.mark.parametrize("what", ["all tokens", "new tokens and a mask over all"])
def test_turns_after_an_image_that_cross_attention_holds(what, make_cache):
    """Some layers hold the image, which is longer than the text: the text's length is the one that counts."""
    torch.manual_seed(0)
    text = MllamaTextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, cross_attention_layers=[1], max_position_embeddings=4096, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    vision = MllamaVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_global_layers=1, attention_heads=2,
        vision_output_dim=64, image_size=56, patch_size=14, max_num_tiles=4, intermediate_layers_indices=[0],
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1], [2, 2]],
    )  # fmt: skip
    model = MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=vision, image_token_index=255))
    model.eval()
    for name, parameter in model.named_parameters():
        if "gate" in name:
            parameter.data.fill_(1.0)  # else nothing of the image comes through
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = prompt(20)
    ids[:, 1] = 255
    image = {
        "pixel_values": torch.randn(1, 1, 4, 3, 56, 56),
        "aspect_ratio_ids": torch.full((1, 1), 4),
        "aspect_ratio_mask": torch.ones(1, 1, 4, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 20, 1, 4, dtype=torch.long),
    }
    answers = []
    paged = make_cache(config=text, block_size=16)
    for cache in (paged, stock_for(paged, text)):
        first = tokens(model, ids, cache, max_new_tokens=6, **image)
        if what == "all tokens":
            second = tokens(model, torch.cat([first, prompt(6)], dim=1), cache, max_new_tokens=6)
        else:
            new, mask = torch.cat([first[:, -1:], prompt(6)], dim=1), torch.ones(1, 32, dtype=torch.long)
            second = tokens(model, new, cache, attention_mask=mask, max_new_tokens=6)
        answers.append((first, second, [layer.get_seq_length() for layer in cache.layers]))
    (*ours, our_lengths), (*stock, stock_lengths) = answers
    assert all(map(torch.equal, ours, stock))
    assert our_lengths == stock_lengths
    assert our_lengths[1] > our_lengths[0]
