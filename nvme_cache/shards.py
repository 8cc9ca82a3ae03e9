"""The shard format: one safetensors file holding a run of consecutive blocks of one layer.

A shard has two tensors, `keys` and `values`, each `[num_pieces, batch, heads, piece_length, head_dim]`; quantized, they
hold codes and are followed by what decodes them, `keys_scale` and the like. The header is padded with spaces, and each
tensor with an explicit U8 tensor where needed, so that all begin on a page and can be read with `O_DIRECT`; any
safetensors reader opens the file. `__metadata__` carries the format version, the layer, the first token, how keys and
values are stored, and an xxh3-64 checksum of every piece of every tensor.
"""

import json
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash

from . import io
from .buffers import HostBuffer, shaped
from .errors import ConfigurationError, ShardCorruptedError, ShardIOError

FORMAT_VERSION = "1"
MAX_SECTION_BYTES = 6 << 20

_open_shards: "weakref.WeakSet[Shard]" = weakref.WeakSet()  # they share the process's descriptors

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name safetensors gives `dtype`.

    Raises:
        ConfigurationError: keys and values of this dtype cannot be stored.
    """
    try:
        return _DTYPE_NAMES[dtype]
    except KeyError:
        supported = ", ".join(str(known) for known in _DTYPE_NAMES if known.is_floating_point)
        raise ConfigurationError(f"keys or values of {dtype} cannot be paged; supported: {supported}") from None


def dtype_called(name: str) -> torch.dtype:
    """The dtype that `dtype_name` gives this name.

    Raises:
        ValueError: there is none.
    """
    found = [dtype for dtype, known in _DTYPE_NAMES.items() if known == name]
    if not found:
        raise ValueError(f"{name!r} is no dtype of keys or values")
    return found[0]


@dataclass(slots=True)
class Section:
    """One tensor of a shard: where its bytes lie and what each piece's bytes hash to.

    Attributes:
        name: "keys" or "values", with "_scale" or "_shift" behind it for what decodes them.
        shape: `[num_pieces, batch, heads, ...]`.
        piece_length: Tokens in a piece.
        nbytes: Size of the tensor in bytes, without padding.
        offset: First byte in the file, a multiple of a page.
        checksums: xxh3-64 of each piece's bytes; filled when the shard is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    piece_length: int
    nbytes: int
    offset: int = 0
    checksums: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype, piece_length: int | None = None) -> "Section":
        """The section of a tensor; unless told otherwise, its fourth dimension is the tokens of a piece."""
        nbytes = dtype.itemsize * math.prod(shape)
        return cls(name, shape, dtype, shape[3] if piece_length is None else piece_length, nbytes)

    @property
    def padded_nbytes(self) -> int:
        """Size in bytes up to the next page."""
        return io.round_up(self.nbytes, io.ALIGNMENT)


Sections: TypeAlias = tuple[Section, ...]


def spread(view: memoryview, sections: Sequence[Section]) -> list[memoryview]:
    """The part of `view` for each of `sections` with its padding, one behind the other."""
    ends = list(accumulate(section.padded_nbytes for section in sections))
    return [view[end - section.padded_nbytes : end] for section, end in zip(sections, ends, strict=True)]


def staged(buffer: HostBuffer, sections: Sequence[Section]) -> list[torch.Tensor]:
    """The tensors of `sections` in a buffer that holds them one behind the other, each from a page on."""
    ends = accumulate(section.padded_nbytes for section in sections)
    return [
        shaped(buffer.bytes[end - section.padded_nbytes : end], section.shape, section.dtype)
        for section, end in zip(sections, ends, strict=True)
    ]


class Shard:
    """One shard file. The store that made it deletes or reuses the file once nothing refers to the shard any more.

    Args:
        path: Where the file will be.
        layer_idx: The layer its blocks belong to.
        first_token: Position of its first token in the layer when it was sealed.
        sections: What its keys consist of, and its values.
        storage: How keys and values are stored, in words, if not as they are.
        direct: Whether to bypass the page cache.

    Attributes:
        written: Resolves once the file is in place; replaced when a failed write is tried again.
        file_nbytes: Size of the file in bytes.
        nbytes: Size of its tensors in bytes.
    """

    def __init__(
        self,
        path: Path,
        layer_idx: int,
        first_token: int,
        sections: tuple[Sections, Sections],
        *,
        storage: Mapping[str, str] | None = None,
        direct: bool,
    ) -> None:
        self.path = path
        self.layer_idx = layer_idx
        self.first_token = first_token
        self.sections = sections
        self.written: Future[None] = Future()
        self._storage = dict(storage or {})
        self._direct = direct
        self._descriptor: int | None = None
        self._unverified: set[str] = set()
        self._use: object = None
        offset = len(self._header(checksum=0))
        for section in chain(*sections):
            section.offset, offset = offset, offset + section.padded_nbytes
        self.file_nbytes = offset
        self.nbytes = sum(section.nbytes for section in chain(*sections))

    def write(self, buffers: Sequence[HostBuffer]) -> None:
        """Writes the file from one buffer for the keys and one for the values; it appears under its name when whole.

        Each buffer holds its sections one behind the other, each from a page on.

        Raises:
            OSError: what the drive answered; the unfinished file is gone.
        """
        views = []
        for sections, buffer in zip(self.sections, buffers, strict=True):
            for section, view in zip(sections, spread(buffer.view, sections), strict=True):
                view[section.nbytes :] = bytes(section.padded_nbytes - section.nbytes)
                section.checksums = _checksums(section, [view])
                views.append(view)
        encoded = self._header()
        header = mmap.mmap(-1, len(encoded))  # on a page, as O_DIRECT wants it
        header[:] = encoded
        partial = self.path.with_suffix(".partial")
        descriptor = io.open_file(partial, direct=self._direct, create=True)
        try:
            io.preallocate(descriptor, self.file_nbytes)  # no work if the store has left a file to be overwritten
            io.write_all(descriptor, [memoryview(header), *views], 0)
            partial.rename(self.path)
        except BaseException:
            os.close(descriptor)
            partial.unlink(missing_ok=True)
            raise
        if not self._keep_open(descriptor):
            os.close(descriptor)

    def adopt(self, checksums: Mapping[str, str], use: object) -> None:
        """Takes a file that exists for this shard; what is first read of it is verified in any case.

        Args:
            checksums: By section, the xxh3-64 of its pieces in hexadecimal, separated by spaces.
            use: What keeps the file from being deleted while it exists.

        Raises:
            ValueError: these are not the checksums of such a shard.
        """
        for section in chain(*self.sections):
            section.checksums = [int(value, 16) for value in checksums[section.name].split()]
            if len(section.checksums) != section.shape[0]:
                raise ValueError(f"{self.path.name} needs {section.shape[0]} checksums of {section.name}")
            self._unverified.add(section.name)
        self._use = use
        self.written.set_result(None)

    def complete(self) -> None:
        """Sees to it that the file holds everything, as one that was written or adopted does."""

    def needs_verifying(self, sections: Sequence[Section]) -> bool:
        """Whether something of an adopted file has never been verified."""
        return bool(self._unverified) and any(section.name in self._unverified for section in sections)

    def read(self, sections: Sequence[Section], views: Sequence[Sequence[memoryview]]) -> None:
        """Reads whole sections that follow each other in one go.

        Args:
            sections: What to read.
            views: Where each goes: memory that follows the file's byte order and extends to the end of its padding.

        Raises:
            ShardCorruptedError: the file is missing or short.
            ShardIOError: the drive refused.
        """
        together = [view for section_views in views for view in section_views]
        offset, size = sections[0].offset, sum(section.padded_nbytes for section in sections)
        try:
            with self._opened() as descriptor:
                io.read_all(descriptor, together, offset)
                if not self._direct:  # a cycle longer than the page cache never finds there what it needs next
                    io.advise(descriptor, offset, size, will_need=False)
        except (EOFError, FileNotFoundError) as error:
            raise self._corrupted(sections, str(error)) from error
        except OSError as error:
            raise ShardIOError(error.errno, f"cannot read {self._describe(sections)}: {error.strerror}") from error

    def verify(self, sections: Sequence[Section], views: Sequence[Sequence[memoryview]]) -> None:
        """Checks every piece of what was read.

        Raises:
            ShardCorruptedError: a piece does not match its checksum.
        """
        for section, section_views in zip(sections, views, strict=True):
            self._check(section, _checksums(section, section_views))
            self._unverified.discard(section.name)

    def expect(self, sections: Sequence[Section]) -> None:
        """Has the kernel read ahead, where reads go through its cache; `read` reports what is wrong with the file."""
        if not self._direct:
            with suppress(OSError), self._opened() as descriptor:
                io.advise(
                    descriptor,
                    sections[0].offset,
                    sections[-1].offset + sections[-1].nbytes - sections[0].offset,
                    will_need=True,
                )

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if self._descriptor is not None:
            yield self._descriptor
            return
        descriptor = io.open_file(self.path, direct=self._direct)
        kept = self._keep_open(descriptor)
        try:
            yield descriptor
        finally:
            if not kept:
                os.close(descriptor)

    def _keep_open(self, descriptor: int) -> bool:
        """Keeps the file open between reads, if this is not one too many."""
        if len(_open_shards) >= io.open_file_allowance():
            return False
        _open_shards.add(self)
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        return True

    def _check(self, section: Section, found: list[int]) -> None:
        for piece, (checksum, expected) in enumerate(zip(found, section.checksums, strict=True)):
            if checksum != expected:
                first = self.first_token + piece * section.piece_length
                why = f"tokens {first} to {first + section.piece_length - 1} do not match their checksum"
                raise self._corrupted([section], why)

    def _corrupted(self, sections: Sequence[Section], why: str) -> ShardCorruptedError:
        remedy = "These cached tokens are lost: start again with a new cache"
        if self._use is not None:
            remedy = "This snapshot is of no more use: delete it and prefill again"
        return ShardCorruptedError(
            f"{self._describe(sections)} are damaged: {why}. {remedy}, and check the drive if it happens twice."
        )

    def _describe(self, sections: Sequence[Section]) -> str:
        names = " and ".join(dict.fromkeys(section.name.partition("_")[0] for section in sections))
        return f"the {names} of layer {self.layer_idx} in shard {self.path}"

    def _header(self, checksum: int | None = None) -> bytes:
        metadata = {
            "format": "nvme-cache",
            "version": FORMAT_VERSION,
            "layer_idx": str(self.layer_idx),
            "first_token": str(self.first_token),
            **self._storage,
        }
        header: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for section in chain(*self.sections):
            checksums = section.checksums if checksum is None else [checksum] * section.shape[0]
            metadata[f"xxh3_{section.name}"] = " ".join(f"{value:016x}" for value in checksums)
            end = at + section.nbytes
            header[section.name] = {
                "dtype": dtype_name(section.dtype),
                "shape": list(section.shape),
                "data_offsets": [at, end],
            }
            at += section.padded_nbytes
            if at > end:
                header[f"{section.name}_padding"] = {"dtype": "U8", "shape": [at - end], "data_offsets": [end, at]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        length = io.round_up(8 + len(encoded), io.ALIGNMENT) - 8
        return length.to_bytes(8, "little") + encoded.ljust(length)


def _checksums(section: Section, views: Sequence[memoryview]) -> list[int]:
    """The xxh3-64 of each piece's bytes, `views` being the section's bytes in file order."""
    remaining = iter(views)
    view = memoryview(b"")
    checksums = []
    for _ in range(section.shape[0]):
        digest, left = xxhash.xxh3_64(), section.nbytes // section.shape[0]
        while left:
            if not view.nbytes:
                view = next(remaining)
            part, view = view[:left], view[left:]
            digest.update(part)
            left -= part.nbytes
        checksums.append(digest.intdigest())
    return checksums
