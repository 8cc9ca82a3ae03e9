"""The benchmark of quality: its quick form on a tiny random model, whose figures can be worked out otherwise."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from benchmarks.quality import needles
from benchmarks.quality.__main__ import app
from benchmarks.quality.contenders import exact, ours, quanto
from benchmarks.quality.likelihood import buckets, compare, score
from benchmarks.quality.plan import QUICK
from benchmarks.quality.text import Text

from .conftest import tiny_model

BLOCK, SINKS = 256, 4
FORMATS = ["int8", "float8", "int8 keys, int4 values", "int4", "int2"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random model that reads bytes."""
    folder = tmp_path_factory.mktemp("model")
    # Weights of the usual size would attend to everything alike and notice no error in what they attend to.
    tiny_model(initializer_range=0.3).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def report(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "quality.json"
    command = ["--model", str(model_folder), "--quick", "--no-peers", "--out", str(out)]
    run = CliRunner().invoke(app, command, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert out.with_suffix(".png").stat().st_size > 0
    return json.loads(out.read_text())


def test_the_exact_cache_differs_from_itself_in_nothing(report):
    overall = report["windows"]["exact"]["overall"]
    assert overall["kl_divergence_nats"] == overall["perplexity_change_percent"] == 0
    assert overall["top1_agreement_percent"] == 100
    assert report["windows"]["exact"]["bits_per_element"] == 32


def test_its_perplexity_is_that_of_one_forward_without_a_cache(report, model_folder, tokenizer):
    ids = Text.tokenized(tokenizer).ids[None, : QUICK.window + 1]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model_folder)(ids[:, :-1], use_cache=False).logits[0]
    # The first scored prediction is made from one token more than the warm-up.
    nll = torch.nn.functional.cross_entropy(logits[QUICK.warm_up :], ids[0, QUICK.warm_up + 1 :])
    overall = report["windows"]["exact"]["overall"]
    assert overall["perplexity"] == pytest.approx(nll.exp().item(), rel=1e-4)
    assert overall["predictions"] == QUICK.window - QUICK.warm_up


def test_an_unquantized_cache_differs_in_nothing_and_scores_add_up(model_folder, tokenizer, tmp_path):
    model, window = AutoModelForCausalLM.from_pretrained(model_folder), 300
    (ids,) = Text.tokenized(tokenizer).windows(window, 1)
    paged = ours("exact", None, block_size=32)
    scores = compare(model, [paged], ids, paged.chunks(window), warm_up=40, folder=tmp_path)[paged.name]
    assert scores.contexts.tolist() == list(range(41, window + 1))
    assert torch.equal(scores.nll, scores.exact_nll) and scores.agrees.all() and not scores.divergence.any()
    parts = [scores.between(*edges) for edges in buckets(40, window)]
    assert [len(part.nll) for part in parts] == [40, 80, 140]
    assert list(tmp_path.iterdir()) == []


def test_fewer_bits_cost_more(report):
    assert set(report["windows"]) == {"exact", *(f"nvme-cache {name}" for name in FORMATS)}
    kl = {name: found["overall"]["kl_divergence_nats"] for name, found in report["windows"].items()}
    assert 0 < kl["nvme-cache int8"] < kl["nvme-cache int4"] < kl["nvme-cache int2"]
    errors = {name: found["key_error_once"] for name, found in report["storage"].items()}
    assert 0 == errors["exact"] < errors["nvme-cache int8"] < errors["nvme-cache float8"] < errors["nvme-cache int4"]


def test_buckets_and_steps_add_up(report):
    for found in [*report["windows"].values(), *report["stepwise"].values()]:
        overall, spans = found["overall"], found["by_context"]
        assert sum(span["predictions"] for span in spans) == overall["predictions"]
        kl = sum(span["predictions"] * span["kl_divergence_nats"] for span in spans) / overall["predictions"]
        assert kl == pytest.approx(overall["kl_divergence_nats"], rel=1e-9)
    assert {found["overall"]["predictions"] for found in report["stepwise"].values()} == {QUICK.steps}


@pytest.mark.parametrize(
    "name, key_bits, value_bits",
    [  # Scales in fp32, below 8 bits shifts too: for 256 or 64 tokens of a key's channel, for a value's 16 channels.
        ("int8", 8 + 32 / BLOCK, 8 + 32 / 16),
        ("float8", 8 + 32 / BLOCK, 8 + 32 / 16),
        ("int8 keys, int4 values", 8 + 32 / BLOCK, 4 + 64 / 16),
        ("int4", 4 + 64 / 64, 4 + 64 / 16),
        ("int2", 2 + 64 / 64, 2 + 64 / 16),
    ],
)
def test_bits_are_those_of_the_format(report, name, key_bits, value_bits):
    bits = (key_bits + value_bits) / 2
    assert report["storage"][f"nvme-cache {name}"]["quantized_bits_per_element"] == bits
    quantized = 2 * BLOCK
    whole = (quantized * bits + (QUICK.window - quantized) * 32) / QUICK.window
    assert report["windows"][f"nvme-cache {name}"]["bits_per_element"] == pytest.approx(whole)


def test_what_cannot_be_read_is_refused(model_folder, tmp_path):
    out = tmp_path / "quality.json"
    for options in (["--tokens", "5000"], ["--tokens", "4000", "--windows", "1000"]):
        command = ["--model", str(model_folder), "--quick", "--no-peers", "--out", str(out), *options]
        run = CliRunner().invoke(app, command, catch_exceptions=False)
        assert run.exit_code == 2
        assert f"{int(options[-1]):,}" in run.output
    assert not out.exists()


def test_a_token_attends_to_as_many_exact_ones_as_when_decoding(report):
    late = range(QUICK.probe // 2, QUICK.probe)
    assert late.start > SINKS + BLOCK  # all of it behind the first block
    as_fed = [SINKS + (position - SINKS) % BLOCK + 1 for position in late]
    # A block is sealed when the token behind it comes, which attends to it as it was.
    decoding = [SINKS + (position - SINKS - 1) % BLOCK + 2 for position in late]
    for name in FORMATS:
        found = report["storage"][f"nvme-cache {name}"]
        assert found["exact_tokens_as_fed"] == pytest.approx(sum(as_fed) / len(as_fed))
        assert found["exact_tokens"] == pytest.approx(sum(decoding) / len(decoding))
        for part in ("key", "value"):
            assert found[f"{part}_error_once"] == found[f"{part}_error_at_end"]  # quantized once


def test_facts_are_asked_for_at_their_depths(report, tokenizer):
    assert set(report["needles"]) == {"exact", "nvme-cache int4"}
    for found in report["needles"].values():
        assert found["asked"] == 1
        assert list(found["found_by_depth"]) == ["50%"]
    text = Text.tokenized(tokenizer)
    for number in range(2):
        planted = needles.document(tokenizer, text, 6000, 5, number)
        prompt = tokenizer.decode(planted.ids[0])
        assert 6000 * 0.8 < planted.ids.shape[1] < 6000 * 1.2
        for depth, fact in planted.facts:
            assert prompt.index(fact.sentence) / len(prompt) == pytest.approx(depth, abs=0.1)
        assert planted.end == ">"
    results = [{"depth": 0.1, "found": True}, {"depth": 0.9, "found": False}, {"depth": 0.1, "found": True}]
    summary = needles.summary(results)
    assert (summary["asked"], summary["found"], summary["found_by_depth"]) == (3, 2, {"10%": 2, "90%": 0})


def test_divergence_is_from_the_exact_distribution():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    scores = score(q, p, torch.tensor([1]), 7)
    assert scores.divergence.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert scores.nll.item() == pytest.approx(-math.log(0.75))
    assert (scores.contexts.item(), scores.agrees.item()) == (7, False)


def test_each_cache_is_fed_as_it_quantizes():
    assert ours("int4", "int4").chunks(600) == [SINKS + BLOCK, BLOCK, 84]
    assert quanto(4).chunks(300) == [128, 128, 44]
    assert exact().chunks(300) == [SINKS + BLOCK, 40]
