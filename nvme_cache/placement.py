"""Which tier the next blocks of a layer go to: pure functions over budgets.

Each decode step sweeps all layers in the same order, a cyclic scan that defeats every replacement policy: LRU, FIFO,
CLOCK, LFU and ARC hit nothing when the set is larger than the cache, while a fixed resident subset hits exactly its
share, which is the optimum (Belady). So residency is decided once, when a block is sealed, and never changes; and every
layer gets the same share of a budget, because the reads of one layer then hide behind the compute of its neighbours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

# Without a config the layer count is unknown until the first forward ends. Assuming many keeps the first prompt's
# early layers from taking what the later ones are due.
ASSUMED_LAYERS = 64


BLOCK_SIZE = 256  # tokens, where nothing else is asked for: blocks read at random at the drive's full rate


class Tier(StrEnum):
    """Where a block lives."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of sealed blocks that may stay in device memory and in host memory, over all layers."""

    device_bytes: int
    host_bytes: int


def place(
    num_blocks: int,
    block_bytes: int,
    budgets: Budgets,
    num_layers: int,
    used_by_layer: Mapping[Tier, int],
    used_by_all: Mapping[Tier, int],
) -> dict[Tier, int]:
    """How many of `num_blocks` new blocks of one layer go to each tier.

    Args:
        num_blocks: Blocks to place.
        block_bytes: Size of each, in bytes.
        budgets: What all layers together may use.
        num_layers: How many layers share the budgets.
        used_by_layer: Bytes of this layer's blocks already in each tier.
        used_by_all: Bytes of all layers' blocks already in each tier.

    Returns:
        Counts by tier, fastest first; they add up to `num_blocks`.
    """
    placed: dict[Tier, int] = {}
    left = num_blocks
    for tier, budget in ((Tier.DEVICE, budgets.device_bytes), (Tier.HOST, budgets.host_bytes)):
        room = min(budget // num_layers - used_by_layer[tier], budget - used_by_all[tier])
        placed[tier] = min(left, max(0, room) // block_bytes)
        left -= placed[tier]
    placed[Tier.NVME] = left
    return placed
