"""`nvme-cache estimate`: figures as JSON, verdicts with remedies, one-line errors, 80 columns."""

import json

import pytest
import torch
from transformers import LlamaConfig, MistralConfig
from typer.testing import CliRunner

from nvme_cache.cli import app
from nvme_cache.footprint import footprint_of
from nvme_cache.prefill import advised_chunk

from .test_footprint import LLAMA_8B
from .test_tax import INT8_BITS, INT8_BITS_OF_TABLE, LIMITS, rounds_to

# A machine told whole, so that nothing is measured and nothing depends on this one.
TOLD = ["--nvme", "7GB/s", "--pcie", "25GB/s", "--memory", "80GB", "--disk-budget", "2000GB", "--compute-ms", "20"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    LLAMA_8B.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def offload_dir_of_its_own(monkeypatch, offload_dir):
    monkeypatch.setenv("NVME_CACHE_DIR", str(offload_dir))


def run(*args):
    return CliRunner().invoke(app, ["estimate", *map(str, args)])


def rows(*args):
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["rows"]


@pytest.mark.parametrize("column", range(3))
def test_physical_limits_of_llama(llama, column):
    share = (0.0, 0.5, 0.9)[column]
    for (context, quantization), (read_ms, rates) in LIMITS.items():
        bits = {None: 16, "int8": INT8_BITS, "int4": 4.5}[quantization]
        budget = round(context * 65_536 * bits / 8 * share)
        options = ["--context", context, "--quantization", quantization or "none", "--device-budget", budget]
        (row,) = rows(llama, *TOLD, "--compute-ms", "0.001", "--memory", "1000GB", "--host-budget", "0", *options)
        assert row["context_tokens"] == context
        assert row["token_bytes"] == 65_536 * bits / 8
        assert row["bound"] == "nvme"
        on_nvme = row["nvme_bytes"] / (row["nvme_bytes"] + row["device_bytes"])
        assert on_nvme == pytest.approx(1 - share, abs=0.01)
        # Only whole blocks lie in a tier, 115 of 128 a layer where 90 % are 115.2.
        floor_s = row["floor_s"] * (1 - share) / on_nvme
        if quantization == "int8":
            floor_s *= INT8_BITS_OF_TABLE / INT8_BITS
        assert rounds_to(floor_s * 1e3, read_ms[column])
        assert rounds_to(1 / floor_s, rates[column])


def test_budgets_become_tiers_as_the_cache_places_blocks(llama):
    # 512 blocks of a MiB in each of 32 layers; a budget is shared out evenly and filled with whole ones.
    options = ["--quantization", "none", "--device-budget", "1GiB", "--host-budget", "4GiB"]
    (row,) = rows(llama, *TOLD, "--context", 131_072, *options)
    assert row["device_bytes"] == 1 << 30
    assert row["host_bytes"] == 4 << 30
    assert row["nvme_bytes"] == row["read_bytes"] == 11 << 30
    assert row["transferred_bytes"] == 15 << 30
    assert row["floor_s"] == pytest.approx((11 << 30) / 7e9)
    assert row["prompts_per_drive"] == pytest.approx(600e12 / (11 << 30))


def test_it_pays_where_compute_takes_longest(llama):
    (row,) = rows(llama, *TOLD, "--context", 4096, "--quantization", "int4", "--compute-ms", 100, "--host-budget", 0)
    assert row["verdict"] == "pays"
    assert row["bound"] == "compute"
    assert row["tax_share"] == pytest.approx(32 * 1.2e-4 / 0.1)
    assert row["fix"] is None
    assert row["prompts_per_drive"] > 1e6


def test_it_costs_more_than_it_saves_and_what_helps_is_tried(llama):
    told = [*TOLD, "--host-budget", 0, "--compute-ms", 100]
    none, int8 = rows(llama, *told, "--context", 16_384, "--quantization", "none", "--quantization", "int8")
    assert none["verdict"] == "costs more than it saves"  # 307 ms of reading
    assert none["reason"] == "a token takes 3.1 times as long"
    assert none["fix"] == "int4"  # 86 ms; two tokens a sweep make 153, int8 155
    assert int8["verdict"] == "costs more than it saves"
    assert int8["reason"] == "paging adds 55% to a token"
    assert int8["fix"] == "prompt lookup (2 tokens a sweep)"
    (fixed,) = rows(llama, *told, "--context", 16_384, "--quantization", "int4")
    assert fixed["verdict"] == "pays"


def test_it_will_not_fit_the_disk(llama):
    told = [*TOLD, "--host-budget", 0, "--disk-budget", "10GB", "--compute-ms", 1000]
    (row,) = rows(llama, *told, "--context", 131_072, "--quantization", "none")
    assert row["verdict"] == "will not fit"
    assert row["reason"] == "17.2 GB of blocks for 10 GB of disk"
    assert row["fix"] == "int8"


def test_slots_will_not_fit_memory(llama):
    # At a million tokens a layer is 4.3 GB, and three are 12.9 GB beside 16.1 of weights.
    told = [*TOLD, "--host-budget", 0, "--compute-ms", 100_000, "--context", 1 << 20, "--quantization", "none"]
    (row,) = rows(llama, *told, "--memory", "28GB")
    assert row["verdict"] == "will not fit"
    assert row["reason"] == "16.1 GB of weights, 12.9 GB of slots and 0 B of cache for 28 GB of memory"
    assert row["fix"] == "prefetch_depth=1"
    (row,) = rows(llama, *told, "--memory", "22GB")
    assert row["fix"] == "prefetch_depth=0"
    (row,) = rows(llama, *told, "--memory", "10GB")
    assert row["fix"] is None


def test_nothing_to_page(tmp_path):
    MistralConfig(num_hidden_layers=2, sliding_window=512).save_pretrained(tmp_path)
    (row,) = rows(tmp_path, *TOLD, "--context", 100_000, "--quantization", "none")
    assert row["verdict"] == "nothing to page"
    assert row["resident_bytes"] == 2 * 511 * 4096


def test_what_is_not_told_is_measured(llama):
    result = run(llama, "--context", 32_768, "--json")
    report = json.loads(result.stdout)
    assert 1e8 < report["machine"]["nvme_bytes_per_s"] < 1e11
    notes = "\n".join(report["notes"])
    for said in ("drive: ", "link: ", "compute: assumed"):
        assert said in notes
    none, int8, int4 = report["rows"]
    assert [row["quantization"] for row in report["rows"]] == [None, "int8", "int4"]
    assert none["compute_s"] == int8["compute_s"] == int4["compute_s"] > 16e9 / 1e13
    assert none["token_bytes"] == 131_072


def test_the_link_to_a_device_is_measured(llama, monkeypatch):
    monkeypatch.setattr("nvme_cache.machine.accelerator", lambda: torch.device("cpu"))
    report = json.loads(run(llama, "--nvme", "7GB/s", "--context", 32_768, "--json").stdout)
    assert 1e8 < report["machine"]["pcie_bytes_per_s"] < 1e12
    assert f"link: {report['machine']['pcie_bytes_per_s'] / 1e9:.3g} GB/s to cpu, measured" in report["notes"]
    assert report["rows"][0]["transferred_bytes"] == 32_768 * 131_072


@pytest.mark.parametrize("colour", [{"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}])
def test_the_table_fits_80_columns(llama, colour, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    contexts = [part for context in (32_768, 131_072, 1 << 20) for part in ("--context", context)]
    result = CliRunner(env=colour).invoke(app, ["estimate", llama, *TOLD, "--host-budget", "0", *map(str, contexts)])
    plain = "".join(part.partition("m")[2] if at else part for at, part in enumerate(result.stdout.split("\x1b[")))
    assert max(map(len, plain.splitlines())) <= 80
    assert "…" not in plain
    assert ("\x1b[33m" in result.stdout) == ("FORCE_COLOR" in colour)
    for said in ("131,072", "17.2 GB", "0/0/100", "2.45 s", "costs more than it saves", "Try ", "as given"):
        assert said in plain


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["{folder}/none"], "there is no such folder"),
        (["nobody/nothing"], "no config of 'nobody/nothing'"),
        (["{llama}", "--nvme", "7 parsecs"], "nvme='7 parsecs' is no rate"),
        (["{llama}", "--nvme", "0GB/s"], "must be more than nothing"),
        (["{llama}", "--pcie", "wide"], "pcie='wide' is no rate"),
        (["{llama}", "--context", "0"], "context=0 must be a whole number of at least 1"),
        (["{llama}", "--batch", "0"], "batch=0"),
        (["{llama}", "--quantization", "int3"], "quantization='int3' must be one of None,"),
        (["{llama}", "--dtype", "bf61"], "dtype='bf61'"),
        (["{llama}", "--device-budget", "much"], "device_budget='much' is no size"),
        (["{llama}", "--compute-ms", "-1"], "compute_ms=-1.0"),
    ],
)
def test_wrong_values_are_named(args, said, llama, tmp_path):
    told = [] if "--nvme" in args or "--pcie" in args else TOLD[:8]
    result = run(*(arg.format(llama=llama, folder=tmp_path) for arg in args), *told, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


class TestChunks:
    """docs/streaming.md: the shortest chunk whose reading hides behind its attention."""

    CONFIG = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, dtype=torch.bfloat16,
    )  # fmt: skip

    def advised(self, **options):
        rates = {"nvme_bytes_per_s": 7e9, "flops_per_s": 2.5e14} | options
        return advised_chunk(footprint_of(self.CONFIG), self.CONFIG, **rates)

    def test_closed_form(self):
        # 4,096 bytes a token and layer at 7 GB/s; 4 * 4,096 operations for a query and a key.
        least = 4096 * 2.5e14 / (4 * 4096 * 7e9)
        chunk = self.advised()
        assert least <= chunk.tokens < least + 256
        assert chunk.read_over_attend == pytest.approx(least / chunk.tokens)
        assert chunk.tokens % 256 == 0

    def test_a_faster_drive_or_smaller_blocks_need_less(self):
        assert self.advised(nvme_bytes_per_s=14e9).tokens < self.advised().tokens
        assert self.advised(quantization="int8").tokens < 0.6 * self.advised().tokens
        assert self.advised(nvme_bytes_per_s=1e15).tokens == 256

    def test_memory_limits_it(self):
        # 2 bytes * (4 * 4,096 + 3 * 14,336 + 2 * 4,096) a token; a quarter of the memory.
        token_bytes = 2 * (4 * 4096 + 3 * 14336 + 2 * 4096)
        chunk = self.advised(memory_bytes=4 * 1000 * token_bytes)
        assert chunk.tokens == 768
        assert chunk.read_over_attend > 1
        assert self.advised(memory_bytes=4 * 1000 * token_bytes, batch_size=2).tokens == 256
