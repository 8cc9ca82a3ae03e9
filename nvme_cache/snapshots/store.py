"""A folder of snapshots, found again by the tokens they hold, with a limit to its size.

`<store>/<model>/<tokens>` is a snapshot: both names are digests, so that only those of the same model are looked at and
the same tokens are never saved twice. Whoever has a snapshot open holds a lock in it, and so it is never evicted. The
others go in the order in which they were last used. (Within a cache a least recently used block is the worst one to
drop, since every step sweeps them all; between prompts it is right.)
"""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
import xxhash
from safetensors import SafetensorError

from nvme_cache import io
from nvme_cache.drive import Drive
from nvme_cache.errors import ConfigurationError, NVMeCacheError, OffloadDirectoryError, StorageFullError
from nvme_cache.quantization import QuantizationConfig
from nvme_cache.store import tested_drive
from nvme_cache.units import in_bytes, parse_size

from .folder import delete, last_used, locked, read_manifest
from .identity import identify, release_of
from .manifest import MANIFEST, Manifest
from .save import ATTENTION_MASK, TOKEN_IDS, bytes_to_save, whole_mask

if TYPE_CHECKING:  # importing it would start the compiler
    from transformers import PreTrainedModel

    from nvme_cache.cache import OffloadedNVMeCache

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{16}")
_LOCK, _PIN = "store.lock", "pinned"


@dataclass(frozen=True, slots=True)
class Entry:
    """A snapshot in a store.

    Attributes:
        name: What the store calls it.
        path: Its folder.
        manifest: What it holds.
        last_used_s: When it was saved or opened last, in seconds since the epoch.
        is_pinned: Whether it is kept whatever its age.
    """

    name: str
    path: Path
    manifest: Manifest
    last_used_s: float
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Match:
    """A snapshot that begins as a prompt does.

    Attributes:
        path: Its folder.
        manifest: What it holds.
        tokens: `[batch, num_tokens]`, its tokens with padding `marked`.
        length: How many of them, from the first, the prompt has too.
    """

    path: Path
    manifest: Manifest
    tokens: torch.Tensor
    length: int


class SnapshotStore:
    """A folder of snapshots.

    Args:
        directory: The folder, made if need be; on the drive of `offload_dir`, so that shards are linked, not copied.
        size_limit: Most bytes on the drive, or text such as "200GiB". What several snapshots share counts once.
        ttl_s: Seconds after which a snapshot that nobody used goes; None for never.

    Raises:
        ConfigurationError: an argument has a value that cannot work.
        OffloadDirectoryError: the folder cannot be made.

    Example:
        >>> store = SnapshotStore("/mnt/nvme/snapshots", size_limit="200GiB")
        >>> with nvme_cache.enable(model, reuse=store):
        ...     answers = pipe(prompts)  # what they begin with is read from the drive if it was ever computed
    """

    def __init__(self, directory: str | os.PathLike[str], *, size_limit: int | str, ttl_s: float | None = None) -> None:
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigurationError(f"ttl_s={ttl_s!r} must be a number of seconds above 0, or None")
        self.path = Path(directory).absolute()
        self.size_limit = parse_size("size_limit", size_limit)
        self.ttl_s = ttl_s
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OffloadDirectoryError(
                error.errno,
                f"cannot make the store {self.path}: {error.strerror}. Pass a folder this user may write to.",
            ) from error

    def save(
        self,
        cache: "OffloadedNVMeCache",
        *,
        model: "PreTrainedModel",
        token_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Path:
        """Saves what a cache holds, and evicts what is in the way.

        Args:
            cache: The cache.
            model: The model.
            token_ids: As for `save_pretrained`.
            attention_mask: `[batch, length]`, 0 where a token is padding; None if none is.

        Returns:
            Where the snapshot is. It may be evicted as soon as this returns, unless it is opened or pinned.

        Raises:
            StorageFullError: the limit leaves no room for it; nothing was saved.
            NVMeCacheError: as `save_pretrained`.
        """
        token_ids = cache.tokens_held(token_ids)
        mask = whole_mask(token_ids, attention_mask)
        group = self._group(model, cache.quantization)
        folder = group / _digest(group.name, token_ids.tolist(), mask.tolist())
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        with locked(self.path / _LOCK):
            if not (folder / MANIFEST).exists():
                self._make_room(bytes_to_save(cache.layers))
                cache.save_pretrained(folder, token_ids=token_ids, attention_mask=mask, model=model)
            with suppress(OSError):
                os.utime(folder / MANIFEST)
        return folder

    def find(
        self,
        token_ids: torch.Tensor,
        *,
        model: "PreTrainedModel",
        attention_mask: torch.Tensor | None = None,
        quantization: QuantizationConfig | None = None,
    ) -> list[Match]:
        """The snapshots that begin as a prompt does, the longest common beginning first.

        A match is no promise: the snapshot may be gone when it is opened, and its blocks are verified only then. One
        with layers that cannot give up their newest tokens matches only if the prompt goes on behind its last one.

        Args:
            token_ids: `[batch, length]`, the prompt.
            model: The model.
            attention_mask: `[batch, length]`, 0 where a token is padding; None if none is.
            quantization: How its blocks must be stored.
        """
        wanted = marked(token_ids, whole_mask(token_ids, attention_mask))
        matches = []
        for folder in _folders(self._group(model, quantization)):
            # What goes away meanwhile is no match; safetensors says so in several ways.
            with suppress(NVMeCacheError, OSError, RuntimeError, SafetensorError):
                manifest = read_manifest(folder)
                with safetensors.safe_open(folder / manifest.states.file, framework="pt") as states:
                    held, mask = states.get_tensor(TOKEN_IDS), states.get_tensor(ATTENTION_MASK)
                if not held.shape == mask.shape == (manifest.batch_size, manifest.num_tokens):
                    continue
                held = marked(held, mask)
                length = common_length(held, wanted)
                if length and (manifest.croppable or length == held.shape[1]):
                    matches.append(Match(folder, manifest, held, length))
        return sorted(matches, key=lambda match: match.length, reverse=True)

    def entries(self) -> list[Entry]:
        """All snapshots, the one that was used last first."""
        found = []
        for group in _folders(self.path):
            for folder in _folders(group):
                with suppress(NVMeCacheError, OSError):
                    manifest = read_manifest(folder)
                    found.append(Entry(folder.name, folder, manifest, last_used(folder), (folder / _PIN).exists()))
        return sorted(found, key=lambda entry: entry.last_used_s, reverse=True)

    def pin(self, name: str, *, pinned: bool = True) -> None:
        """Keeps a snapshot whatever its age, or no longer.

        Raises:
            ConfigurationError: there is none of this name.
        """
        mark = self._named(name).path / _PIN
        if pinned:
            mark.touch(mode=0o600)
        else:
            mark.unlink(missing_ok=True)

    def remove(self, name: str) -> bool:
        """Deletes a snapshot, pinned or not, unless it is open. Returns whether it is gone.

        Raises:
            ConfigurationError: there is none of this name.
        """
        return _remove(self._named(name).path)

    def discard(self, path: Path) -> bool:
        """Deletes a snapshot that turned out to be damaged, unless it is open. Returns whether it is gone."""
        with suppress(OSError):
            return _remove(path)
        return not path.exists()

    def prune(self) -> list[str]:
        """Deletes what is too old, what was never finished, and what goes beyond the limit. Returns the names."""
        with locked(self.path / _LOCK):
            return self._prune(self.size_limit)

    @cached_property
    def drive(self) -> Drive:
        """How fast snapshots can be read."""
        return tested_drive(self.path, None, direct=io.supports_direct(self.path))

    @property
    def used_bytes(self) -> int:
        """Bytes that the store takes on the drive; what several snapshots share counts once."""
        files: dict[tuple[int, int], int] = {}
        for folder, names, more in os.walk(self.path):  # which passes over what is deleted meanwhile
            for name in (*names, *more):
                with suppress(FileNotFoundError):
                    found = os.lstat(Path(folder) / name)
                    files[found.st_dev, found.st_ino] = found.st_blocks * 512
        return sum(files.values())

    def _make_room(self, nbytes: int) -> None:
        if nbytes <= self.size_limit:
            self._prune(self.size_limit - nbytes)
        if (used_bytes := self.used_bytes) + nbytes > self.size_limit:
            raise StorageFullError(
                f"a snapshot of {in_bytes(nbytes)} does not fit the store {self.path}: {in_bytes(used_bytes)} of "
                f"size_limit={in_bytes(self.size_limit)} are in use or pinned. Raise the limit, unpin or close some."
            )

    def _prune(self, limit: int) -> list[str]:
        removed = []
        oldest_first = self.entries()[::-1]
        whole = {entry.path for entry in oldest_first}
        for group in _folders(self.path):
            for folder in _folders(group):
                if folder not in whole and not (folder / _PIN).exists():
                    _remove(folder)  # never finished, or damaged
        used_bytes = self.used_bytes
        for entry in oldest_first:
            is_old = self.ttl_s is not None and time.time() - entry.last_used_s > self.ttl_s
            if not entry.is_pinned and (is_old or used_bytes > limit) and _remove(entry.path):
                removed.append(entry.name)
                used_bytes = self.used_bytes
                logger.info("evicted the snapshot %s from %s", entry.name, self.path)
        return removed

    def _named(self, name: str) -> Entry:
        found = [entry for entry in self.entries() if entry.name.startswith(name)] if name else []
        if len(found) != 1:
            raise ConfigurationError(f"the store {self.path} has {len(found)} snapshots called {name!r}")
        return found[0]

    def _group(self, model: "PreTrainedModel", quantization: QuantizationConfig | None) -> Path:
        identity = identify(model.config, model)
        identity = replace(identity, transformers=release_of(identity.transformers))
        return self.path / _digest(asdict(identity), None if quantization is None else asdict(quantization))


def common_length(held: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many columns, from the first, two tensors of `[batch, length]` have in common; 0 if rows differ in number."""
    length = min(held.shape[1], wanted.shape[1])
    if held.shape[0] != wanted.shape[0]:
        return 0
    differs = (held[:, :length] != wanted[:, :length]).any(dim=0)
    return int(differs.nonzero()[0]) if bool(differs.any()) else length


def marked(token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Token ids with -1 for padding, to be compared: what attention does not see must be the same too."""
    return token_ids.cpu().masked_fill(mask.cpu() == 0, -1)


def _folders(parent: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from (path for path in sorted(parent.iterdir()) if _DIGEST.fullmatch(path.name))


def _remove(folder: Path) -> bool:
    is_pinned = (folder / _PIN).exists()
    (folder / _PIN).unlink(missing_ok=True)
    is_gone = delete(folder)
    if is_pinned and not is_gone:
        (folder / _PIN).touch(mode=0o600)
    if is_gone:
        with suppress(OSError):
            folder.parent.rmdir()  # unless there are others of this model
    return is_gone


def _digest(*parts: Any) -> str:
    return xxhash.xxh3_64(repr(parts).encode()).hexdigest()
