"""Random sequences of everything a cache can be asked, against `DynamicCache`, bit for bit after every step."""

import copy
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nvme_cache import OffloadedNVMeCache, QuantizationConfig

from .conftest import MIXED, stock_for, tiers

HEADS, WIDTH = 2, 8
TIERS = tiers(mixed_bytes=6000)
OTHERS = QuantizationConfig(key="int2", value="float8", axis_key="token", axis_value="channel", sink_tokens=0)


class CacheMachine(RuleBasedStateMachine):
    """Ours and transformers' cache, given the same calls. `modes` are left and entered freely."""

    QUANTIZATIONS = (None,)

    @initialize(
        data=st.data(),
        layers=st.integers(1, 5),
        block_size=st.sampled_from([1, 3, 8, 64]),
        prefetch_depth=st.integers(0, 4),
        tiers=st.sampled_from(sorted(TIERS)),
        widths=st.sampled_from([(8, 8), (12, 5), (64, 64)]),
    )
    def begin(self, data, layers, block_size, prefetch_depth, tiers, widths):
        self.folder = tempfile.TemporaryDirectory()
        options = {"host_budget": 0, "device_budget": 0} | TIERS[tiers]
        options["quantization"] = data.draw(st.sampled_from(self.QUANTIZATIONS))
        self.ours = OffloadedNVMeCache(
            offload_dir=self.folder.name, block_size=block_size, prefetch_depth=prefetch_depth, **options
        )
        self.stock = stock_for(self.ours)
        self.layers, self.batch, self.widths = layers, 2, widths
        self.others = []
        self.generator = torch.Generator().manual_seed(0)

    def states(self, length):
        return [
            torch.randn(self.batch, length, HEADS, width, generator=self.generator).transpose(1, 2)
            for width in self.widths
        ]

    @rule(
        length=st.integers(0, 5) | st.integers(0, 70),
        mode=st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]),
    )
    def forward(self, length, mode):
        with mode():
            held = []
            for layer_idx in range(self.layers):
                states = self.states(length)
                held.append(
                    (
                        self.ours.update(*states, layer_idx),
                        self.stock.update(*(part.clone() for part in states), layer_idx),
                    )
                )
            for ours, stock in held:
                assert all(map(torch.equal, ours, stock))
            # Upstream cannot grow an inference tensor outside inference mode.
            for layer in self.stock.layers:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    @rule(count=st.integers(0, 10) | st.integers(0, 100))
    def crop(self, count):
        held = self.stock.get_seq_length()
        self.ours.crop(-count)
        self.stock.crop(-min(count, held)) if held else None

    @precondition(lambda self: self.stock.get_seq_length())
    @rule(data=st.data())
    def reorder(self, data):
        rows = torch.tensor(
            data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        )
        self.ours.reorder_cache(rows)
        self.stock.reorder_cache(rows)

    @precondition(lambda self: self.stock.get_seq_length() and self.batch <= 3)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats):
        self.ours.batch_repeat_interleave(repeats)
        self.stock.batch_repeat_interleave(repeats)
        self.batch *= repeats

    @precondition(lambda self: self.stock.get_seq_length())
    @rule(data=st.data())
    def select(self, data):
        rows = torch.tensor(data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=3)))
        self.ours.batch_select_indices(rows)
        self.stock.batch_select_indices(rows)
        self.batch = len(rows)

    @rule()
    def reset(self):
        self.ours.reset()
        self.stock = stock_for(self.ours)  # whose own reset kept the length in older versions

    @precondition(lambda self: len(self.others) < 2)
    @rule(swap=st.booleans())
    def fork(self, swap):
        other = copy.deepcopy(self.ours), copy.deepcopy(self.stock), self.batch
        if swap:
            other, (self.ours, self.stock) = (self.ours, self.stock, self.batch), other[:2]
        self.others.append(other)

    @precondition(lambda self: self.others)
    @rule(close=st.booleans())
    def return_to_a_fork(self, close):
        other = self.others.pop(0)
        if close:
            self.ours.close()
        else:
            self.others.append((self.ours, self.stock, self.batch))
        self.ours, self.stock, self.batch = other

    @rule(data=st.data())
    def load_and_assign(self, data):
        if not self.stock.layers or not self.stock.get_seq_length():
            return
        layer_idx = data.draw(st.integers(0, self.layers - 1))
        ours, stock = self.ours.layers[layer_idx], self.stock.layers[layer_idx]
        assert torch.equal(ours.keys, stock.keys)
        assert torch.equal(ours.values, stock.values)
        ours.keys, ours.values = ours.keys + 1, ours.values - 1
        begun_with_them = stock_for(self.ours)
        begun_with_them.update(stock.keys + 1, stock.values - 1, 0)
        self.stock.layers[layer_idx] = begun_with_them.layers[0]

    @invariant()
    def same_lengths(self):
        if hasattr(self, "ours"):
            for layer_idx in range(len(self.stock.layers)):
                assert self.ours.get_seq_length(layer_idx) == self.stock.get_seq_length(layer_idx)
                assert self.ours.get_mask_sizes(3, layer_idx) == self.stock.get_mask_sizes(3, layer_idx)

    def teardown(self):
        if hasattr(self, "ours"):
            for layer_idx, layer in enumerate(self.stock.layers):
                if self.stock.get_seq_length():
                    assert torch.equal(self.ours.layers[layer_idx].keys, layer.keys)
            counters = self.ours._pager.meter
            assert counters.written_bytes <= counters.sealed_bytes
            for cache in (self.ours, *(other[0] for other in self.others)):
                cache.close()
            with self.folder as folder:
                from pathlib import Path

                assert list(Path(folder).iterdir()) == []


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
TestStateMachine = CacheMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, suppress_health_check=CHECKS
)


class QuantizedMachine(CacheMachine):
    """As its base, with blocks stored in few bits."""

    QUANTIZATIONS = ("int8", MIXED, OTHERS)


TestQuantized = QuantizedMachine.TestCase
TestQuantized.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=CHECKS)


@pytest.mark.slow
class TestStateMachineLong(CacheMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS)


@pytest.mark.slow
class TestQuantizedLong(QuantizedMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS)
