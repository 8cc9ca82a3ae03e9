"""The bench in its quick form runs end to end and measures everything; how fast anything was is not asserted."""

import importlib.util
import json
import subprocess
import sys

import pytest

from nvme_cache.bench.contenders import ALL, HALF_STREAMED, OLLM, OURS, OURS_UNVERIFIED, STREAMED
from nvme_cache.bench.measure import Rounds, Sample, interleave, paired, rates, spread
from nvme_cache.bench.steps import SHARES

CHARTS = {"drive.png", "steps.png", "peers.png", "growth.png"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The folder on the drive, the folder of results, and what the command printed."""
    folder, out = tmp_path_factory.mktemp("drive"), tmp_path_factory.mktemp("out")
    command = [sys.executable, "-m", "nvme_cache.cli", "bench", str(folder), "--quick", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder, out, run.stdout


@pytest.fixture(scope="module")
def results(bench):
    return json.loads((bench[1] / "bench.json").read_text())


def numbers(figures, path=""):
    """Every number in JSON with the keys that lead to it."""
    if isinstance(figures, dict):
        for key, value in figures.items():
            yield from numbers(value, f"{path}.{key}")
    elif isinstance(figures, list):
        for value in figures:
            yield from numbers(value, path)
    elif isinstance(figures, (int, float)) and not isinstance(figures, bool):
        yield path, figures


def test_it_leaves_results_and_nothing_on_the_drive(bench):
    folder, out, printed = bench
    assert list(folder.iterdir()) == []
    found = {path.name for path in out.iterdir()}
    if importlib.util.find_spec("matplotlib"):
        assert found == CHARTS | {"bench.json"}
        assert all((out / name).stat().st_size > 1000 for name in CHARTS)
    else:
        assert found == {"bench.json"}
        assert "no charts" in printed
    assert "Side by side" in printed


def test_it_measures_everything(results):
    plan_contexts = {row["context_tokens"] for row in results["steps"]["rows"]}
    assert {row["resident_share"] for row in results["steps"]["rows"]} == set(SHARES)
    assert {row["resident_share"] for row in results["steps"]["rows"] if row["stored_as"] == "int8"} == {0.0, 0.5}
    assert {row["setting"] for row in results["steps"]["rows"]} == {"compute-bound", "balanced", "io-bound", "llama"}
    assert plan_contexts == {2048}
    for kind, ours in (("read", "shard_read"), ("write", "shard_write"), ("fetch", "fetch")):
        for row in results["drive"][kind]:
            assert {ours, "plain"} <= row["contenders"].keys()
    contenders = {row["contender"] for row in results["peers"]["rows"]}
    assert contenders | results["peers"]["unavailable"].keys() == set(ALL)
    assert set(ALL) - contenders <= {OLLM}
    assert len(results["growth"]["rows"]) == 2


def test_ours_is_identical_to_the_stock_cache(results):
    for row in results["peers"]["rows"]:
        if row["contender"] in (OURS, OURS_UNVERIFIED):
            assert row["same_logits"]
            assert row["step_read_bytes"] == row["context_tokens"] * results["peers"]["model"]["token_bytes"]
        if row["contender"] == STREAMED:
            assert row["step_read_bytes"] == row["context_tokens"] * results["peers"]["model"]["token_bytes"]
            assert row["efficiency"]["median"] > 0
        if row["contender"] == HALF_STREAMED:
            assert 0 < row["step_read_bytes"] <= row["context_tokens"] * results["peers"]["model"]["token_bytes"] / 2
    assert results["prefill"]["same_logits"]


def test_rates_and_times_are_positive(results):
    checked = 0
    for path, number in numbers({name: results[name] for name in ("drive", "steps", "peers", "prefill", "growth")}):
        if any(unit in path for unit in ("rate_bytes_per_s", "step_s", "prefill_s", "tokens_per_s", "efficiency")):
            assert number > 0, path
            checked += 1
    assert checked > 100


def test_a_missing_folder_is_refused(tmp_path):
    command = [sys.executable, "-m", "nvme_cache.cli", "bench", str(tmp_path / "none"), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2


def test_contenders_take_turns_and_each_begins_a_round():
    order = []
    found = interleave({name: (lambda name=name: order.append(name) or name) for name in "abc"}, Rounds(0, least=3))
    assert "".join(order) == "abc" + "bca" + "cab"
    assert found == {"a": ["a"] * 3, "b": ["b"] * 3, "c": ["c"] * 3}


def test_rounds_stop_at_the_budget_and_at_enough():
    assert len(interleave({"a": lambda: 1}, Rounds(budget_s=0, least=2))["a"]) == 2
    assert len(interleave({"a": lambda: 1}, Rounds(budget_s=60, least=2, most=5))["a"]) == 5


def test_figures_are_medians_and_ratios_are_taken_round_by_round():
    assert spread([3, 1, 8]) == {"median": 3, "min": 1, "max": 8, "rounds": 3}
    assert paired([2, 30, 4], [1, 10, 4])["median"] == 2
    figures = rates([Sample(wall_s=0.5, cpu_s=0.01, nbytes=10**9)])
    assert figures["rate_bytes_per_s"]["median"] == 2e9
    assert figures["cpu_s_per_gb"]["median"] == 0.01
