"""Background threads, and what they may take from the model."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from threadpoolctl import ThreadpoolController

from .transfer import accelerator

PREFIX = "nvme-cache"  # of their names


def takes_all_cores() -> bool:
    """Whether the model computes on every core there is, so that background threads that compute take one from it.

    Then who waits for what they read may as well check it: that takes no longer, and no thread makes way for another.
    """
    return accelerator() is None and torch.get_num_threads() >= len(os.sched_getaffinity(0))


def pool(count: int, name: str) -> ThreadPoolExecutor:
    """Threads, at most `count`, on each of which torch computes without others.

    OpenMP would start some for each thread that computes. They would take the model's cores, and once there are more of
    them than cores, OpenMP lets all of them sleep, the model's too, as soon as they have nothing to do: waking them
    takes longer than what they do for a token.
    """
    return ThreadPoolExecutor(count, f"{PREFIX}-{name}", initializer=_compute_alone)


def _compute_alone() -> None:
    torch.get_num_threads()  # sets the thread up, and would undo the next line if it came later
    _openmp().limit(limits=1)


@cache  # looks at every library of the process
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")
