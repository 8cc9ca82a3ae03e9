"""The reduced form of `benchmarks/gpu_check.py` runs on CPU and finds nothing wrong; and says so where there is."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import quantized
from benchmarks.checks import correctness
from benchmarks.checks.correctness import Generated, difference

ROOT = Path(__file__).parent.parent
SECTIONS = ["correctness", "rates", "overlap", "leaks", "tests"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder, out = tmp_path_factory.mktemp("offload"), tmp_path_factory.mktemp("report") / "report.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_check.py", "--device", "cpu", "--quick"]
    command += ["--offload-dir", folder, "--out", out]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(folder.iterdir()) == []
    return json.loads(out.read_text())


def test_every_section_ran(report):
    assert report["passed"] and report["quick"]
    assert list(report["sections"]) == SECTIONS
    statuses = {name: section["status"] for name, section in report["sections"].items()}
    assert statuses == dict.fromkeys(SECTIONS[:-1], "passed") | {"tests": "skipped"}
    assert {"device", "torch", "transformers", "cpu_count", "ram_bytes", "file_system"} <= set(report["machine"])
    assert Path(report["machine"]["nvme_cache"]).parent == ROOT


def test_everything_compared_is_identical_and_was_paged(report):
    results = report["sections"]["correctness"]["results"]
    entries = results["matrix"]["entries"]
    assert len(entries) == results["matrix"]["planned"]
    assert {entry["identical"] for entry in entries} == {True}
    assert {entry["attention"] for entry in entries} == {"eager", "sdpa"}
    for tier in ("nvme", "host", "device"):
        assert any(entry[f"{tier}_bytes"] for entry in entries if entry["tier"] == "mixed")
        assert any(entry[f"{tier}_bytes"] for entry in entries if entry["tier"] == tier)
    assert results["repeats"]["identical"] == results["repeats"]["done"] == results["repeats"]["planned"]


def test_rates_and_steps_have_units(report):
    rates, overlap = (report["sections"][name]["results"] for name in ("rates", "overlap"))
    assert set(rates["best"]) == {"h2d_bytes_per_s", "read_bytes_per_s", "write_bytes_per_s"}
    assert all(entry["fetch_bytes_per_s"] > 0 for entry in rates["fetch"])
    assert all(entry["slots_bytes_per_s"] > 0 for entry in rates["fetch"] + rates["quantized"])
    measured = [entry for entry in overlap["entries"] if "skipped" not in entry]
    assert {entry["setting"] for entry in measured} >= {"DynamicCache", "host 0 %", "host 50 %", "host 100 %"}
    for entry in measured:
        assert entry["identical"]
        assert {"step_s", "floor_s", "floor_bound", "efficiency", "peak_device_bytes", "host_bytes"} <= set(entry)


def test_memory_files_and_threads_are_flat(report):
    results = report["sections"]["leaks"]["results"]
    assert results["done"] == results["planned"]
    assert set(results["flat"].values()) == {True}


def test_a_difference_is_located():
    stock = Generated(torch.tensor([[1, 2, 3]]), torch.zeros(3, 1, 4))
    assert difference(stock, stock) == {"identical": True}
    logits = torch.zeros(3, 1, 4)
    logits[1, 0, 2], logits[2, 0, 0] = 0.5, -2.0
    found = difference(Generated(torch.tensor([[1, 2, 4]]), logits), stock)
    assert (found["identical"], found["tokens_identical"], found["first_differing_step"]) == (False, False, 1)
    assert (found["first_step_max_abs_diff"], found["max_abs_diff"]) == (0.5, 2.0)
    assert not difference(Generated(stock.tokens, -stock.logits), stock)["identical"]  # -0 is not 0


def test_every_combination_comes_once_and_the_first_round_has_every_model_and_attention():
    run = SimpleNamespace(quick=False, attentions=("eager", "sdpa"))
    cases = correctness._cases(run)
    assert len(cases) == len(set(cases)) == len(correctness.TINY) * 2 * len(correctness.MODES)
    first = cases[: len(correctness.TINY) * 2]
    assert len({(tiny, attention) for tiny, attention, _ in first}) == len(first)
    assert {mode for _, _, mode in first} == set(correctness.MODES)


def test_quantized_blocks_are_compared_with_exact_ones(tmp_path, capsys):
    quantized.main(tmp_path, tokens=1028, layers=3, rounds=1)
    printed = capsys.readouterr().out
    lines = {line.split("│")[1].strip(): line.split("│") for line in printed.splitlines() if "│" in line}
    assert lines.keys() == {"exact", "int8", "int4"}
    assert [lines[name][2].strip() for name in lines] == ["12", "6", "3"]  # MiB: 4 blocks of 3 layers, as stored
    assert list(tmp_path.iterdir()) == []
