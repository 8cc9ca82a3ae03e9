"""How fast the drive is read and written: by us, by plain system calls, and by fio, at several request sizes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from nvme_cache.quantization import QuantizationConfig

from .fio import Fio
from .measure import Figures, Sample, bytes_per_s, interleave, paired, rates, timed
from .plan import MIB
from .rawfile import RawFile, touched_buffer, write_plainly
from .shardpath import FetchPath, ShardFiles
from .site import Site

INT8 = QuantizationConfig(key="int8", value="int8", sink_tokens=0)
_LEAST_LAYERS = 16
_MOST_FILES = 256


def measure_drive(site: Site, raw: RawFile, engines: Sequence[Fio]) -> Figures:
    """Reads and writes by request size, and the fetch path by layer size."""
    return {
        "read": [_reads(site, raw, engines, size) for size in site.plan.request_bytes],
        "write": [_writes(site, raw, engines, size) for size in site.plan.request_bytes],
        "fetch": [_fetches(site, raw, engines, size) for size in site.plan.layer_bytes],
    }


def write_rate(drive: Figures) -> float:
    """The best rate at which shards were written, in bytes per second."""
    return max(float(row["contenders"]["shard_write"]["rate_bytes_per_s"]["median"]) for row in drive["write"])


def _reads(site: Site, raw: RawFile, engines: Sequence[Fio], size: int) -> Figures:
    site.say(f"drive: reads of {size / MIB:g} MiB")
    with ShardFiles(site, size) as files:
        contenders = {
            "shard_read": files.reader(site.plan.sample_bytes),
            **_reference_readers(site, raw, engines, size),
        }
        samples = interleave(contenders, site.plan.drive)
    return {"request_bytes": size, **_compared(samples, "shard_read")}


def _writes(site: Site, raw: RawFile, engines: Sequence[Fio], size: int) -> Figures:
    site.say(f"drive: writes of {size / MIB:g} MiB")
    nbytes = max(size, min(site.plan.sample_bytes // 2, _MOST_FILES * size))
    buffer = touched_buffer(size)

    def write_plain() -> Sample:
        path = site.folder / "written"
        try:
            return timed(lambda: write_plainly(path, buffer.view, nbytes, direct=site.direct))
        finally:
            path.unlink(missing_ok=True)

    with ShardFiles(site, size) as files:
        contenders: dict[str, Callable[[], Sample]] = {
            "shard_write": files.writer(nbytes),
            "plain": write_plain,
        }
        for fio in engines if site.direct else ():
            path = site.folder / f"written-{fio.engine}"
            contenders[f"fio_{fio.engine}"] = partial(fio.write, path, size, nbytes, overwrite=False)
        if engines and site.direct:  # what the drive gives where files are recycled
            contenders["fio_overwrite"] = partial(engines[0].write, raw.path, size, nbytes, overwrite=True)
        samples = interleave(contenders, site.plan.drive)
    return {"request_bytes": size, **_compared(samples, "shard_write")}


def _fetches(site: Site, raw: RawFile, engines: Sequence[Fio], size: int) -> Figures:
    site.say(f"drive: the fetch path, layers of {size / MIB:g} MiB")
    num_layers = max(_LEAST_LAYERS, site.plan.sample_bytes // size)
    with ExitStack() as stack:
        verified, unverified = (
            stack.enter_context(FetchPath(site, size, num_layers, verify=verify)) for verify in (True, False)
        )
        int8 = stack.enter_context(FetchPath(site, size, num_layers, verify=True, quantization=INT8))
        contenders: dict[str, Callable[[], Sample]] = {
            "fetch": verified,
            "fetch_unverified": unverified,
            "fetch_int8": int8,
            # One call per thread per layer into as much memory, as the fetch path makes.
            **_reference_readers(site, raw, engines, size // site.threads, verified.slot_bytes),
        }
        samples = interleave(contenders, site.plan.drive)
    return {
        "layer_bytes": size,
        "layers": num_layers,
        **_compared(samples, "fetch"),
        "fetch_int8_over": {"plain": paired(bytes_per_s(samples["fetch_int8"]), bytes_per_s(samples["plain"]))},
    }


def _reference_readers(
    site: Site, raw: RawFile, engines: Sequence[Fio], size: int, memory_bytes: int = 0
) -> dict[str, Callable[[], Sample]]:
    readers: dict[str, Callable[[], Sample]] = {"plain": raw.reader(size, site.plan.sample_bytes, memory_bytes)}
    for fio in engines if site.direct else ():
        readers[f"fio_{fio.engine}"] = partial(
            fio.read, raw.path, size, runtime_s=site.plan.fio_s, threads=site.threads
        )
    return readers


def _compared(samples: Mapping[str, Sequence[Sample]], ours: str) -> Figures:
    """Each contender's rates, and our rate over each other's in the same round."""
    own = bytes_per_s(samples[ours])
    return {
        "contenders": {name: rates(found) for name, found in samples.items()},
        f"{ours}_over": {name: paired(own, bytes_per_s(found)) for name, found in samples.items() if name != ours},
    }
