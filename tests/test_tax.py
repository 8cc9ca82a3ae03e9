"""The article's formula to the digit; our model against closed forms, properties and a table of physical limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_cache.errors import ConfigurationError
from nvme_cache.footprint import Footprint, LayerFootprint
from nvme_cache.states import LayerSpec, StateSpec
from nvme_cache.tax import per_token_tax, predict

from .test_footprint import LLAMA_8B

STATES = StateSpec(8, 128, torch.bfloat16)
LLAMA = Footprint((LayerFootprint(is_paged=True, spec=LayerSpec(STATES, STATES)),) * 32, 16 << 30)
# The table below takes 8.125 bits for a number in int8, a scale for 128. Our keys have one for a block of 256.
INT8_BITS, INT8_BITS_OF_TABLE = (8 + 16 / 256 + 8 + 16 / 128) / 2, 8.125
# Milliseconds of reading per step at 7 GB/s and the tokens/s they allow, with 0, 50 and 90 % of the blocks resident;
# decimals as the table gives them.
LIMITS = {
    (1 << 15, None): (["614", "307", "61"], ["1.63", "3.26", "16.3"]),
    (1 << 15, "int8"): (["312", "156", "31"], ["3.21", "6.4", "32"]),
    (1 << 15, "int4"): (["173", "86", "17"], ["5.8", "11.6", "58"]),
    (1 << 17, None): (["2454", "1227", "245"], ["0.41", "0.81", "4.1"]),
    (1 << 17, "int8"): (["1246", "623", "125"], ["0.80", "1.6", "8.0"]),
    (1 << 17, "int4"): (["690", "345", "69"], ["1.45", "2.9", "14.5"]),
    (1 << 20, None): (["19634", "9817", "1963"], ["0.05", "0.10", "0.51"]),
    (1 << 20, "int8"): (["9970", "4985", "997"], ["0.10", "0.20", "1.0"]),
    (1 << 20, "int4"): (["5522", "2761", "552"], ["0.18", "0.36", "1.8"]),
}


def rounds_to(value, text):
    """Whether `value`, rounded up or down, is what `text` says."""
    digit = 10.0 ** -len(text.partition(".")[2])
    return abs(value - float(text)) <= digit * 0.51


def test_the_articles_example():
    assert per_token_tax(4096, 512, 25, 100, 32) == 512 * 1024 * 8 / 25e9 * 1e6 + 3200 + 20
    assert f"{per_token_tax(4096, 512, 25, 100, 32):.5f}" == "3387.77216"
    assert per_token_tax(1 << 20, 512, 25, 100, 32) == per_token_tax(1, 512, 25, 100, 32)


def test_the_table_of_limits_rounds_numbers_of_the_model():
    assert rounds_to(613.566, "614")
    assert not rounds_to(613.4, "614")
    assert rounds_to(0.807, "0.81")


@pytest.mark.parametrize(("context", "quantization"), LIMITS)
def test_physical_limits_of_llama(context, quantization):
    for share, read_ms, rate in zip((0.0, 0.5, 0.9), *LIMITS[context, quantization], strict=True):
        prediction = predict(
            LLAMA, context=context, quantization=quantization, device_share=share, compute_s=1e-6, nvme_bytes_per_s=7e9
        )
        ours = INT8_BITS / INT8_BITS_OF_TABLE if quantization == "int8" else 1.0
        assert rounds_to(prediction.floor_s * 1e3 / ours, read_ms)
        assert rounds_to(prediction.tokens_per_s * ours, rate)
        assert prediction.bound == "nvme"


def test_a_block_crosses_the_links_of_its_tier():
    sealed = 1000 * 2 * 131_072
    prediction = predict(
        LLAMA, context=1000, batch_size=2, device_share=0.5, host_share=0.3, compute_s=0.25,
        nvme_bytes_per_s=1e9, pcie_bytes_per_s=2e9, overlap=False, nvme_latency_s=1e-4, software_s=1e-3,
    )  # fmt: skip
    assert prediction.device_bytes == sealed * 0.5
    assert prediction.host_bytes == sealed * 0.3
    assert prediction.nvme_bytes == prediction.read_bytes == pytest.approx(sealed * 0.2)
    assert prediction.transferred_bytes == pytest.approx(sealed * 0.5)
    floor = 0.25 + sealed * 0.2 / 1e9 + sealed * 0.5 / 2e9
    assert prediction.floor_s == pytest.approx(floor)
    assert prediction.step_s == pytest.approx(floor + 32 * (1e-4 + 1e-3))
    assert prediction.tax_s == pytest.approx(prediction.step_s - 0.25)
    assert prediction.tax_share == pytest.approx(prediction.tax_s / 0.25)
    assert prediction.tokens_per_s == pytest.approx(2 / prediction.step_s)
    assert prediction.prompts_per_drive == pytest.approx(600e12 / (sealed * 0.2))
    assert prediction.bound == "compute"


def test_overlapped_the_longest_counts():
    links = {"context": 10_000, "compute_s": 0.1, "nvme_bytes_per_s": 7e9, "pcie_bytes_per_s": 25e9}
    drive = predict(LLAMA, **links)
    assert drive.step_s == drive.floor_s == 10_000 * 131_072 / 7e9
    assert drive.bound == "nvme"
    link = predict(LLAMA, **links | {"compute_s": 0.01}, host_share=1.0)
    assert link.floor_s == 10_000 * 131_072 / 25e9
    assert link.bound == "pcie"
    assert link.prompts_per_drive == math.inf
    here = predict(LLAMA, **links | {"pcie_bytes_per_s": None}, host_share=1.0)
    assert (here.transferred_bytes, here.tax_s, here.bound) == (0, 0, "compute")


def test_the_processors_work_delays_a_model_that_computes_on_it():
    given = {"context": 1000, "compute_s": 1.0, "nvme_bytes_per_s": 7e9, "host_share": 0.75}
    costs = {"read_cpu_s_per_byte": 3e-10, "copy_cpu_s_per_byte": 1e-10}
    sealed = 1000 * 131_072
    assert predict(LLAMA, **given, **costs).tax_s == 0
    beside = predict(LLAMA, **given, **costs, compute_cores=2)
    assert beside.tax_s == pytest.approx(sealed * (0.25 * 3e-10 + 0.75 * 1e-10) / 2)
    assert beside.floor_s == 1.0


def test_selection_and_accepted_tokens():
    given = {"context": 100_000, "compute_s": 0.01, "nvme_bytes_per_s": 7e9}
    whole, tenth = predict(LLAMA, **given), predict(LLAMA, **given, selected_share=0.1)
    assert tenth.read_bytes == pytest.approx(whole.read_bytes / 10)
    assert tenth.nvme_bytes == whole.nvme_bytes
    assert predict(LLAMA, **given, tokens_per_sweep=2.5).tokens_per_s == pytest.approx(2.5 * whole.tokens_per_s)


def test_layers_that_stay_resident_cross_nothing():
    quarter = StateSpec(2, 128, torch.bfloat16)
    sliding = LayerFootprint(is_paged=False, spec=LayerSpec(quarter, quarter), window=100)
    mixed = Footprint((*LLAMA.layers, sliding, sliding), 0)
    given = {"context": 5000, "compute_s": 0.01, "nvme_bytes_per_s": 7e9, "batch_size": 3}
    prediction = predict(mixed, **given)
    assert prediction.resident_bytes == 3 * 2 * 100 * 1024
    assert prediction.read_bytes == predict(LLAMA, **given).read_bytes


def test_a_config_or_a_folder_will_do(tmp_path):
    given = {"context": 4096, "compute_s": 0.01, "nvme_bytes_per_s": 7e9}
    LLAMA_8B.save_pretrained(tmp_path)
    expected = predict(LLAMA, **given)
    assert predict(LLAMA_8B, **given) == predict(tmp_path, **given) == expected
    assert predict(LLAMA_8B, **given, dtype=torch.float32).read_bytes == 2 * expected.read_bytes


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"device_share": 0.6, "host_share": 0.5}, "device_share=0.6 and host_share=0.5"),
        ({"selected_share": 1.5}, "selected_share=1.5"),
        ({"nvme_bytes_per_s": 0.0}, "nvme_bytes_per_s"),
        ({"nvme_bytes_per_s": math.nan}, "nvme_bytes_per_s"),
        ({"compute_s": math.nan}, "compute_s"),
        ({"context": -5}, "context=-5"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"tokens_per_sweep": -1.0}, "tokens_per_sweep=-1"),
        ({"nvme_latency_s": -1.0}, "nvme_latency_s=-1"),
        ({"quantization": "int3"}, "quantization='int3'.*int8.*int4.*int2.*float8"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
    ],
)
def test_what_cannot_be_is_named(wrong, named):
    with pytest.raises(ConfigurationError, match=named):
        predict(LLAMA, **{"context": 1, "compute_s": 1.0, "nvme_bytes_per_s": 1e9} | wrong)


@st.composite
def plans(draw):
    shares = st.floats(0, 1)
    device_share = draw(shares)
    return {
        "context": draw(st.integers(1, 1 << 21)),
        "compute_s": draw(st.floats(1e-4, 10)),
        "nvme_bytes_per_s": draw(st.floats(1e8, 1e11)),
        "nvme_latency_s": draw(st.floats(0, 1e-3)),
        "pcie_bytes_per_s": draw(st.none() | st.floats(1e8, 1e11)),
        "batch_size": draw(st.integers(1, 16)),
        "quantization": draw(st.sampled_from([None, "int8", "int4", "int2", "float8"])),
        "device_share": device_share,
        "host_share": draw(shares) * (1 - device_share),
        "selected_share": draw(shares),
        "software_s": draw(st.floats(0, 1e-3)),
        "compute_cores": draw(st.floats(0, 64)),
        "read_cpu_s_per_byte": draw(st.floats(0, 1e-9)),
        "copy_cpu_s_per_byte": draw(st.floats(0, 1e-9)),
        "dequantize_cpu_s_per_byte": draw(st.floats(0, 1e-9)),
    }


@given(plans())
def test_properties(plan):
    overlapped, serial = predict(LLAMA, **plan), predict(LLAMA, **plan, overlap=False)
    for prediction in (overlapped, serial):
        assert prediction.compute_s <= prediction.floor_s <= prediction.step_s
    assert overlapped.step_s <= serial.step_s
    longer = predict(LLAMA, **plan | {"context": 2 * plan["context"]})
    assert longer.step_s >= overlapped.step_s
    assert longer.tokens_per_s <= overlapped.tokens_per_s


@given(plans())
def test_no_tax_on_what_lies_on_the_device(plan):
    plan |= {"device_share": 1.0, "host_share": 0.0, "software_s": 0.0, "compute_cores": 0}
    prediction = predict(LLAMA, **plan)
    assert prediction.tax_s == 0
    assert prediction.bound == "compute"


def test_shares_that_add_up_to_one_leave_nothing_on_the_drive():
    """0.7 and 0.3 do not quite, in floating point."""
    footprint = Footprint((LayerFootprint(True, LayerSpec(STATES, STATES)),), 0, 0)
    found = predict(
        footprint, context=4096, compute_s=0.001, nvme_bytes_per_s=1e9, nvme_latency_s=0.01, device_share=0.7,
        host_share=0.3,
    )  # fmt: skip
    assert found.nvme_bytes == 0
    assert found.prompts_per_drive == math.inf
    assert found.step_s == 0.001
