"""The measured tax: injected delays come out under their own cause, once, and hidden ones not at all."""

import importlib.util
import json
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.streamers import BaseStreamer

from nvme_cache import CacheMisuseError, io
from nvme_cache.buffers import StagingPool
from nvme_cache.fetch import Target
from nvme_cache.layers import NVMeLayer
from nvme_cache.meter import Cause, Meter, Phase, split
from nvme_cache.quantization import Quantized
from nvme_cache.report import TaxReport
from nvme_cache.shards import Shard
from tests.conftest import cache_argument, prompt, tiny_model

DELAY_S = 0.04
LAYERS = 4
PLACES = {
    Cause.DRIVE: (io, "read_all"),
    Cause.CHECK: (Shard, "verify"),
    Cause.COPY: (Target, "copy"),
    Cause.DEQUANTIZE: (Quantized, "decode"),
    Cause.STAGING: (StagingPool, "acquire"),
    Cause.SOFTWARE: (NVMeLayer, "_complete_slot"),
}


@pytest.fixture
def delay(monkeypatch):
    """Makes something take longer, by cause."""

    def slow(cause, seconds=DELAY_S):
        owner, name = PLACES[cause]
        original = getattr(owner, name)

        def slowly(*args, **options):
            time.sleep(seconds)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, slowly)

    return slow


@torch.no_grad()
def forward(cache, length, compute_s=0.0):
    for layer_idx in range(LAYERS):
        cache.update(*torch.randn(2, 1, 2, length, 16), layer_idx)
        time.sleep(compute_s)


def filled(make_cache, length=64, **options):
    options = {"config": tiny_model().config, "block_size": 16, "prefetch_depth": 0} | options
    cache = make_cache(**options)
    forward(cache, length)
    cache._pager.flush()
    return cache


@pytest.mark.parametrize("cause", [Cause.DRIVE, Cause.CHECK, Cause.SOFTWARE])
def test_a_delay_goes_to_its_cause(cause, make_cache, delay):
    cache = filled(make_cache)
    delay(cause)
    forward(cache, 1)
    tax = cache.tax.decode.tax_s
    assert LAYERS * DELAY_S * 0.99 <= tax[cause] < 1.25 * LAYERS * DELAY_S
    assert sum(tax.values()) - tax[cause] < 0.25 * LAYERS * DELAY_S


def test_copying_from_memory_goes_to_copies(make_cache, delay):
    cache = filled(make_cache, host_budget="1GiB", io_threads=1)
    delay(Cause.COPY)
    forward(cache, 1)
    tax = cache.tax.decode.tax_s
    assert 2 * LAYERS * DELAY_S * 0.99 <= tax[Cause.COPY] < 2.5 * LAYERS * DELAY_S  # keys, then values
    assert tax[Cause.DRIVE] == tax[Cause.CHECK] == 0


@pytest.mark.parametrize("tier", [{}, {"host_budget": "1GiB"}, {"device_budget": "1GiB"}], ids=str)
def test_dequantizing_goes_to_itself(tier, make_cache, delay):
    cache = filled(make_cache, length=68, quantization="int8", io_threads=1, **tier)
    delay(Cause.DEQUANTIZE)
    forward(cache, 1)
    tax = cache.tax.decode.tax_s
    assert 2 * LAYERS * DELAY_S * 0.99 <= tax[Cause.DEQUANTIZE] < 2.5 * LAYERS * DELAY_S  # keys, then values
    assert sum(tax.values()) - tax[Cause.DEQUANTIZE] < 0.25 * LAYERS * DELAY_S


def test_waiting_for_staging_buffers_goes_to_them(make_cache, delay):
    cache = make_cache(block_size=16)
    delay(Cause.STAGING)
    forward(cache, 64)
    tax = cache.tax.prefill.tax_s
    assert 2 * LAYERS * DELAY_S * 0.99 <= tax[Cause.STAGING] < 2.5 * LAYERS * DELAY_S  # one for keys, one for values
    assert tax[Cause.DRIVE] == tax[Cause.COPY] == 0


def test_what_one_thread_does_in_turn_is_told_apart(make_cache, delay):
    cache = filled(make_cache)
    delay(Cause.DRIVE, 0.06)
    delay(Cause.CHECK, 0.03)
    forward(cache, 1)
    tax = cache.tax.decode.tax_s
    assert LAYERS * 0.059 <= tax[Cause.DRIVE] < LAYERS * 0.07
    assert LAYERS * 0.0295 <= tax[Cause.CHECK] < LAYERS * 0.04


def test_waits_that_overlap_count_once(make_cache, delay):
    """Half of each layer in memory: threads copy keys and values for 20 ms each while others read for 80."""
    half_bytes = LAYERS * 64 * 2 * 2 * 16 * 4  # rows of a page: the drive fills the slot itself
    cache = filled(make_cache, 128, block_size=64, host_budget=half_bytes, io_threads=2)
    assert cache.memory_usage()["host"] == cache.memory_usage()["nvme"] > 0
    delay(Cause.COPY, 0.02)
    delay(Cause.DRIVE, 0.08)
    forward(cache, 1)
    summary = cache.tax.decode
    assert LAYERS * 0.079 <= summary.tax_s[Cause.DRIVE] < LAYERS * 0.1
    assert summary.tax_s[Cause.COPY] == 0
    assert summary.total_tax_s < LAYERS * 0.1


def test_what_computing_hides_is_no_tax(make_cache, delay):
    """Each read takes 50 ms, of which 30 pass under the layer before."""
    cache = filled(make_cache, prefetch_depth=1)
    delay(Cause.DRIVE, 0.05)
    for _ in range(3):
        forward(cache, 1, compute_s=0.03)
    step = cache._pager.meter.steps[-2]  # no longer filling the pipeline, and followed by another
    assert LAYERS * 0.02 * 0.9 <= step.tax_s[Cause.DRIVE] < LAYERS * 0.03
    assert LAYERS * 0.03 <= step.wall_s - sum(step.tax_s.values()) < LAYERS * 0.035
    assert step.wall_s == pytest.approx(LAYERS * 0.05, rel=0.15)
    assert step.reading_s == pytest.approx(LAYERS * 0.05, rel=0.15)
    assert 0.4 < cache.tax.decode.hidden_share < 0.7


def test_fully_hidden_reads_cost_nothing_but_software(make_cache, delay):
    cache = filled(make_cache, prefetch_depth=2)
    delay(Cause.DRIVE, 0.02)
    for _ in range(3):
        forward(cache, 1, compute_s=0.04)
    step = cache._pager.meter.steps[-2]
    assert step.tax_s[Cause.DRIVE] < 0.005
    assert step.reading_s > LAYERS * 0.02 * 0.95


@pytest.mark.parametrize("shards", [1, 40])
def test_a_layer_of_many_shards_is_told_apart_too(shards, make_cache, delay):
    cache = make_cache(config=tiny_model().config, block_size=16, prefetch_depth=0, io_threads=1)
    for _ in range(shards):
        forward(cache, 16)
    cache._pager.flush()
    seconds = 0.2 / shards
    before = cache._pager.meter.steps[-1]
    delay(Cause.DRIVE, seconds)
    forward(cache, 1)
    step = cache._pager.meter.steps[-1]
    assert step is not before
    assert step.tax_s[Cause.DRIVE] >= LAYERS * 0.2 * 0.95
    assert sum(step.tax_s.values()) - step.tax_s[Cause.DRIVE] < LAYERS * 0.2 * 0.3


def test_phases_nobody_waits_for_any_more_are_forgotten(make_cache):
    cache = filled(make_cache, io_threads=1)
    for _ in range(50):
        forward(cache, 1)
    [phases] = cache._pager._readers.map(lambda _: cache._pager.meter.phases(), [0])
    assert 0 < len(phases) < 50  # a few of each of the four shards that a layer has by now


def test_a_phase_may_end_just_before_an_update_begins():
    meter = Meter()
    with meter.phase(Cause.DRIVE):
        meter._update_began_s = time.perf_counter() + 60  # as if another thread had begun one before this is booked
    assert not meter.phases()


def test_readers_that_wait_for_staging_buffers_say_so(make_cache, delay):
    cache = filled(make_cache)  # rows shorter than a page go through staging
    delay(Cause.STAGING)
    forward(cache, 1)
    summary = cache.tax.decode
    assert LAYERS * DELAY_S * 0.99 <= summary.tax_s[Cause.STAGING] < 1.25 * LAYERS * DELAY_S
    assert summary.busy_s < 0.1 * LAYERS * DELAY_S  # waiting is no work


def test_waiting_for_a_write_is_waiting_for_the_drive_but_no_reading(make_cache, monkeypatch):
    # Rows of a page: the drive fills the slot itself, and no read waits for a staging buffer.
    cache, write = make_cache(config=tiny_model().config, block_size=64), io.write_all
    monkeypatch.setattr(io, "write_all", lambda *args: (time.sleep(0.1), write(*args)))
    forward(cache, 64)
    forward(cache, 1)
    summary = cache.tax.decode
    assert summary.tax_s[Cause.DRIVE] > 0.15  # two of four writes: the prompt waited for buffers of the others
    assert summary.reading_s < 0.05


def test_bytes_by_tier(make_cache):
    layer_bytes = 64 * 2 * 2 * 16 * 4
    cache = filled(make_cache, host_budget=LAYERS * layer_bytes // 4)
    forward(cache, 1)
    summary = cache.tax.decode
    assert summary.read_bytes == LAYERS * layer_bytes * 3 // 4
    assert summary.copied_bytes == LAYERS * layer_bytes // 4


@pytest.mark.parametrize(
    ("options", "generated"), [({}, 23), ({"prompt_lookup_num_tokens": 3}, 23), ({"prefill_chunk_size": 16}, 23)]
)
def test_prompts_and_generated_tokens_are_told_apart(options, generated, make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    for turn in range(2):
        ids = torch.cat([prompt(40)] * (turn + 1), dim=1)
        cache.reset()
        model.generate(ids, **{cache_argument(model): cache}, max_new_tokens=24, do_sample=False, **options)
        steps = [step for step in cache._pager.meter.steps if not step.is_prefill]
        kept = [step.new_length if step.kept_length is None else step.kept_length for step in steps]
        # What prompt lookup proposes last and is refused is still counted: nothing follows that would tell.
        assert 0 <= sum(kept) - generated * (turn + 1) <= 3 * (turn + 1)
    assert cache.tax.prefill.tokens == 120
    assert cache.tax.decode.tokens == sum(kept)


@pytest.mark.parametrize(("length", "is_prefill"), [(1, False), (16, False), (17, True)])
def test_outside_generate_more_than_a_block_is_a_prompt(length, is_prefill, make_cache):
    cache = filled(make_cache)
    forward(cache, length)
    assert cache._pager.meter.steps[-1].is_prefill == is_prefill


def test_proposals_of_more_than_a_block_are_no_prompt(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=4)
    ids = prompt(20).repeat(1, 2)
    model.generate(ids, **{cache_argument(model): cache}, max_new_tokens=24, prompt_lookup_num_tokens=10)
    steps = cache._pager.meter.steps
    assert max(step.new_length for step in list(steps)[1:]) > 4
    assert [step.is_prefill for step in steps] == [True] + [False] * (len(steps) - 1)


def test_a_reset_ends_what_was_measured(make_cache):
    cache = filled(make_cache)
    began = time.perf_counter()
    for _ in range(3):
        forward(cache, 1)
        cache.reset()
        time.sleep(0.2)
        forward(cache, 40)
    elapsed_s, report = time.perf_counter() - began, cache.tax
    assert report.decode.tokens == 3
    assert report.decode.wall_s + report.prefill.wall_s < elapsed_s - 0.6 + 0.1


@pytest.mark.parametrize("tokens", [1, 3])
def test_models_without_paged_layers_have_a_report_too(tokens, make_cache):
    model = tiny_model("mistral")
    cache = make_cache(config=model.config)
    model.generate(prompt(40), **{cache_argument(model): cache}, max_new_tokens=tokens, do_sample=False)
    report = cache.tax
    assert "the model" in str(report)
    assert report.prefill.total_tax_s == 0 < report.prefill.wall_s


def test_a_refused_call_from_another_thread_leaves_the_figures_alone(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    errors = []

    class Intruder(BaseStreamer):
        def put(self, value):
            if not cache.get_seq_length():
                return  # the prompt, before anything is computed
            thread = threading.Thread(target=self.intrude)
            thread.start()
            thread.join()

        def end(self):
            pass

        def intrude(self):
            try:
                model.generate(prompt(40), **{cache_argument(model): cache}, max_new_tokens=2)
            except CacheMisuseError as error:
                errors.append(error)

    ids = prompt(40)
    model.generate(ids, **{cache_argument(model): cache}, max_new_tokens=6, do_sample=False, streamer=Intruder())
    assert errors
    assert [step.kept_length for step in cache._pager.meter.steps] == [40, 1, 1, 1, 1, None]


def test_reports_may_be_asked_for_while_updates_go_on():
    meter, stop, errors = Meter(), threading.Event(), []
    meter.begin_step(0, 1, is_prefill=False)

    class Slow(Moment):
        def is_reached(self):
            time.sleep(0)  # another thread's turn
            return True

    def ask():
        while not stop.is_set():
            try:
                TaxReport(meter)
            except Exception as error:
                errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(2000):
            with meter.update(lambda: Slow(time.perf_counter())):
                pass
    finally:
        stop.set()
        asking.join()
    assert not errors
    meter.settle(wait=True)
    assert not meter._updates


def test_time_between_two_calls_is_nobodys(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    began = time.perf_counter()
    for _ in range(2):
        cache.reset()
        model.generate(prompt(40), **{cache_argument(model): cache}, max_new_tokens=4, do_sample=False)
        time.sleep(0.5)
    report, elapsed_s = cache.tax, time.perf_counter() - began
    assert report.prefill.wall_s + report.decode.wall_s < elapsed_s - 1


class Moment:
    """A point that an accelerator reaches at `time_s`."""

    def __init__(self, time_s, *, is_reached=True):
        self.time_s, self.reached = time_s, is_reached

    def is_reached(self):
        return self.reached

    def seconds_since(self, earlier):
        return self.time_s - earlier.time_s


@pytest.mark.parametrize(
    ("stood_s", "drive_s", "copy_s"),
    [(0.5, 0.1, 0.4), (0.0, 0.0, 0.0), (0.05, 0.05, 0.0)],
    ids=["copies took longer", "it had work in store", "it had a little in store"],
)
def test_an_accelerators_own_time_decides(stood_s, drive_s, copy_s):
    meter = Meter()
    meter.begin_step(0, 1, is_prefill=False)
    moments = iter([Moment(1.0), Moment(1.0 + stood_s)])
    with meter.update(lambda: next(moments)):
        time.sleep(0.1)
        meter.waited({Cause.DRIVE: 0.1})
    meter.go_on()
    tax = TaxReport(meter).decode.tax_s
    assert tax[Cause.DRIVE] == pytest.approx(drive_s, rel=0.05)
    assert tax[Cause.COPY] == pytest.approx(copy_s, abs=0.01)
    assert sum(tax.values()) == pytest.approx(stood_s)
    summary = TaxReport(meter).decode
    assert summary.wall_s == pytest.approx(max(0.1, stood_s), rel=0.1)  # it may be at work for longer than its host
    assert summary.compute_s >= 0


def test_updates_are_booked_once_the_device_has_got_there():
    meter = Meter()
    meter.begin_step(0, 1, is_prefill=False)
    late = Moment(2.0, is_reached=False)
    for moments in ([Moment(1.0), late], [Moment(2.0), Moment(4.0)]):
        turn = iter(moments)
        with meter.update(lambda turn=turn: next(turn)):
            pass
    assert sum(meter.steps[0].tax_s.values()) == 0
    late.reached = True
    meter.settle(wait=False)
    assert sum(meter.steps[0].tax_s.values()) == pytest.approx(3.0)


spans = st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted)


@given(spans, st.lists(st.tuples(st.sampled_from(Cause), st.floats(0, 3), st.floats(0, 3)), max_size=8))
def test_a_wait_is_split_without_rest(wait, gaps_and_lengths):
    began, ended = wait
    phases, at = [], 0.0
    for cause, gap, length in gaps_and_lengths:
        phase = Phase(cause, at + gap)
        phase.ended_s = at = at + gap + length
        phases.append(phase)
    parts = split(began, ended, phases)
    assert sum(parts.values()) == pytest.approx(ended - began, abs=1e-9)
    for cause in set(Cause) - {Cause.SOFTWARE}:
        inside = [max(0.0, min(ended, p.ended_s) - max(began, p.began_s)) for p in phases if p.cause is cause]
        assert parts[cause] == pytest.approx(sum(inside), abs=1e-9)


@pytest.fixture
def report(make_cache, delay):
    cache = filled(make_cache)
    delay(Cause.DRIVE, 0.01)
    for _ in range(5):
        forward(cache, 1, compute_s=0.005)
    return cache.tax


def test_it_prints_as_a_table_of_eighty_columns(report):
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "Generating: 5 tokens in 5 steps" in text
    line = next(line for line in text.splitlines() if line.startswith("waiting for the drive"))
    assert float(line.split()[-2]) == pytest.approx(1e3 * report.decode.tax_s[Cause.DRIVE] / 5, abs=0.01)
    assert "set by the drive" in text


def test_nothing_measured_is_said_so(make_cache):
    assert str(make_cache().tax) == "Nothing measured yet: no step has been taken."


def test_its_json_adds_up(report, tmp_path):
    report.to_json(tmp_path / "tax.json")
    figures = json.loads((tmp_path / "tax.json").read_text())
    decode, steps = figures["decode"], figures["decode_steps"]
    assert len(steps) == decode["steps"] == 5
    assert sum(step["wall_s"] for step in steps) == pytest.approx(decode["wall_s"])
    for cause in map(str, Cause):
        assert sum(step["tax_s"][cause] for step in steps) == pytest.approx(decode["tax_s"][cause])
    assert decode["compute_s"] + decode["total_tax_s"] == pytest.approx(decode["wall_s"])
    assert decode["tax_share"] == pytest.approx(decode["total_tax_s"] / decode["compute_s"])
    assert decode["floor_s"] == max(decode["compute_s"], decode["reading_s"])
    assert decode["efficiency"] == pytest.approx(decode["floor_s"] / decode["wall_s"])
    assert decode["p50_s"] == sorted(step["wall_s"] for step in steps)[2]
    assert decode["p95_s"] == max(step["wall_s"] for step in steps)
    assert figures["written_bytes"] == LAYERS * 64 * 2 * 2 * 16 * 4


def test_a_report_is_a_snapshot(make_cache):
    cache = filled(make_cache)
    forward(cache, 1)
    report = cache.tax
    before = json.dumps(report.to_dict())
    forward(cache, 1)
    assert json.dumps(report.to_dict()) == before


def test_there_must_be_something_to_draw(make_cache, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no token has been generated"):
        make_cache().tax.plot(tmp_path / "tax.png")


def test_it_draws_or_says_what_is_missing(report, tmp_path):
    path = tmp_path / "tax.png"
    if importlib.util.find_spec("matplotlib"):
        report.plot(path)
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        with pytest.raises(ImportError, match="pip install"):
            report.plot(path)


def test_a_copy_of_a_cache_counts_for_itself(make_cache):
    import copy

    cache = filled(make_cache)
    with copy.deepcopy(cache) as copied:
        forward(copied, 1)
        assert copied.tax.decode.steps == 1
    assert cache.tax.decode is None


def test_the_steps_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("nvme_cache.meter._MOST_STEPS", 3)
    meter = Meter()
    for past in range(5):
        meter.begin_step(past, 1, is_prefill=False)
    assert [step.past_length for step in meter.steps] == [2, 3, 4]
    assert TaxReport(meter).decode.steps == 3
