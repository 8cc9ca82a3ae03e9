"""The accelerator and the link to it."""

from dataclasses import dataclass

import torch

from nvme_cache.machine import copy_rate
from nvme_cache.transfer import accelerator, transfer_for

_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """The current accelerator.

    Attributes:
        name: What it calls itself.
        total_bytes: Its memory.
        free_bytes: What is left of that.
        to_device_bytes_per_s: Rate of copies from pinned host memory; None where no memory could be pinned.
        from_device_bytes_per_s: Rate of copies to pinned host memory; None likewise.
    """

    name: str
    total_bytes: int
    free_bytes: int
    to_device_bytes_per_s: float | None
    from_device_bytes_per_s: float | None


def accelerator_facts() -> AcceleratorFacts | None:
    """What torch finds; None if it finds none."""
    device = accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    free_bytes, total_bytes = module.mem_get_info(device)
    try:
        rates = _copy_rates(device)
    except RuntimeError:
        rates = {}
    return AcceleratorFacts(
        module.get_device_name(device), total_bytes, free_bytes, rates.get("to device"), rates.get("from device")
    )


def _copy_rates(device: torch.device) -> dict[str, float]:
    transfer = transfer_for(device)
    host, there = transfer.host_memory(_BUFFER_BYTES), transfer.device_memory(_BUFFER_BYTES)
    return {"to device": copy_rate(transfer, there, host), "from device": copy_rate(transfer, host, there)}
