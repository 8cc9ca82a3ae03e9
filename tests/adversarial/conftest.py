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


def pytest_collection_modifyitems(config, items):
    """Leaves out the quantized cases of borrowed tests: they move blocks in the same order as exact ones.

    What is different in it, converting on the device, has tests of its own in test_hazards.py.
    """
    here = str(config.rootpath / "tests" / "adversarial")
    borrowed = [
        item
        for item in items
        if str(item.path).startswith(here)
        and item.path.stem != "test_hazards"
        and getattr(item, "callspec", None)
        and item.callspec.params.get("quantization") is not None
    ]
    items[:] = [item for item in items if item not in borrowed]
    config.hook.pytest_deselected(items=borrowed)
