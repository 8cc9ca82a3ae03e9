"""The command and the example run end to end on a tiny model folder, and the demo's exit status tells the truth."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import nvme_cache
from nvme_cache.cli import app
from nvme_cache.demo import Answers

from .conftest import tiny_model

ROOT = Path(__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny random Llama with a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    model = tiny_model()
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text("All legislative Powers herein granted shall be vested in a Congress. " * 20)
    return path


def test_demo_on_a_tiny_model_is_bit_identical_and_leaves_nothing(model_folder, document, offload_dir):
    command = [sys.executable, "-m", "nvme_cache.cli", "demo", "--model", model_folder, "--document", document]
    command += ["--offload-dir", offload_dir, "--max-new-tokens", "8", "--question", "What?", "--question", "Who?"]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "tokens: identical (16 generated)" in run.stdout
    assert f"logits: identical ({16 * 256:,} compared bit for bit)" in run.stdout
    assert "100%" in run.stderr  # the progress bar
    assert list(offload_dir.iterdir()) == []


@pytest.mark.parametrize(("token", "logit", "status"), [(5, 0.5, 0), (6, 0.5, 1), (5, 0.75, 1)])
def test_the_demo_fails_if_a_token_or_a_logit_differs(token, logit, status, document, monkeypatch):
    usage = {"memory": 1 << 20, "device": 0, "host": 0, "nvme": 1 << 20}
    memory = Answers(["yes"], [5], torch.full((1, 4), 0.5), 100, 1.0, 1.0, 1 << 20, 0, usage, 0)

    def ask(request, folder):
        if not request.on_nvme:
            return memory
        return dataclasses.replace(memory, tokens=[token], logits=torch.full((1, 4), logit))

    monkeypatch.setattr("nvme_cache.demo.ask", ask)
    result = CliRunner().invoke(app, ["demo", "--document", str(document), "--question", "Is it?"])
    assert result.exit_code == status
    assert ("DIFFERENT" in result.output) == bool(status)


def test_the_demo_reports_a_model_that_does_not_load(document, tmp_path):
    result = CliRunner().invoke(app, ["demo", "--model", str(tmp_path / "none"), "--document", str(document)])
    assert result.exit_code == 2


def test_the_example_that_draws_runs(model_folder, document, offload_dir, tmp_path):
    if not importlib.util.find_spec("matplotlib"):
        pytest.skip("it draws with matplotlib")
    run = subprocess.run(
        [sys.executable, "examples/where_the_time_goes.py", model_folder, document, tmp_path / "chart.png"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"NVME_CACHE_DIR": str(offload_dir), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Generating: 39 tokens in 39 steps") == 3
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert list(offload_dir.iterdir()) == []


def test_the_example_of_ten_processes_reads_the_document_once(model_folder, document, offload_dir, tmp_path):
    if not importlib.util.find_spec("matplotlib"):
        pytest.skip("it draws with matplotlib")
    command = [sys.executable, "examples/ask_again.py", model_folder, document, tmp_path / "store"]
    environment = {"NVME_CACHE_DIR": str(offload_dir), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    for question in ("What?", "Who?"):  # as two of its processes
        run = subprocess.run(
            [*command, tmp_path / "chart.png", question], capture_output=True, text=True, cwd=ROOT, env=environment
        )
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout)["first_token_s"] > 0
    assert len(nvme_cache.SnapshotStore(tmp_path / "store", size_limit=0).entries()) == 2
    assert list(offload_dir.iterdir()) == []


def test_the_example_runs(model_folder, document, offload_dir):
    run = subprocess.run(
        [sys.executable, "examples/long_document_qa.py", model_folder, document, "What?", "Who?"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"NVME_CACHE_DIR": str(offload_dir), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("What?\n")
    assert "'nvme':" in run.stdout
    assert list(offload_dir.iterdir()) == []
