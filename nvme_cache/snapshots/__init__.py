"""Snapshots: caches that outlive their process."""

from .identity import length_limit, shifted_by_images, weights_of
from .mixin import SnapshotMixin
from .save import whole_mask
from .store import Match, SnapshotStore, common_length, marked

__all__ = [
    "Match",
    "SnapshotMixin",
    "SnapshotStore",
    "common_length",
    "length_limit",
    "marked",
    "shifted_by_images",
    "weights_of",
    "whole_mask",
]
