"""Every test in this folder runs on the executor in executor.py: half of them with every copy as late as it may come,
half with copies at random moments.
"""

import random
import zlib

import pytest

from . import executor


@pytest.fixture(autouse=True)
def adversary(request):
    seed = zlib.crc32(request.node.nodeid.encode())
    draw = random.Random(seed)
    progress = executor.late if seed % 2 else lambda queued: draw.randint(0, queued) * draw.randint(0, 1)
    with executor.Executor(progress) as running:
        yield running
