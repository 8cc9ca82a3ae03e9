"""What paging moved and what it cost."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the cache was made.

    Attributes:
        sealed_bytes: Bytes of blocks sealed, whatever their tier.
        written_bytes: Bytes of blocks written to NVMe, headers and padding aside.
        read_bytes: Bytes of blocks read from NVMe.
        stall_s: Seconds `update` waited for a fetch or for a free staging buffer.
    """

    sealed_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    stall_s: float = 0.0
