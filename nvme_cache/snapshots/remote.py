"""Snapshots elsewhere: whatever fsspec speaks, named by a URL. Credentials are its affair.

A save goes to a folder on the drive, then up, its manifest last: what is there is whole or absent, and a save that is
interrupted leaves the one before it. An open snapshot is read through: sections are downloaded when they are first
read, checked, and kept in sparse files among the cache's own, from which they are read from then on.
"""

import errno
import logging
import mmap
import os
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from glob import has_magic
from itertools import chain, groupby
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from nvme_cache import io
from nvme_cache.errors import (
    ConfigurationError,
    NVMeCacheError,
    ShardCorruptedError,
    ShardIOError,
    SnapshotCorruptedError,
    SnapshotIOError,
    SnapshotMismatchError,
    StorageFullError,
)
from nvme_cache.shards import Section, Sections, Shard, spread
from nvme_cache.store import Store, private_folder

from .folder import read_manifest
from .manifest import FILE_NAME, MANIFEST, Manifest

if TYPE_CHECKING:  # importing it takes time, and few need it
    from fsspec import AbstractFileSystem

logger = logging.getLogger(__name__)

_URL = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)[^/]*@")
_UPLOADS = 8  # at once, since each holds its file in memory
_ABANDONED = timedelta(days=1)  # no save takes that long: what no manifest names by then was interrupted
_HEADER = "header"
_REMEDY = "Check the network, the address and the credentials that fsspec finds"


def place_of(path: str | os.PathLike[str]) -> "Path | Remote":
    """Where a path or a URL leads.

    Raises:
        ConfigurationError: fsspec does not know such URLs, or lacks a package for them.
        SnapshotIOError: the place cannot be reached.
    """
    url = os.fspath(path)
    if not _URL.match(url):
        return Path(url)
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    shown = _PASSWORD.sub("", url).rstrip("/")
    try:
        system, inner = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"fsspec cannot serve {shown}: {error}") from error
    except Exception as error:
        raise SnapshotIOError(f"cannot reach {shown}: {_reason(error)}. {_REMEDY}.") from error
    return Path(inner) if isinstance(system, LocalFileSystem) else Remote(shown, inner.rstrip("/"), system)


@dataclass(frozen=True)
class Remote:
    """A folder elsewhere.

    Attributes:
        url: What to call it, without passwords.
        path: What its file system calls it.
        system: The file system.
    """

    url: str
    path: str
    system: "AbstractFileSystem" = field(repr=False)

    def __str__(self) -> str:
        return self.url

    def manifest(self) -> Manifest:
        """The manifest of the snapshot there.

        Raises:
            SnapshotCorruptedError: there is no snapshot, or it is not what was written.
            SnapshotMismatchError: another version of the format.
            SnapshotIOError: the place cannot be reached.
        """
        return Manifest.decode(self.read(MANIFEST), f"{self}/{MANIFEST}")

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """What a file holds, or its bytes from `start` to before `end`.

        Raises:
            SnapshotCorruptedError: there is no such file.
            SnapshotIOError: the place cannot be reached.
        """
        with self._explained(f"read {self}/{name}"):
            try:
                content: bytes = self.system.cat_file(f"{self.path}/{name}", start=start, end=end)
            except FileNotFoundError as error:
                raise SnapshotCorruptedError(
                    f"{self} holds no snapshot that can be read: there is no {self}/{name}"
                ) from error
        return content

    def upload(self, folder: Path) -> None:
        """Copies a snapshot from a folder here, its manifest last, then deletes the files of the one it replaces.

        Raises:
            SnapshotIOError: the place cannot be reached, or refuses; a snapshot that was there still is.
        """
        manifest, replaced = read_manifest(folder), self._named()
        names = list(manifest.files)
        # Unlike others, file systems of this kind upload all files at once unless told otherwise.
        limit = {"batch_size": _UPLOADS} if self.system.async_impl else {}
        try:
            with self._explained(f"upload a snapshot to {self}"):
                self.system.put(
                    [str(folder / name) for name in names], [f"{self.path}/{name}" for name in names], **limit
                )
        except BaseException:
            self._delete(lambda name, _: name in names)
            raise
        with self._explained(f"upload {self}/{MANIFEST}"):  # if this fails it may have arrived: its files stay
            self.system.pipe_file(f"{self.path}/{MANIFEST}", (folder / MANIFEST).read_bytes())
        # Only what cannot belong to another save that is under way: nothing can be locked there.
        self._delete(lambda name, path: name not in names and (name in replaced or self._is_abandoned(path)))

    def _named(self) -> Collection[str]:
        """The files of the snapshot that is there."""
        try:
            return self.manifest().files
        except (SnapshotCorruptedError, SnapshotMismatchError):
            return ()

    def _delete(self, is_doomed: Callable[[str, str], bool]) -> None:
        """Deletes files of snapshots, chosen by name and path; what cannot be deleted stays."""
        try:
            self.system.invalidate_cache(self.path)
            paths = {path.rpartition("/")[2]: path for path in self.system.ls(self.path, detail=False)}
            doomed = [path for name, path in paths.items() if FILE_NAME.fullmatch(name) and is_doomed(name, path)]
            if has_magic(self.path):  # in one go it would be taken for a pattern
                for path in doomed:
                    self.system.rm_file(path)
            elif doomed:
                self.system.rm(doomed)
        except Exception as error:
            logger.warning("cannot delete what another save has left at %s: %s", self, _reason(error))

    def _is_abandoned(self, path: str) -> bool:
        try:
            modified: datetime = self.system.modified(path)
        except NotImplementedError:
            return False
        return datetime.now(modified.tzinfo) - modified > _ABANDONED

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except NVMeCacheError:
            raise
        except Exception as error:  # implementations raise errors of their own
            raise SnapshotIOError(f"cannot {what}: {_reason(error)}. {_REMEDY}, then call again.") from error


@contextmanager
def saved_to(place: Path | Remote, store: Store, resident_bytes: int) -> Iterator[Path]:
    """A folder to save in; what is saved there is uploaded at the end if the place is elsewhere.

    Args:
        place: Where the snapshot goes.
        store: Of the cache, whose drive the folder is on: shards are linked, not written.
        resident_bytes: Size of what will be written.

    Raises:
        StorageFullError: the disk budget or the drive has no room for `resident_bytes`.
        SnapshotIOError: the place cannot be reached, or refuses.
    """
    if isinstance(place, Path):
        yield place
        return
    store.reserve(resident_bytes)
    try:
        with private_folder(store.path.parent) as folder:
            yield folder
            place.upload(folder)
    finally:
        store.give_back(resident_bytes)


class RemoteShard(Shard):
    """A shard of a snapshot elsewhere: sections are downloaded, once, when they are first read.

    Args:
        remote: The snapshot.
        name: The file's name there.
        store: Where the sections are kept from then on, and what counts their bytes.
        layer_idx: As for `Shard`.
        first_token: As for `Shard`.
        sections: As for `Shard`.
        storage: As for `Shard`.
    """

    def __init__(
        self,
        remote: Remote,
        name: str,
        store: Store,
        layer_idx: int,
        first_token: int,
        sections: tuple[Sections, Sections],
        *,
        storage: Mapping[str, str],
    ) -> None:
        path = store.new_path(layer_idx)
        super().__init__(path, layer_idx, first_token, sections, storage=storage, direct=store.direct)
        self._remote, self._name, self._store = remote, name, store
        self._missing = {_HEADER, *(section.name for section in chain(*sections))}
        # Whoever wants what another thread, or a fork, is downloading waits for it.
        self._turns = {name: Lock() for name in self._missing}
        self._sizes: list[int] = []  # of what has been downloaded
        forget = weakref.finalize(self, _forget, path, self._sizes, store, os.getpid())
        forget.atexit = False  # closing the store removes the folder whole

    def read(self, sections: Sequence[Section], views: Sequence[Sequence[memoryview]]) -> None:
        """As `Shard.read`, after downloading what has not been.

        Raises:
            ShardCorruptedError: the file there is missing, short or not what was written, or the one here is.
            ShardIOError: the place cannot be reached, or the drive refused.
            StorageFullError: the disk budget or the drive has no room for what is downloaded.
        """
        self._bring(sections)
        super().read(sections, views)

    def expect(self, sections: Sequence[Section]) -> None:
        """As `Shard.expect`, for what is here."""
        if not any(section.name in self._missing for section in sections):
            super().expect(sections)

    def complete(self) -> None:
        """Downloads what is missing: the file here is then what the one there is.

        Raises:
            NVMeCacheError: as `read`.
        """
        self._bring([*self.sections[0], *self.sections[1]])
        with self._turns[_HEADER]:
            if _HEADER in self._missing:
                header = self._header()
                with self._counted(len(header)):
                    self._put(header, 0, len(header))
                self._missing.remove(_HEADER)

    def _bring(self, sections: Sequence[Section]) -> None:
        if not any(section.name in self._missing for section in sections):
            return
        with ExitStack() as turns:
            for section in sections:  # in the file's order, so that no two threads wait for each other
                turns.enter_context(self._turns[section.name])
            for is_missing, group in groupby(sections, lambda section: section.name in self._missing):
                if is_missing:
                    self._download(list(group))

    def _download(self, sections: list[Section]) -> None:
        """Downloads sections that follow each other, in one go."""
        start, end = sections[0].offset, sections[-1].offset + sections[-1].nbytes
        nbytes = sum(section.padded_nbytes for section in sections)
        with self._counted(nbytes):
            try:
                content = self._remote.read(self._name, start, end)
            except SnapshotCorruptedError as error:
                raise self._corrupted(sections, str(error)) from error
            except SnapshotIOError as error:
                raise ShardIOError(str(error)) from error
            if len(content) != end - start:
                raise self._corrupted(sections, f"of {end - start:,} bytes there are {len(content):,}")
            self._put(content, start, nbytes, check=sections)
        self._missing.difference_update(section.name for section in sections)

    def _put(self, content: bytes, offset: int, nbytes: int, check: Sequence[Section] = ()) -> None:
        """Writes what was downloaded, filled up to `nbytes`, if it is what the manifest says."""
        view = memoryview(mmap.mmap(-1, nbytes))  # on a page, as O_DIRECT wants it
        view[: len(content)] = content
        self.verify(check, [[part] for part in spread(view, check)])
        try:
            descriptor = io.open_file(self.path, direct=self._direct, create=True)
            try:
                io.write_all(descriptor, [view], offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            kind = StorageFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ShardIOError
            raise kind(
                error.errno, f"cannot keep {self._describe(check)} in {self.path}: {error.strerror}. Then call again."
            ) from error

    @contextmanager
    def _counted(self, nbytes: int) -> Iterator[None]:
        """Counts the bytes that the context writes for as long as this shard exists; not if it fails."""
        self._store.reserve(nbytes)
        try:
            yield
        except BaseException:
            self._store.give_back(nbytes)
            raise
        self._sizes.append(nbytes)

    def _corrupted(self, sections: Sequence[Section], why: str) -> ShardCorruptedError:
        return ShardCorruptedError(
            f"{self._describe(sections)} are damaged: {why}. If the snapshot was saved again meanwhile, open it again; "
            "else delete it and prefill again."
        )

    def _describe(self, sections: Sequence[Section]) -> str:
        return super()._describe(sections).replace(str(self.path), f"{self._remote}/{self._name}")


def _forget(path: Path, sizes: list[int], store: Store, owner_pid: int) -> None:
    """Deletes a file; it has holes, so no other is to be laid over it."""
    if os.getpid() == owner_pid:
        with suppress(OSError):
            path.unlink()
    store.give_back(sum(sizes))


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
