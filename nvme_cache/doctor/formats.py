"""What quantized blocks give here: how fast keys and values come out of them."""

from dataclasses import dataclass

import torch

from nvme_cache.machine import dequantize_rate
from nvme_cache.placement import BLOCK_SIZE
from nvme_cache.quantization import FORMATS, QuantizationConfig, stored_token_bytes
from nvme_cache.states import LayerSpec, StateSpec

_STATES = StateSpec(8, 128, torch.bfloat16)
_SPEC = LayerSpec(_STATES, _STATES)


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """One way to store blocks.

    Attributes:
        name: "exact", or a format.
        ratio: How many times fewer bytes than bf16, with heads of 128.
        dequantize_bytes_per_s: Keys and values that a core makes of it; None where nothing is to be done, or the
            accelerator does it.
        read_bytes_per_s: Keys and values that come from the drive so, if nothing else uses the processor.
    """

    name: str
    ratio: float
    dequantize_bytes_per_s: float | None
    read_bytes_per_s: float


def format_facts(drive_bytes_per_s: float, cores: float, *, on_device: bool) -> list[FormatFacts]:
    """Every format, exact blocks first; measured for half a second where the processor dequantizes.

    Args:
        drive_bytes_per_s: What the drive reads.
        cores: That dequantize.
        on_device: Whether an accelerator does that.
    """
    facts = [FormatFacts("exact", 1.0, None, drive_bytes_per_s)]
    for name in FORMATS:
        stored = stored_token_bytes(_SPEC, QuantizationConfig(key=name, value=name), BLOCK_SIZE)
        ratio = _SPEC.nbytes(1) / stored
        rate = None if on_device else dequantize_rate(name, torch.bfloat16)
        most = drive_bytes_per_s * ratio
        facts.append(FormatFacts(name, ratio, rate, most if rate is None else min(most, rate * cores)))
    return facts
