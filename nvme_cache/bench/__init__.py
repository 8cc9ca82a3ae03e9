"""The benchmark behind `nvme-cache bench`: the drive, decode steps against the floor, other caches, growth.

Nothing else in the package imports it.
"""

from .run import run_bench

__all__ = ["run_bench"]
