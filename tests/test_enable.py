"""`enable`: a fresh cache for every generate of a model, pipelines included, undone exactly."""

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, pipeline

import nvme_cache
from nvme_cache import ConfigurationError, OffloadedNVMeCache
from nvme_cache.arguments import cache_argument

from .conftest import FAMILIES, prompt, stock_for, tiny_model, tiny_t5
from .test_cli import model_folder  # noqa: F401  (a fixture)

OPTIONS = {"block_size": 16, "host_budget": 0, "prefetch_depth": 1}


@pytest.fixture
def made(monkeypatch):
    """Every cache made while the test runs."""
    caches = []
    original = OffloadedNVMeCache.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(OffloadedNVMeCache, "__init__", remember)
    return caches


def sealed(cache):
    return cache._pager.meter.sealed_bytes


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=24, do_sample=False, **options)


@pytest.mark.parametrize("as_context", [True, False])
def test_every_generate_gets_a_cache_of_its_own_closed_when_it_ends(as_context, offload_dir, made):
    model = tiny_model()
    expected = [generate(model, prompt(60) + i) for i in range(3)]
    before = dict(vars(model))
    switch = nvme_cache.enable(model, offload_dir=offload_dir, **OPTIONS)
    made.clear()
    if as_context:
        with switch:
            results = [generate(model, prompt(60) + i) for i in range(3)]
    else:
        results = [generate(model, prompt(60) + i) for i in range(3)]
        switch.disable()
        switch.disable()
    assert all(map(torch.equal, results, expected))
    assert len(made) == 3 and all(sealed(cache) > 0 for cache in made)
    assert list(offload_dir.iterdir()) == []
    assert vars(model) == before
    assert torch.equal(generate(model, prompt(60)), expected[0])
    assert len(made) == 3


def test_a_returned_cache_lives_as_long_as_the_output(offload_dir):
    model = tiny_model()
    with nvme_cache.enable(model, offload_dir=offload_dir, **OPTIONS):
        output = generate(model, prompt(60), return_dict_in_generate=True)
        cache = getattr(output, cache_argument(model))
        assert isinstance(cache, OffloadedNVMeCache)
        longer = torch.cat([output.sequences, prompt(5)], dim=1)
        expected = generate(model, longer, **{cache_argument(model): DynamicCache(config=model.config)})
        assert torch.equal(generate(model, longer, **{cache_argument(model): cache}), expected)
        assert list(offload_dir.iterdir())
        del output, cache
        assert list(offload_dir.iterdir()) == []


@pytest.mark.parametrize(
    "own", [{"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}, "cache"]
)
def test_what_the_caller_asks_for_wins(own, offload_dir, made):
    model = tiny_model()
    stock = DynamicCache(config=model.config)
    options = {cache_argument(model): stock} if own == "cache" else own
    with nvme_cache.enable(model, offload_dir=offload_dir, **OPTIONS):
        made.clear()
        assert torch.equal(generate(model, prompt(60), **options), generate(model, prompt(60), use_cache=False))
    assert not made
    assert stock.get_seq_length() == (83 if own == "cache" else 0)


def test_nested_switches_may_end_in_any_order(offload_dir, made):
    model = tiny_model()
    outer = nvme_cache.enable(model, offload_dir=offload_dir, block_size=16, host_budget=0)
    inner = nvme_cache.enable(model, offload_dir=offload_dir, block_size=32, host_budget=0)
    generate(model, prompt(60))
    assert made[-1]._pager.block_size == 32
    outer.disable()
    generate(model, prompt(60))
    assert made[-1]._pager.block_size == 32
    inner.disable()
    assert "generate" not in vars(model)


def test_a_copied_model_generates_with_its_own_weights(offload_dir):
    model = tiny_model()
    with nvme_cache.enable(model, offload_dir=offload_dir, **OPTIONS):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(-0.7)
        assert torch.equal(
            generate(copied, prompt(60)), type(copied).generate(copied, prompt(60), max_new_tokens=24, do_sample=False)
        )
        assert not torch.equal(generate(copied, prompt(60)), generate(model, prompt(60)))


class Wrapper(torch.nn.Module):
    """As wrappers for adapters are: it generates through the model inside, whose arguments it does not name."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def get_base_model(self):
        return self.model

    def forward(self, input_ids, **kwargs):
        return self.model(input_ids, **kwargs)

    def generate(self, *args, **kwargs):
        return self.model.generate(*args, **kwargs)


@pytest.mark.parametrize("wrap", [Wrapper, torch.compile])
def test_wrappers_are_refused_with_the_remedy(wrap, offload_dir):
    with pytest.raises(ConfigurationError, match="enable the one inside"):
        nvme_cache.enable(wrap(tiny_model()), offload_dir=offload_dir)


def test_an_error_inside_generate_closes_the_cache(offload_dir):
    model = tiny_model()

    def fail(*_):
        raise KeyboardInterrupt

    with nvme_cache.enable(model, offload_dir=offload_dir, **OPTIONS):
        model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompt(60))
        assert list(offload_dir.iterdir()) == []


def test_encoder_decoder_models_get_both_caches(offload_dir, made):
    model = tiny_t5()
    expected = generate(model, prompt(20, 2))
    with nvme_cache.enable(model, offload_dir=offload_dir, block_size=8, host_budget=0):
        assert torch.equal(generate(model, prompt(20, 2)), expected)
    assert sealed(made[-1]) > 0


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_the_caches_may_be_quantized(family, offload_dir, made):
    model = tiny_t5() if family == "t5" else tiny_model(family)
    with nvme_cache.enable(model, offload_dir=offload_dir, quantization="int8", block_size=8, host_budget=0):
        made.clear()
        answer = generate(model, prompt(20, 2))
    [cache] = made
    assert (sealed(cache) > 0) == (family != "mistral")  # whose layers are all sliding
    config = model.config.get_text_config(decoder=True)
    stock = stock_for(cache, config)
    if family == "t5":
        stock = EncoderDecoderCache(stock, DynamicCache(config=config))
    assert torch.equal(answer, generate(model, prompt(20, 2), **{cache_argument(model): stock}))


def test_wrong_options_fail_at_once(offload_dir):
    with pytest.raises(ConfigurationError, match="block_size"):
        nvme_cache.enable(tiny_model(), block_size=0)
    with pytest.raises(ConfigurationError, match="generates itself"):
        nvme_cache.enable(torch.nn.Linear(2, 2))
    model = tiny_model()
    model.generate = lambda *_: None
    with pytest.raises(ConfigurationError, match="generate of its own"):
        nvme_cache.enable(model, offload_dir=offload_dir)


TEXTS = ["All legislative Powers herein granted", "All legislative Powers", "The", "shall be vested in a Congress"]
CALLS = {
    "one text": (TEXTS[0], {}),
    "a list": (TEXTS, {}),
    "batches": (TEXTS, {"batch_size": 2}),
    "a chat": ([{"role": "user", "content": TEXTS[0]}], {}),
    "chats": ([[{"role": "user", "content": text}] for text in TEXTS], {}),
    "beams": (TEXTS, {"num_beams": 2}),
    "several answers": (TEXTS[0], {"num_return_sequences": 2, "num_beams": 2}),
}


class TestPipelines:
    """The documented way to use pipelines: over lists, in batches, chats, and called again and again."""

    @pytest.fixture
    def pipe(self, model_folder):  # noqa: F811
        pipe = pipeline("text-generation", model=str(model_folder), device="cpu")
        pipe.tokenizer.pad_token_id, pipe.tokenizer.padding_side = 0, "left"
        pipe.model.generation_config.eos_token_id = None
        return pipe

    @pytest.mark.parametrize("call", CALLS)
    def test_calls(self, call, pipe, offload_dir, made):
        inputs, options = CALLS[call]
        options = {"max_new_tokens": 12, "do_sample": False} | options
        expected = pipe(inputs, **options)
        with nvme_cache.enable(pipe.model, offload_dir=offload_dir, block_size=8, host_budget=0):
            made.clear()
            for _ in range(2):
                assert pipe(inputs, **options) == expected
        assert made and all(sealed(cache) for cache in made)
        assert list(offload_dir.iterdir()) == []

    def test_a_cache_passed_by_hand_never_gives_another_texts_answer(self, pipe, make_cache):
        cache = {cache_argument(pipe.model): make_cache(config=pipe.model.config, block_size=8)}
        options = {"max_new_tokens": 12, "do_sample": False}
        expected = pipe(TEXTS[0], **options)
        assert pipe(TEXTS[0], **options, **cache) == expected
        with pytest.raises(nvme_cache.CacheMisuseError, match=r"enable\(model\)"):
            pipe(TEXTS[3], **options, **cache)

    @pytest.mark.parametrize("rendered", ["m.content", "m.content | reverse"], ids=["as generated", "differently"])
    def test_a_chat_on_one_cache(self, rendered, pipe, make_cache):
        """Equals a chat without a cache as long as the template gives answers back as they were generated."""
        tokenizer = pipe.tokenizer
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ RENDERED if m.role == 'assistant' else m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        ).replace("RENDERED", rendered)
        letters = {i for i in range(256) if tokenizer.decode([i]).isalpha() and tokenizer.decode([i]).isascii()}
        options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": sorted(set(range(256)) - letters)}
        cache = {cache_argument(pipe.model): make_cache(config=pipe.model.config, block_size=8)}
        chat = [{"role": "user", "content": TEXTS[0]}]
        for turn in range(5):
            answered = pipe(chat, **options)[0]["generated_text"]
            if turn and rendered != "m.content":
                with pytest.raises(nvme_cache.CacheMisuseError, match="of another prompt"):
                    pipe(chat, **options, **cache)
                return
            assert pipe(chat, **options, **cache)[0]["generated_text"] == answered
            chat = [*answered, {"role": "user", "content": TEXTS[1]}]


def test_the_readmes_pipeline_example(model_folder, offload_dir, monkeypatch):  # noqa: F811
    """Runs the example as it stands, on a tiny model."""
    import re
    from pathlib import Path

    monkeypatch.setenv("NVME_CACHE_DIR", str(offload_dir))
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "pipeline(" in code]
    pipe = pipeline("text-generation", model=str(model_folder), device="cpu")
    documents = ["All legislative Powers herein granted", "The Congress shall assemble"]
    torch.manual_seed(3)
    expected = pipe(documents, max_new_tokens=200)
    torch.manual_seed(3)
    names = {"model": pipe.model, "tokenizer": pipe.tokenizer, "documents": documents}
    exec(example, names)
    assert names["answers"] == expected
    assert list(offload_dir.iterdir()) == []
