"""Uses that transformers lets pass: each ends in a typed error or in the right text, never in wrong text."""

import contextlib
import copy
import itertools
import pickle  # to see that it is refused
import threading

import pytest
import torch
from transformers import LlamaForCausalLM

from nvme_cache import CacheMisuseError
from nvme_cache.arguments import cache_argument

from .conftest import exact_and_int8, prompt, stock_for, tiny_model, tiny_t5, tokens


@contextlib.contextmanager
def interrupted(model, error=KeyboardInterrupt, forward=1):
    """The `forward`-th forward inside ends with `error` when it reaches the third layer."""
    count = itertools.count(1)

    def interrupt(*_):
        if next(count) == forward:
            raise error

    hook = model.model.layers[2].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(error):
            yield
    finally:
        hook.remove()


def stock_tokens(model, ids, cache, **options):
    """What `generate` makes of `ids` with transformers' own cache in place of `cache`, when it is new."""
    return tokens(model, ids, stock_for(cache, model.config), **options)


@exact_and_int8
def test_another_prompt_on_a_full_cache(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    tokens(model, prompt(40), cache)
    for other in (prompt(90) + 1, prompt(40) + 1, prompt(7) + 1):
        with pytest.raises(CacheMisuseError, match=r"63 tokens of another prompt.*reset\(\)"):
            tokens(model, other, cache)
    cache.reset()
    assert torch.equal(tokens(model, prompt(90) + 1, cache), stock_tokens(model, prompt(90) + 1, cache))


HOW = {
    "greedy": {},
    "sampling several": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "in chunks": {"prefill_chunk_size": 7},
}


@exact_and_int8
@pytest.mark.parametrize("how", HOW)
def test_going_on_from_an_answer_that_was_changed(how, make_cache):
    """As a chat template does that renders an answer differently from how it was generated."""
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    stock = stock_for(cache, model.config)
    answered = tokens(model, prompt(40), cache, **HOW[how])
    assert torch.equal(tokens(model, prompt(40), stock, **HOW[how]), answered)
    longer = torch.cat([answered, prompt(5, len(answered))], dim=1)
    for changed in (40, 62):
        other = longer.clone()
        other[-1, changed] = (other[-1, changed] + 1) % 250
        with pytest.raises(CacheMisuseError, match="of another prompt"):
            tokens(model, other, cache)
    assert torch.equal(tokens(model, longer, cache), tokens(model, longer, stock))


@exact_and_int8
@pytest.mark.parametrize("length", [40, 30, 63])
def test_a_prompt_that_is_cached_already_is_stepped_back_into(length, make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    stock = stock_for(cache, model.config)
    again = tokens(model, prompt(40), cache)[:, :length]
    tokens(model, prompt(40), stock)
    stock.crop(length - 1 - 63)
    assert torch.equal(tokens(model, again, cache), tokens(model, again, stock))


def test_a_cached_prompt_that_a_sliding_layer_cannot_step_back_into(make_cache):
    model = tiny_model("gemma3")
    cache = make_cache(config=model.config, block_size=16)
    tokens(model, prompt(40), cache)
    with pytest.raises(CacheMisuseError, match="cannot step back"):
        tokens(model, prompt(40), cache)


def test_more_cached_than_passed_without_knowing_the_tokens(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    with torch.no_grad():
        model(prompt(40), **{cache_argument(model): cache})
    with pytest.raises(CacheMisuseError, match="holds 40 tokens, more than the 20 passed"):
        tokens(model, prompt(20), cache)


def test_new_tokens_with_a_mask_of_the_wrong_length(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    tokens(model, prompt(40), cache, max_new_tokens=5)
    with pytest.raises(CacheMisuseError, match="mask covers 60 tokens, but 44 are cached and 3 new"):
        tokens(model, prompt(3), cache, attention_mask=torch.ones(1, 60, dtype=torch.long))


def test_use_cache_false(make_cache):
    model = tiny_model()
    with pytest.raises(CacheMisuseError, match="use_cache=False"):
        tokens(model, prompt(40), make_cache(config=model.config), use_cache=False)


def test_a_plain_cache_on_an_encoder_decoder(make_cache):
    model = tiny_t5()
    with pytest.raises(CacheMisuseError, match="EncoderDecoderCache"):
        tokens(model, prompt(20), make_cache(config=model.config))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_a_warm_cache_is_not_expanded_by_itself(options, make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    with torch.no_grad():
        model(prompt(40), **{cache_argument(model): cache})
    with pytest.raises(CacheMisuseError, match="batch_repeat_interleave"):
        tokens(model, torch.cat([prompt(40), prompt(3)], dim=1), cache, **options)


def test_another_model(make_cache):
    cache = make_cache(block_size=16)
    tokens(tiny_model(), prompt(20), cache, max_new_tokens=2)
    other = tiny_model(num_key_value_heads=4)
    with (
        torch.no_grad(),
        pytest.raises(CacheMisuseError, match=r"\(1, 2, 16, 2, 16\) but was given \(1, 4, 16, 4, 16\)"),
    ):
        other(prompt(3), **{cache_argument(other): cache})


@exact_and_int8
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_forward_is_taken_back(family, error, make_cache):
    model = tiny_model(family)
    cache = make_cache(config=model.config, block_size=16)
    name = cache_argument(model)
    expected, stock = [], stock_for(cache, model.config)
    with torch.no_grad():
        for length in (40, 20, 1):
            expected.append(model(prompt(length), **{name: stock}).logits)
        assert torch.equal(model(prompt(40), **{name: cache}).logits, expected[0])

        with interrupted(model, error):
            model(prompt(20), **{name: cache})
        with pytest.raises(CacheMisuseError, match=r"interrupted.*call the model again"):
            model(prompt(20), **{name: cache})
        assert torch.equal(model(prompt(20), **{name: cache}).logits, expected[1])
        assert torch.equal(model(prompt(1), **{name: cache}).logits, expected[2])


@exact_and_int8
def test_an_interrupted_generate_may_simply_be_called_again(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    with interrupted(model, forward=8):
        tokens(model, prompt(40), cache)
    stock = stock_for(cache, model.config)
    tokens(model, prompt(40), stock, max_new_tokens=7)
    stock.crop(39 - 46)  # ours steps back by itself, to compute the prompt's last token again
    assert torch.equal(tokens(model, prompt(40), cache), tokens(model, prompt(40), stock))


@exact_and_int8
def test_tokens_of_an_interrupted_generate_are_not_held_against_later_ones(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    with interrupted(model, forward=8):
        tokens(model, prompt(40), cache)
    cached = cache.layers[3].get_seq_length()
    stock = stock_for(cache, model.config)
    answered = tokens(model, prompt(40), stock, max_new_tokens=7)
    assert stock.get_seq_length() == cached == 46
    whole = torch.cat([answered[:, :cached], prompt(5) + 1], dim=1)
    with torch.no_grad():
        with pytest.raises(CacheMisuseError, match="call the model again"):
            model(whole[:, cached:], **{cache_argument(model): cache})
        model(whole[:, cached:], **{cache_argument(model): cache})
        model(whole[:, cached:], **{cache_argument(model): stock})
    longer = torch.cat([whole, prompt(3)], dim=1)
    assert torch.equal(tokens(model, longer, cache), tokens(model, longer, stock))


@exact_and_int8
def test_a_first_forward_that_was_interrupted(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    with interrupted(model):
        tokens(model, prompt(40), cache)
    with pytest.raises(CacheMisuseError, match=r"first forward was interrupted.*reset\(\)"):
        tokens(model, prompt(40), cache)
    cache.reset()
    assert torch.equal(tokens(model, prompt(40), cache), stock_tokens(model, prompt(40), cache))


def test_two_threads_at_once(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    results, barrier = [], threading.Barrier(2)

    def run():
        barrier.wait()
        try:
            results.append(tokens(model, prompt(40), cache, max_new_tokens=60))
        except CacheMisuseError:
            results.append(None)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = stock_tokens(model, prompt(40), cache, max_new_tokens=60)
    assert len(results) == 2
    assert any(result is None for result in results)
    assert all(result is None or torch.equal(result, expected) for result in results)


def test_a_generate_that_begins_between_another_threads_steps(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    paused, go_on = threading.Event(), threading.Event()
    outcome = []

    def pause(step, *_):
        if cache.get_seq_length() > 50:
            paused.set()
            go_on.wait()

    hook = model.register_forward_pre_hook(pause)
    thread = threading.Thread(target=lambda: outcome.append(tokens(model, prompt(40), cache)))
    thread.start()
    paused.wait()
    hook.remove()
    with pytest.raises(CacheMisuseError, match="another thread"):
        tokens(model, prompt(40), cache)
    go_on.set()
    thread.join()
    assert torch.equal(outcome[0], stock_tokens(model, prompt(40), cache))


@pytest.mark.parametrize("which", ["cache", "layer"])
def test_pickling_is_refused_with_the_remedy(which, make_cache):
    cache = make_cache(config=tiny_model().config)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(cache if which == "cache" else cache.layers[0])


@exact_and_int8
def test_a_copy_outlives_the_original_and_the_other_way_round(make_cache):
    model = tiny_model()
    for close_original in (True, False):
        cache = make_cache(config=model.config, block_size=16)
        stock = stock_for(cache, model.config)
        with torch.no_grad():
            model(prompt(70), **{cache_argument(model): cache})
            model(prompt(70), **{cache_argument(model): stock})
        copied = copy.deepcopy(cache)
        assert copied.offload_path == cache.offload_path  # the blocks are shared, not copied
        assert copied._pager.meter.written_bytes == 0
        kept, closed = (copied, cache) if close_original else (cache, copied)
        closed.close()
        whole = torch.cat([prompt(70), prompt(5)], dim=1)
        assert torch.equal(tokens(model, whole, kept), tokens(model, whole, stock))
        kept.close()
    assert not list(cache.offload_path.parent.iterdir())


def test_keys_assigned_without_values(make_cache):
    cache = make_cache(block_size=16)
    cache.update(*torch.randn(2, 1, 2, 40, 16), 0)
    cache.layers[0].keys = torch.zeros(1, 2, 5, 16)
    with pytest.raises(CacheMisuseError, match="assign both"):
        cache.update(*torch.randn(2, 1, 2, 1, 16), 0)


def test_positive_crop(make_cache):
    cache = make_cache(block_size=16)
    cache.update(*torch.randn(2, 1, 2, 40, 16), 0)
    with pytest.raises(ValueError, match=r"crop\(5\)"):
        cache.crop(5)


def test_linear_models_without_a_config(make_cache):
    with pytest.raises(CacheMisuseError, match=r"config=model\.config"):
        make_cache().update_conv_state(torch.zeros(1, 4, 4), 2)


def test_new_tokens_with_a_mask_over_all_on_sliding_layers_alone(make_cache):
    model = tiny_model("mistral")
    ours = make_cache(config=model.config, block_size=16)
    for cache in (ours, stock_for(ours, model.config)):
        first = tokens(model, prompt(20), cache, max_new_tokens=6)
        new = torch.cat([first[:, -1:], prompt(4)], dim=1)
        mask = torch.ones(1, first.shape[1] + 4, dtype=torch.long)
        answer = tokens(model, new, cache, attention_mask=mask, max_new_tokens=6)
        whole = stock_tokens(model, torch.cat([first, prompt(4)], dim=1), ours, max_new_tokens=6)
        assert torch.equal(answer[:, 5:], whole[:, 30:])


class OwnPreparation(LlamaForCausalLM):
    def _prepare_cache_for_generation(self, *args, **kwargs):
        return super()._prepare_cache_for_generation(*args, **kwargs)


def test_a_model_that_prepares_its_cache_itself_is_guarded_too(make_cache):
    model = tiny_model()
    own = OwnPreparation(model.config).eval()
    own.load_state_dict(model.state_dict())
    own.generation_config = model.generation_config
    cache = make_cache(config=model.config, block_size=16)
    tokens(own, prompt(40), cache)
    with pytest.raises(CacheMisuseError, match="of another prompt"):
        tokens(own, prompt(70) + 1, cache)


@exact_and_int8
def test_a_decoding_function_of_the_callers_own_may_go_on_from_a_full_cache(make_cache):
    model = tiny_model()

    def decode(model, input_ids, **kwargs):
        cache = kwargs[cache_argument(model)]
        for _ in range(5):
            held = {cache_argument(model): cache}
            logits = model(input_ids[:, -1:], **held).logits
            input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], dim=1)
        return input_ids

    ours, answers = make_cache(config=model.config, block_size=16), []
    for cache in (ours, stock_for(ours, model.config)):
        with torch.no_grad():
            model(prompt(40), **{cache_argument(model): cache})
        answers.append(tokens(model, prompt(40), cache, custom_generate=decode))
        assert cache.get_seq_length() == 45
    assert torch.equal(*answers)


@exact_and_int8
def test_cropping_to_a_length_after_an_interrupt(make_cache):
    """The number of tokens to remove is counted from a length that has the broken forward in it."""
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    stock = stock_for(cache, model.config)
    ids, held = prompt(30), {cache_argument(model): cache}
    with torch.no_grad():
        for either in (cache, stock):
            model(ids[:, :20], **{cache_argument(model): either})
            model(ids[:, 20:21], **{cache_argument(model): either})
            either.crop(20 - either.get_seq_length())
        with interrupted(model):
            model(ids[:, 20:26], **held)
        cache.crop(20 - cache.get_seq_length())
        assert cache.get_seq_length() == 20
        logits = model(ids[:, 20:], **held).logits
        assert torch.equal(logits, model(ids[:, 20:], **{cache_argument(model): stock}).logits)


def test_a_copy_of_a_cache_whose_forward_was_interrupted(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    tokens(model, prompt(40), cache)
    with torch.no_grad(), interrupted(model):
        model(prompt(3), **{cache_argument(model): cache})
    copied = copy.deepcopy(cache)
    assert [layer.get_seq_length() for layer in copied.layers] == [63] * 4
    copied.close()


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}], ids=str)
@pytest.mark.parametrize("held", [1, 60, 89, 98])
def test_no_token_is_held_twice_where_a_filled_cache_is_not_looked_at(options, held, make_cache):
    """transformers gives a model the whole prompt with drafted candidates, and before 5.24 also with chunks."""
    model = tiny_model()
    ids = prompt(99)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    cache = make_cache(config=model.config, block_size=16)
    with torch.no_grad():
        model(ids[:, :held], **{cache_argument(model): cache}, use_cache=True)
    output = model.generate(ids, max_new_tokens=20, do_sample=False, **options, **{cache_argument(model): cache})
    assert torch.equal(output, expected)
    assert cache.get_seq_length() == 118
