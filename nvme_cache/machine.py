"""What a machine gives a model and its cache: drive, link, memory, compute; as told, else measured."""

import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from .cgroup import available_bytes
from .drive import Drive
from .errors import ConfigurationError
from .footprint import Footprint
from .placement import BLOCK_SIZE
from .quantization import QuantizationConfig
from .states import LayerSpec, StateSpec
from .store import Store
from .transfer import Transfer, accelerator, transfer_for
from .units import in_bytes, parse_rate, parse_size

_TEST_BYTES = 128 << 20  # more than processors cache
_TEST_S = 0.1
_MATRIX = 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """What a model and its cache have to run on.

    Attributes:
        nvme_bytes_per_s: What the drive reads.
        pcie_bytes_per_s: What the link moves to the device; None where the model computes on the host.
        copy_bytes_per_s: What copies in memory move where the model computes; None where nothing needs it.
        dequantize_bytes_per_s: Keys and values that a core dequantizes, by format; empty where the device does it.
        flops_per_s: Operations that matrix products do where the model computes; None if that is not this machine.
        compute_s: Seconds of compute per step; None for as long as reading weights and cache from memory takes.
        memory_bytes: Free where the model computes; None if unknown.
        host_bytes: Most that a host budget may be.
        disk_bytes: Free for shards.
        assumptions: Where each figure comes from, in words.
    """

    nvme_bytes_per_s: float
    pcie_bytes_per_s: float | None
    copy_bytes_per_s: float | None
    dequantize_bytes_per_s: Mapping[str, float]
    flops_per_s: float | None
    compute_s: float | None
    memory_bytes: int | None
    host_bytes: int
    disk_bytes: int
    assumptions: tuple[str, ...] = ()

    def step_compute_s(self, footprint: Footprint, context: int, batch_size: int) -> float:
        """Seconds of compute per step without paging."""
        if self.compute_s is not None:
            return self.compute_s
        assert self.copy_bytes_per_s is not None
        cached = footprint.paged_token_bytes * context * batch_size + footprint.resident_bytes(context, batch_size)
        # A copy reads and writes each byte: what only reads is twice as fast.
        return (footprint.step_weight_bytes(batch_size) + cached) / (2 * self.copy_bytes_per_s)


def machine_of(
    *,
    nvme: str | None,
    pcie: str | None,
    compute_ms: float | None,
    memory: int | str | None,
    disk_budget: int | str | None,
    formats: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> Machine:
    """The machine as described; what is None is measured on this one.

    Args:
        nvme: Rate of the drive, such as "7GB/s".
        pcie: Rate of the link, likewise; "none" if the model computes on the host.
        compute_ms: Milliseconds of compute per step.
        memory: Bytes free where the model computes, such as "24GiB".
        disk_budget: Most bytes of shards, likewise.
        formats: Of quantized blocks, whose dequantizing counts where the model computes on the host.
        dtype: Of keys and values.

    Raises:
        ConfigurationError: a figure is none.
        OffloadDirectoryError: the default folder for shards cannot be used.
    """
    if compute_ms is not None and not 0 < compute_ms < math.inf:
        raise ConfigurationError(f"compute_ms={compute_ms!r} must be milliseconds, more than 0")
    here, host = accelerator(), torch.device("cpu")
    said: list[str] = []
    nvme_rate, disk_bytes = _drive(nvme, disk_budget, said)

    pcie_rate: float | None = None
    if pcie is None and here is not None:
        pcie_rate = _link_rate(here)
        said.append(f"link: {in_bytes(pcie_rate)}/s to {here}, measured")
    elif pcie in (None, "none"):
        here = None
        said.append("link: none, the model computes on the host")
    else:
        pcie_rate = parse_rate("pcie", str(pcie))
        said.append(f"link: {in_bytes(pcie_rate)}/s, as given")

    device = here or host
    copies: float | None = None
    if compute_ms is None or pcie_rate is None:
        copies = _copy_rate(device)
    if compute_ms is not None:
        said.append(f"compute: {compute_ms:g} ms a step, as given")
    elif copies is not None:
        said.append(
            "compute: assumed, as the least it can be, to be the time to read weights and cache at "
            f"{in_bytes(2 * copies)}/s, twice what a copy in memory moves ({device.type}); --compute-ms tells better"
        )

    memory_bytes: int | None = None
    if memory is not None:
        memory_bytes = parse_size("memory", memory)
    elif here is not None or pcie_rate is None:
        memory_bytes = _free_bytes(device)
    else:
        said.append("memory: not checked, for the device is not of this machine; give --memory for that")
    return Machine(
        nvme_bytes_per_s=nvme_rate,
        pcie_bytes_per_s=pcie_rate,
        copy_bytes_per_s=copies,
        dequantize_bytes_per_s=_dequantize_rates(formats, dtype, said) if pcie_rate is None else {},
        flops_per_s=flops_rate(device, dtype) if here is not None or pcie_rate is None else None,
        compute_s=None if compute_ms is None else compute_ms / 1e3,
        memory_bytes=memory_bytes,
        host_bytes=available_bytes(),
        disk_bytes=disk_bytes,
        assumptions=tuple(said),
    )


def _drive(nvme: str | None, disk_budget: int | str | None, said: list[str]) -> tuple[float, int]:
    """Rate and room of the drive."""
    room = None if disk_budget is None else parse_size("disk_budget", disk_budget)
    if nvme is not None:
        rate: float = parse_rate("nvme", nvme)
        said.append(f"drive: {in_bytes(rate)}/s, as given")
    if nvme is None or room is None:
        with closing(Store(None, None)) as store:
            if room is None:
                room = shutil.disk_usage(store.path).free
            if nvme is None:
                rate = store.drive.read_bytes_per_s
                how = "assumed, for it could not be tested" if store.drive == Drive() else "measured"
                said.append(f"drive: {in_bytes(rate)}/s, {how} under {store.path.parent}")
    return rate, room


def _copy_rate(device: torch.device) -> float:
    """Bytes per second that copies within the device's memory move; each is read once and written once."""
    transfer = transfer_for(device)
    return copy_rate(transfer, transfer.device_memory(_TEST_BYTES), transfer.device_memory(_TEST_BYTES))


def _dequantize_rates(formats: Sequence[str], dtype: torch.dtype, said: list[str]) -> dict[str, float]:
    rates = {name: dequantize_rate(name, dtype) for name in formats}
    if rates:
        words = ", ".join(f"{name} {in_bytes(rate)}/s" for name, rate in rates.items())
        said.append(f"dequantizing: {words} of keys and values a core, measured")
    return rates


def _link_rate(device: torch.device) -> float:
    """Bytes per second that reach the device from pinned host memory."""
    transfer = transfer_for(device)
    return copy_rate(transfer, transfer.device_memory(_TEST_BYTES), transfer.host_memory(_TEST_BYTES))


def _free_bytes(device: torch.device) -> int:
    """Bytes of the device's memory that are free now."""
    if device.type == "cpu":
        return available_bytes()
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def copy_rate(transfer: Transfer, target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second at which `source` is copied to `target`, as the cache copies."""
    source.fill_(1)  # memory never written may all be one page
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 3 or time.perf_counter() - began < _TEST_S:
        started = time.perf_counter()
        with transfer.side_stream(transfer.mark()):
            transfer.copy(target, source)
        transfer.record().synchronize()
        samples.append(target.nbytes / (time.perf_counter() - started))
    return statistics.median(samples[1:])  # the first also faults the target in


def flops_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of large matrix products, a multiplication and an addition being two."""
    left, right = (torch.ones(_MATRIX, _MATRIX, dtype=dtype, device=device) for _ in range(2))
    transfer = transfer_for(device)
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 3 or time.perf_counter() - began < _TEST_S:
        started = time.perf_counter()
        left @ right
        transfer.mark().synchronize()
        samples.append(2 * _MATRIX**3 / (time.perf_counter() - started))
    return statistics.median(samples[1:])


def dequantize_rate(name: str, dtype: torch.dtype) -> float:
    """Bytes of keys and values per CPU second that blocks in a format become, as readers lay them out on the host."""
    spec = LayerSpec(StateSpec(8, 128, dtype), StateSpec(8, 128, dtype))
    blocks = torch.randn(32, 1, 8, BLOCK_SIZE, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    codecs = QuantizationConfig(key=name, value=name).codecs(spec, BLOCK_SIZE)
    stored = []
    for codec in codecs:
        parts = [torch.empty(part.shape, dtype=part.dtype) for part in codec.parts(blocks.shape, dtype)]
        codec.encode(blocks, parts)
        stored.append((codec, parts))
    states, threads = torch.empty_like(blocks), torch.get_num_threads()
    samples: list[float] = []
    began = time.perf_counter()
    torch.set_num_threads(1)  # several would wait for each other, which costs CPU time too
    try:
        while len(samples) < 3 or time.perf_counter() - began < _TEST_S:
            started_s = time.process_time()
            for codec, parts in stored:
                codec.decode(parts, states)
            samples.append(2 * states.nbytes / (time.process_time() - started_s))
    finally:
        torch.set_num_threads(threads)
    return statistics.median(samples[1:])
