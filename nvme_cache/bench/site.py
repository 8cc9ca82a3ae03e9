"""Where it is measured, and how reads there are kept cold."""

import os
from dataclasses import dataclass
from pathlib import Path

from .measure import Say
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Site:
    """What every part of the bench needs to know.

    Attributes:
        folder: Where files go; emptied by whoever made it.
        direct: Whether the file system takes `O_DIRECT`.
        threads: Threads that read, as many as the cache has by default.
        plan: How much to measure.
        say: Shows progress.
    """

    folder: Path
    direct: bool
    threads: int
    plan: Plan
    say: Say

    def make_cold(self, folder: Path) -> None:
        """Drops what earlier reads of our own files in `folder` left in the page cache: with `O_DIRECT`, nothing."""
        if not self.direct:
            drop_pages(*folder.glob("*.safetensors"))


def drop_pages(*paths: Path) -> None:
    """Drops the pages of files from the page cache, so that the next read comes from the drive."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)  # pages not yet written stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
