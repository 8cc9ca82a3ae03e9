"""Snapshots: caches that outlive their process."""

from .mixin import SnapshotMixin
from .save import whole_mask
from .store import Match, SnapshotStore, common_length, marked

__all__ = ["Match", "SnapshotMixin", "SnapshotStore", "common_length", "marked", "whole_mask"]
