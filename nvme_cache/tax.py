"""The per-token tax of paging: the formula of the article the project starts from, and a model of our own.

A decode step reads every cached byte once. What that costs beside the model's own work is the tax; the least that
physics allows a step to take is the floor.
"""

import math
import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from transformers import PreTrainedConfig

from .errors import ConfigurationError
from .footprint import Footprint, footprint_of, read_config
from .quantization import QuantizationConfig, parse_quantization

Bound: TypeAlias = Literal["compute", "nvme", "pcie"]

_ROUNDING = 1e-9  # what sums of shares may be off
_RATED_BYTES = 600e12  # terabytes written that a common 1 TB drive is rated for


def per_token_tax(
    context_len: int, block_size_kb: float, pcie_bw_gbps: float, nvme_latency_us: float, layers: int
) -> float:
    """The article's estimate of what paging costs a token, in microseconds, unchanged. For plans use `predict`.

    What is wrong with it: it divides bits by bytes per second, so that PCIe looks eight times slower; it moves one
    block over PCIe where it says one a layer; it takes one block a layer for all that attention reads, so that neither
    the context nor the drive's rate plays a part; and it overlaps nothing.

    Args:
        context_len: Tokens of context; has no influence.
        block_size_kb: Size of a block in KiB.
        pcie_bw_gbps: PCIe bandwidth in GB/s.
        nvme_latency_us: Latency of one read in microseconds.
        layers: Layers of the model.

    Example:
        >>> per_token_tax(4096, 512, 25, 100, 32)
        3387.77216
    """
    pcie_us = block_size_kb * 1024 * 8 / (pcie_bw_gbps * 1e9) * 1e6
    return pcie_us + nvme_latency_us * layers + 20


@dataclass(frozen=True, slots=True)
class Prediction:
    """What decoding one step costs: one token of every batch row, or as many as are accepted per sweep.

    Attributes:
        token_bytes: Bytes of paged keys and values per token and batch row, as stored.
        device_bytes: Bytes of blocks in the device tier.
        host_bytes: Bytes of blocks in the host tier.
        nvme_bytes: Bytes of blocks on NVMe; a prompt of this length writes as many.
        resident_bytes: Bytes of the layers that are not paged.
        read_bytes: Bytes read from NVMe in a step.
        transferred_bytes: Bytes that cross PCIe in a step; 0 where the device is the host.
        compute_s: Seconds a step takes without paging.
        floor_s: Seconds physics allows: of compute, NVMe and PCIe the longest, or their sum if they do not overlap.
        bound: Which of the three takes longest.
        step_s: Seconds a step takes: the floor, with latencies and the processor's own work for paging.
        tax_s: Seconds of a step that paging costs.
        tax_share: The same as a share of compute.
        tokens_per_s: Tokens of all batch rows per second.
        prompts_per_drive: Prompts of this length until the drive's rated endurance is spent; infinite if none is
            written.
    """

    token_bytes: float
    device_bytes: float
    host_bytes: float
    nvme_bytes: float
    resident_bytes: int
    read_bytes: float
    transferred_bytes: float
    compute_s: float
    floor_s: float
    bound: Bound
    step_s: float
    tax_s: float
    tax_share: float
    tokens_per_s: float
    prompts_per_drive: float


def predict(
    model: Footprint | PreTrainedConfig | str | os.PathLike[str],
    *,
    context: int,
    compute_s: float,
    nvme_bytes_per_s: float,
    nvme_latency_s: float = 0.0,
    pcie_bytes_per_s: float | None = None,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    quantization: str | QuantizationConfig | None = None,
    device_share: float = 0.0,
    host_share: float = 0.0,
    overlap: bool = True,
    selected_share: float = 1.0,
    tokens_per_sweep: float = 1.0,
    software_s: float = 0.0,
    compute_cores: float = 0.0,
    read_cpu_s_per_byte: float = 0.0,
    copy_cpu_s_per_byte: float = 0.0,
    dequantize_cpu_s_per_byte: float = 0.0,
    rated_bytes: float = _RATED_BYTES,
) -> Prediction:
    """What a decode step with a paged cache costs.

    Three things take time: compute, reading blocks from NVMe, moving blocks over PCIe. Overlapped, a step takes as
    long as the longest; else, their sum. A block of the device tier crosses no link, one of the host tier crosses
    PCIe, one on NVMe is read and crosses PCIe. The tail, less than a block, is left out.

    The processor's own work for paging delays what computes beside it: `software_s` of Python for every paged layer,
    and where the model computes on the processor, the CPU seconds that reading, checking, copying and dequantizing
    take, shared out over its cores. Each layer waits once for the drive's latency; overlapped, behind compute like the
    reading itself.

    Args:
        model: What the cache holds, or the model's config, or its folder or id on the hub.
        context: Tokens in the cache, of each batch row.
        compute_s: Seconds that the model takes for a step when everything lies on the device.
        nvme_bytes_per_s: What the drive reads.
        nvme_latency_s: Seconds until the first byte of a read arrives.
        pcie_bytes_per_s: What the link moves from host to device; None where the device is the host.
        batch_size: Batch rows.
        dtype: Of keys and values; None for the config's. A footprint has its own.
        quantization: How blocks are stored, as for `OffloadedNVMeCache`.
        device_share: Share of the blocks' bytes in the device tier.
        host_share: Share of them in the host tier; the rest is on NVMe.
        overlap: Whether compute, reading and moving go on at the same time.
        selected_share: Share of the blocks that attention looks at.
        tokens_per_sweep: Tokens accepted in a step on average, with prompt lookup or an assistant.
        software_s: Seconds of Python per paged layer and step.
        compute_cores: Processor cores that the model computes on; 0 for an accelerator.
        read_cpu_s_per_byte: CPU seconds per byte read from NVMe and checked.
        copy_cpu_s_per_byte: CPU seconds per byte copied from memory into a slot, exact blocks only.
        dequantize_cpu_s_per_byte: CPU seconds per byte of keys and values that quantized blocks become in a slot.
        rated_bytes: Bytes that may be written to the drive in its life.

    Raises:
        ConfigurationError: a share is not one, a rate is not positive, or `model` has no footprint.
    """
    _check_shares(device_share, host_share, selected_share)
    _check_positive(
        context=context, batch_size=batch_size, compute_s=compute_s, nvme_bytes_per_s=nvme_bytes_per_s,
        pcie_bytes_per_s=1.0 if pcie_bytes_per_s is None else pcie_bytes_per_s,
        tokens_per_sweep=tokens_per_sweep, rated_bytes=rated_bytes,
    )  # fmt: skip
    _check_at_least_0(
        nvme_latency_s=nvme_latency_s, software_s=software_s, compute_cores=compute_cores,
        read_cpu_s_per_byte=read_cpu_s_per_byte, copy_cpu_s_per_byte=copy_cpu_s_per_byte,
        dequantize_cpu_s_per_byte=dequantize_cpu_s_per_byte,
    )  # fmt: skip
    footprint = _footprint(model, dtype)
    quantized = parse_quantization(quantization)
    token_bytes = footprint.stored_token_bytes(quantized)
    sealed_bytes = token_bytes * context * batch_size
    device_bytes, host_bytes = sealed_bytes * device_share, sealed_bytes * host_share
    rest = 1 - device_share - host_share
    nvme_bytes = sealed_bytes * rest if rest > _ROUNDING else 0.0
    read_bytes, copied_bytes = nvme_bytes * selected_share, (device_bytes + host_bytes) * selected_share
    transferred_bytes = 0.0 if pcie_bytes_per_s is None else (nvme_bytes + host_bytes) * selected_share
    num_layers = len(footprint.paged)

    physical: dict[Bound, float] = {
        "compute": compute_s,
        "nvme": read_bytes / nvme_bytes_per_s,
        "pcie": 0.0 if pcie_bytes_per_s is None else transferred_bytes / pcie_bytes_per_s,
    }
    own_s = software_s * num_layers
    if compute_cores:
        laid_out_s = copied_bytes * copy_cpu_s_per_byte
        if quantized is not None:
            laid_out_bytes = footprint.paged_token_bytes * context * batch_size * selected_share
            laid_out_s = laid_out_bytes * dequantize_cpu_s_per_byte
        own_s += (read_bytes * read_cpu_s_per_byte + laid_out_s) / compute_cores
    latency_s = nvme_latency_s * num_layers if read_bytes else 0.0
    real = {**physical, "compute": compute_s + own_s, "nvme": physical["nvme"] + latency_s}

    together = max if overlap else sum
    step_s = together(real.values())
    return Prediction(
        token_bytes=token_bytes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        nvme_bytes=nvme_bytes,
        resident_bytes=footprint.resident_bytes(context, batch_size),
        read_bytes=read_bytes,
        transferred_bytes=transferred_bytes,
        compute_s=compute_s,
        floor_s=together(physical.values()),
        bound=max(physical, key=lambda name: physical[name]),
        step_s=step_s,
        tax_s=step_s - compute_s,
        tax_share=(step_s - compute_s) / compute_s,
        tokens_per_s=batch_size * tokens_per_sweep / step_s,
        prompts_per_drive=rated_bytes / nvme_bytes if nvme_bytes else math.inf,
    )


def _check_shares(device_share: float, host_share: float, selected_share: float) -> None:
    shares = {"device_share": device_share, "host_share": host_share, "selected_share": selected_share}
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ConfigurationError(f"{name}={value!r} must be between 0 and 1")
    if device_share + host_share > 1 + _ROUNDING:
        raise ConfigurationError(f"device_share={device_share!r} and host_share={host_share!r} are more than all")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:  # false for NaN too
            raise ConfigurationError(f"{name}={value!r} must be greater than 0")


def _check_at_least_0(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ConfigurationError(f"{name}={value!r} must be at least 0")


def _footprint(model: Footprint | PreTrainedConfig | str | os.PathLike[str], dtype: torch.dtype | None) -> Footprint:
    if isinstance(model, Footprint):
        if dtype is not None:
            raise ConfigurationError(f"dtype={dtype} comes too late for a footprint; make it with that dtype")
        return model
    return footprint_of(model if isinstance(model, PreTrainedConfig) else read_config(model), dtype)
