"""Snapshots: caches that outlive their process."""

from .mixin import SnapshotMixin

__all__ = ["SnapshotMixin"]
