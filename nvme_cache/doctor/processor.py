"""What the processor gives to copying and checking blocks."""

import os
import sys
from dataclasses import dataclass

import torch
import xxhash

from nvme_cache.bench.machine import cpu_name
from nvme_cache.bench.measure import Rounds, median_rates
from nvme_cache.bench.rawfile import touched_buffer
from nvme_cache.cgroup import cpu_quota
from nvme_cache.machine import copy_rate
from nvme_cache.transfer import transfer_for

_BUFFER_BYTES = 128 << 20  # what comes from the drive is not in the processor's cache either
_ROUNDS = Rounds(budget_s=0.3)


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """Cores and their rates.

    Attributes:
        name: What the processor calls itself.
        cores: Cores this process may run on.
        quota_cores: Cores' worth of time its control group may take; None without quota.
        copy_bytes_per_s: Rate at which torch copies memory with the threads it has.
        verify_bytes_per_s: Rate at which one core checks blocks.
        switch_interval_s: How long a thread may keep the interpreter while others wait for it.
    """

    name: str
    cores: int
    quota_cores: float | None
    copy_bytes_per_s: float
    verify_bytes_per_s: float
    switch_interval_s: float

    @property
    def usable_cores(self) -> float:
        """Cores' worth of time this process gets."""
        return self.cores if self.quota_cores is None else min(self.cores, self.quota_cores)


def processor_facts() -> ProcessorFacts:
    """What this process gets of the processor, measured for a third of a second."""
    source, target = touched_buffer(_BUFFER_BYTES), touched_buffer(_BUFFER_BYTES)

    def verify() -> int:
        xxhash.xxh3_64_intdigest(source.view)
        return source.nbytes

    return ProcessorFacts(
        name=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        quota_cores=cpu_quota(),
        copy_bytes_per_s=copy_rate(transfer_for(torch.device("cpu")), target.bytes, source.bytes),
        verify_bytes_per_s=median_rates({"verify": verify}, _ROUNDS)["verify"],
        switch_interval_s=sys.getswitchinterval(),
    )
