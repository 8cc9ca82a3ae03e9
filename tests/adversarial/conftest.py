"""Every test in this folder runs on the executor in executor.py, with everything late and with random progress."""

import random

import pytest

from . import executor


def pytest_generate_tests(metafunc):
    if "adversary" in metafunc.fixturenames:
        metafunc.parametrize("adversary", ["late", "random"], indirect=True)


@pytest.fixture(autouse=True)
def adversary(request):
    draw = random.Random(0)
    progress = executor.late if request.param == "late" else lambda queued: draw.randint(0, queued) * draw.randint(0, 1)
    with executor.Executor(progress) as running:
        yield running
