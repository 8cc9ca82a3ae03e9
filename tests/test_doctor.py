"""`nvme-cache doctor`: facts against the machine's own, problems from made-up facts, and what is shown and left."""

import importlib.metadata
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from typer.testing import CliRunner

from nvme_cache import cgroup
from nvme_cache.bench.measure import Rounds
from nvme_cache.cli import app
from nvme_cache.doctor import accelerator, drive, examine, findings, memory
from nvme_cache.doctor.accelerator import AcceleratorFacts, accelerator_facts
from nvme_cache.doctor.drive import DriveFacts, Latency, ReadRate, measure_drive
from nvme_cache.doctor.findings import Depth, Findings, Settings
from nvme_cache.doctor.folder import FolderFacts
from nvme_cache.doctor.formats import FormatFacts, format_facts
from nvme_cache.doctor.memory import MemoryFacts, memory_facts
from nvme_cache.doctor.problems import problems
from nvme_cache.doctor.processor import ProcessorFacts
from nvme_cache.errors import OffloadDirectoryError
from nvme_cache.quantization import FORMATS

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ORPHAN = "nvme-cache-1-abcdefgh"

FINE = Findings(
    folder=FolderFacts("~/kv", "ext4", "local", "nvme0n1", "Fast 990", False, True, 900 * GIB, 500 * GIB, None, []),
    memory=MemoryFacts(64 * GIB, 48 * GIB, None, None, 8 * MIB, 4096, "madvise", 32 * MIB, 32 * MIB),
    drive=DriveFacts(
        4,
        2.5e9,
        [ReadRate(64 * KIB, 2e9, 1.5e9, 2.2e9), ReadRate(MIB, 6.5e9, 6e9, 7e9)],
        [Latency(4 * KIB, 5000, 80e-6, 120e-6, 950e-6)],
    ),
    drive_failure=None,
    processor=ProcessorFacts("Processor 1", 8, None, 12e9, 30e9, 0.005),
    accelerator=None,
    formats=[FormatFacts("exact", 1.0, None, 6.5e9), FormatFacts("int8", 1.98, 5e9, 12.87e9)],
    settings=Settings(True, 24 * GIB, 4, True, 6.6e9, [Depth(MIB, 4), Depth(64 * MIB, 2)]),
    versions={"nvme-cache": "0.1", "torch": "2.13.0", "safetensors": None, "kernel": "Linux 6.1"},
)
GPU = AcceleratorFacts("Graphics 5", 24 * GIB, 20 * GIB, 25e9, 24e9)


def changed(found=FINE, **parts):
    """`found` with some facts changed, such as `folder={"kind": "RAM"}`."""
    return replace(
        found,
        **{
            name: replace(getattr(found, name), **facts) if isinstance(facts, dict) else facts
            for name, facts in parts.items()
        },
    )


def reading_at(rate):
    return [ReadRate(MIB, rate, rate, rate)]


@pytest.fixture
def quick(monkeypatch):
    """Measures as little as can be."""
    monkeypatch.setattr(drive, "_MOST_BYTES", drive.SHARD_BYTES)
    monkeypatch.setattr(drive, "_ROUNDS", Rounds(0, least=1))
    monkeypatch.setattr(drive, "_SAMPLE_S", 0)
    monkeypatch.setattr(drive, "_LATENCY_S", 0)
    monkeypatch.setattr(findings, "processor_facts", lambda: FINE.processor)
    monkeypatch.setattr(findings, "format_facts", lambda *args, **options: FINE.formats)


@pytest.fixture
def shown(monkeypatch):
    """What the command prints of given findings."""

    def show(found, *options, **environment):
        monkeypatch.setattr("nvme_cache.doctor.examine", lambda folder: found)
        result = CliRunner(env=environment).invoke(app, ["doctor", "anywhere", *map(str, options)])
        assert result.exit_code == 0, result.output
        return result

    return show


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """A folder and what is found there, measured as long as the command does."""
    folder = tmp_path_factory.mktemp("kv")
    return folder, examine(folder)


class TestFacts:
    def test_nothing_is_left(self, examined):
        assert list(examined[0].iterdir()) == []

    def test_the_folder(self, examined):
        folder, found = examined[0], examined[1].folder
        usage, number = os.statvfs(folder), folder.stat().st_dev
        assert found.path == str(folder)
        assert found.total_bytes == usage.f_frsize * usage.f_blocks
        assert found.free_bytes == pytest.approx(usage.f_frsize * usage.f_bavail, abs=GIB)
        device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        if device.exists():
            assert found.device == device.resolve().name
            assert found.kind == "local"
        assert found.removed_orphans == []

    def test_memory(self, examined):
        found, machine = examined[1].memory, psutil.virtual_memory()
        assert found.total_bytes == machine.total
        assert found.available_bytes == pytest.approx(machine.available, rel=0.3)
        assert found.open_files_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert found.huge_page_setting in ("always", "madvise", "never", "unknown")
        if found.huge_page_setting in ("always", "madvise"):
            assert 0 < found.buffer_huge_page_bytes <= found.buffer_bytes

    def test_formats(self, examined):
        found, best_bytes_per_s = examined[1].formats, examined[1].drive.best_bytes_per_s
        assert [each.name for each in found] == ["exact", *FORMATS]
        assert found[0].read_bytes_per_s == best_bytes_per_s
        cores = examined[1].processor.usable_cores
        for each in found[1:] if examined[1].accelerator is None else ():
            own = each.dequantize_bytes_per_s
            assert 1e7 < own < 1e12
            assert each.read_bytes_per_s == min(each.ratio * best_bytes_per_s, own * cores)

    def test_an_accelerator_leaves_the_drive_to_decide(self):
        ratios = {each.name: each.read_bytes_per_s / 7e9 for each in format_facts(7e9, 4, on_device=True)}
        int8 = 16 / ((8 + 16 / 256 + 8 + 16 / 128) / 2)
        assert ratios == pytest.approx({"exact": 1, "int8": int8, "int4": 16 / 4.5, "int2": 16 / 2.5, "float8": int8})

    def test_the_drive(self, examined):
        found = examined[1].drive
        assert [read.request_bytes for read in found.reads] == [64 * KIB << step for step in range(9)]
        for read in found.reads:
            assert 0 < read.least_bytes_per_s <= read.bytes_per_s <= read.most_bytes_per_s
        assert [latency.request_bytes for latency in found.latencies] == [4 * KIB, 512 * KIB]
        for latency in found.latencies:
            assert 0 < latency.p50_s <= latency.p95_s <= latency.p99_s < 1
            assert latency.reads >= 20

    def test_the_processor(self, examined):
        found = examined[1].processor
        assert found.cores == len(psutil.Process().cpu_affinity())
        assert found.switch_interval_s == sys.getswitchinterval()
        assert 1e8 < found.copy_bytes_per_s < 1e12
        assert 1e8 < found.verify_bytes_per_s < 1e12

    def test_settings_and_versions(self, examined):
        found = examined[1]
        assert found.settings.host_budget_bytes == pytest.approx(found.memory.available_bytes / 2, rel=0.2)
        assert found.settings.io_threads == found.drive.threads
        assert found.settings.is_drive_tested == found.folder.takes_direct
        depths = {depth.layer_bytes: depth.prefetch_depth for depth in found.settings.prefetch_depths}
        assert all(2 <= depth <= 4 for depth in depths.values())
        assert depths[MIB] >= depths[64 * MIB] == 2
        assert not found.settings.is_default_folder
        for name in ("torch", "transformers", "safetensors"):
            assert found.versions[name] == importlib.metadata.version(name)

    def test_a_folder_in_memory_is_said_to_be(self, quick):
        shm = Path("/dev/shm")
        if not os.access(shm, os.W_OK) or not any(
            part.mountpoint == str(shm) and part.fstype == "tmpfs" for part in psutil.disk_partitions(all=True)
        ):
            pytest.skip("no tmpfs here")
        folder = shm / f"nvme-cache-test-{os.getpid()}"
        folder.mkdir()
        try:
            found = examine(folder)
            assert (found.folder.file_system, found.folder.kind, found.folder.device) == ("tmpfs", "RAM", None)
            assert any("live in RAM" in line for line in problems(found))
            assert list(folder.iterdir()) == []
        finally:
            shutil.rmtree(folder)

    def test_the_default_folder_is_where_shards_go_and_names_no_user(self, quick, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NVME_CACHE_DIR", str(tmp_path / "kv"))
        (tmp_path / "kv").mkdir()
        found = examine(None)
        assert found.folder.path == "~/kv"
        assert found.settings.is_default_folder

    def test_folders_of_dead_processes_are_removed_and_named(self, quick, tmp_path):
        (tmp_path / ORPHAN).mkdir()
        for name in ("lock", "probe"):
            (tmp_path / ORPHAN / name).touch()
        (tmp_path / "precious").touch()
        found = examine(tmp_path)
        assert found.folder.removed_orphans == [ORPHAN]
        assert [path.name for path in tmp_path.iterdir()] == ["precious"]

    def test_memory_without_huge_pages_is_noticed(self, monkeypatch):
        if memory_facts().buffer_huge_page_bytes is None:
            pytest.skip("the kernel does not tell")

        def plain(nbytes):
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # shared: never any

        monkeypatch.setattr(memory, "transfer_for", lambda device: SimpleNamespace(host_memory=plain))
        assert memory_facts().buffer_huge_page_bytes == 0

    @pytest.mark.parametrize("name", ["none", "file"])
    def test_a_folder_that_cannot_be_used_raises(self, name, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(OffloadDirectoryError):
            examine(tmp_path / name)


class TestControlGroups:
    @pytest.mark.parametrize(
        ("groups", "files", "limit"),
        [
            ("0::/a/b", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, None),
            ("0::/a/b", {"a/memory.max": "900", "a/memory.current": "100"}, (900, 100)),
            (
                "0::/",
                {"memory.max": "900", "memory.current": "100", "memory.stat": "file 9\ninactive_file 30"},
                (900, 70),
            ),
            (
                "0::/a/b",
                {
                    "a/memory.max": "900",
                    "a/memory.current": "850",
                    "a/b/memory.max": "500",
                    "a/b/memory.current": "100",
                },
                (900, 850),
            ),
            (
                "4:memory:/gone\n3:cpu:/x",
                {
                    "memory/memory.limit_in_bytes": "800",
                    "memory/memory.usage_in_bytes": "300",
                    "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50",
                },
                (800, 250),
            ),
            ("4:cpu:/", {"memory/memory.limit_in_bytes": "800", "memory/memory.usage_in_bytes": "300"}, None),
        ],
        ids=["unlimited", "upper", "droppable", "leaves-least", "version-1", "not-in-it"],
    )
    def test_memory(self, groups, files, limit, tmp_path):
        write_groups(tmp_path, groups, files)
        found = cgroup.memory_limit(tmp_path)
        assert found == (None if limit is None else cgroup.MemoryLimit(*limit))

    @pytest.mark.parametrize(
        ("groups", "files", "cores"),
        [
            ("0::/a", {"a/cpu.max": "max 100000"}, None),
            ("0::/a", {"a/cpu.max": "150000 100000", "cpu.max": "400000 100000"}, 1.5),
            ("1:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
            ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ],
    )
    def test_processor(self, groups, files, cores, tmp_path):
        write_groups(tmp_path, groups, files)
        assert cgroup.cpu_quota(tmp_path) == cores

    def test_what_is_left_of_a_group_counts(self):
        assert FINE.memory.usable_bytes == 48 * GIB
        assert replace(FINE.memory, group_limit_bytes=8 * GIB, group_used_bytes=3 * GIB).usable_bytes == 5 * GIB
        assert replace(FINE.memory, group_limit_bytes=60 * GIB, group_used_bytes=3 * GIB).usable_bytes == 48 * GIB


def write_groups(root, groups, files):
    tree = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


class TestMeasuring:
    @pytest.fixture
    def paced(self, monkeypatch):
        """Reads take as long as told."""

        def pace(seconds):
            def read(descriptor, views, offset):
                time.sleep(seconds(views[0].nbytes))
                return views[0].nbytes

            monkeypatch.setattr(os, "preadv", read)

        return pace

    def test_the_rates_of_all_threads_add_up(self, quick, paced, tmp_path, monkeypatch):
        paced(lambda nbytes: nbytes / 2e7)
        monkeypatch.setattr(drive, "_REQUEST_BYTES", (MIB, 4 * MIB))
        found = measure_drive(tmp_path, 500 * GIB, 3, direct=False)
        assert [read.request_bytes for read in found.reads] == [MIB, 4 * MIB]
        for read in found.reads:
            assert read.bytes_per_s == pytest.approx(6e7, rel=0.25)
        assert list(tmp_path.iterdir()) == []

    def test_one_slow_read_in_ten_shows_in_the_tail_alone(self, quick, paced, tmp_path, monkeypatch):
        calls = iter(range(10**6))
        paced(lambda nbytes: 0.02 if next(calls) % 10 == 0 else 0.002)
        monkeypatch.setattr(drive, "_REQUEST_BYTES", (MIB,))
        monkeypatch.setattr(drive, "_LEAST_READS", 40)
        for latency in measure_drive(tmp_path, 500 * GIB, 1, direct=False).latencies:
            assert latency.reads == 40
            assert 0.002 <= latency.p50_s < 0.01
            assert 0.02 <= latency.p95_s <= latency.p99_s

    def test_a_slow_drive_gets_a_short_file(self, quick, tmp_path, monkeypatch):
        monkeypatch.setattr(drive, "_MOST_BYTES", 256 * MIB)
        monkeypatch.setattr(drive, "_WRITE_S", 0.05)
        sizes, write_all = [], drive.io.write_all

        def slow(descriptor, views, offset):
            write_all(descriptor, views, offset)
            sizes.append(offset + views[0].nbytes)
            time.sleep(0.06)

        monkeypatch.setattr(drive.io, "write_all", slow)
        found = measure_drive(tmp_path, 500 * GIB, 2, direct=False)
        assert sizes == [drive.SHARD_BYTES]
        assert found.write_bytes_per_s < drive.SHARD_BYTES / 0.06

    def test_little_room_is_left_alone(self, tmp_path):
        with pytest.raises(OSError, match="a test needs 48 MiB free"):
            measure_drive(tmp_path, 40 * MIB, 2, direct=False)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("error", [OSError(122, "Disk quota exceeded"), OSError(5, "Input/output error")])
    def test_a_drive_that_refuses_is_a_problem(self, error, quick, tmp_path, monkeypatch):
        def refuse(*_):
            raise error

        monkeypatch.setattr(drive, "_write", lambda *_, **__: refuse())
        found = examine(tmp_path)
        assert (found.drive, found.drive_failure) == (None, error.strerror)
        assert any(error.strerror in line for line in problems(found))
        assert list(tmp_path.iterdir()) == []

    def test_an_interrupt_in_the_middle_leaves_nothing(self, quick, tmp_path, monkeypatch):
        seen = []

        def interrupt(reader, size):
            seen.extend(path.relative_to(tmp_path).parts[-1] for path in tmp_path.rglob("*"))
            raise KeyboardInterrupt

        monkeypatch.setattr(drive, "_latency", interrupt)
        with pytest.raises(KeyboardInterrupt):
            examine(tmp_path)
        assert {"lock", "probe"} <= set(seen)
        assert list(tmp_path.iterdir()) == []

    def test_control_c_leaves_nothing_and_nobody_else_can_read_meanwhile(self, tmp_path):
        command = [sys.executable, "-m", "nvme_cache.cli", "doctor", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            modes = []
            while not modes:
                assert run.poll() is None, run.stderr.read()
                time.sleep(0.002)
                with suppress(FileNotFoundError):  # shorter files come and go before
                    for probe in tmp_path.glob("*/probe"):
                        if probe.stat().st_size >= drive.SHARD_BYTES:
                            modes = [path.stat().st_mode & 0o777 for path in (probe, probe.parent)]
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=30)
        assert modes == [0o600, 0o700]
        assert run.returncode != 0
        assert list(tmp_path.iterdir()) == []


class TestAccelerator:
    def test_none_without_one(self):
        if torch.accelerator.is_available():
            pytest.skip("there is one")
        assert accelerator_facts() is None

    @pytest.mark.parametrize("can_pin", [True, False])
    def test_what_torch_says_of_it(self, can_pin, monkeypatch):
        def rates(device):
            if not can_pin:
                raise RuntimeError("out of memory")
            return {"to device": 25e9, "from device": 24e9}

        module = SimpleNamespace(
            mem_get_info=lambda device: (20 * GIB, 24 * GIB), get_device_name=lambda device: f"Graphics {device.index}"
        )
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 5)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(accelerator, "_copy_rates", rates)
        unknown = {"to_device_bytes_per_s": None, "from_device_bytes_per_s": None}
        assert accelerator_facts() == (GPU if can_pin else replace(GPU, **unknown))

    def test_copies_are_timed_until_they_are_done(self, monkeypatch):
        """On a device whose copies to it take 20 ms, those from it 40 ms, all behind the call's back."""

        class Slow(accelerator.transfer_for(torch.device("cpu")).__class__):
            def copy(self, target, source):
                self.wait_s = 0.02 if target is self.there else 0.04

            def device_memory(self, nbytes):
                self.there = self.host_memory(nbytes)
                return self.there

            def record(self):
                return SimpleNamespace(synchronize=lambda: time.sleep(self.wait_s))

        slow = Slow()
        monkeypatch.setattr(accelerator, "transfer_for", lambda device: slow)
        rates = accelerator._copy_rates(torch.device("cpu"))
        assert rates == pytest.approx({"to device": 64 * MIB / 0.02, "from device": 64 * MIB / 0.04}, rel=0.25)


NO_DRIVE = {"drive": None, "drive_failure": "Disk quota exceeded"}


class TestProblems:
    def test_none(self):
        assert problems(FINE) == []
        assert problems(changed(accelerator=GPU)) == []

    @pytest.mark.parametrize(
        ("facts", "words"),
        [
            ({"folder": {"kind": "RAM", "file_system": "tmpfs", "takes_direct": False}}, "tmpfs: its files live in"),
            ({"folder": {"kind": "network", "file_system": "nfs4"}}, "network (nfs4). Use a folder on a drive of this"),
            ({"folder": {"takes_direct": False, "file_system": "zfs"}}, "zfs refuses O_DIRECT"),
            ({"folder": {"free_bytes": 3 * GIB}}, "Only 3.0 GiB free, 24,576 tokens"),
            ({"folder": {"file_limit_bytes": 12 * MIB}}, "ulimit -f unlimited"),
            ({"folder": {"removed_orphans": [ORPHAN]}}, f"{ORPHAN}. Removed"),
            ({"drive": {"reads": reading_at(4e8)}}, "reads at 0.40 GB/s, far below an NVMe drive"),
            ({"drive": {"reads": reading_at(2e8)}, "folder": {"is_rotational": True}}, "rotational, and reads at 0.20"),
            (NO_DRIVE, "could not be measured: Disk quota exceeded"),
            ({"memory": {"buffer_huge_page_bytes": 0, "huge_page_setting": "never"}}, "as root, echo madvise > /sys"),
            ({"memory": {"buffer_huge_page_bytes": 4 * MIB}}, 'set to "madvise", so memory is in pieces'),
            ({"memory": {"available_bytes": 900 * MIB}}, "Only 900 MiB of memory left"),
            ({"memory": {"group_limit_bytes": 8 * GIB, "group_used_bytes": 9 * GIB}}, "Only 0 MiB of memory left"),
            ({"memory": {"open_files_limit": 256}}, "Only 256 files may be open"),
            ({"accelerator": replace(GPU, to_device_bytes_per_s=None)}, "ulimit -l is 8 MiB"),
            ({"processor": {"cores": 1}}, "Cores to run on: 1,"),
            ({"processor": {"quota_cores": 1.5}}, "Cores to run on: 1.5,"),
        ],
    )  # fmt: skip
    def test_each_has_its_line(self, facts, words):
        [line] = problems(changed(**facts))
        assert words in line
        assert "\n" not in line

    @pytest.mark.parametrize(
        "facts",
        [
            {"folder": {"is_rotational": True}},  # virtual disks say so whatever they are
            {"folder": {"file_limit_bytes": GIB}},
            {"memory": {"open_files_limit": None, "locked_limit_bytes": None}},
            {"memory": {"buffer_huge_page_bytes": None}},
            {"memory": {"group_limit_bytes": 60 * GIB, "group_used_bytes": 6 * GIB}},
            {"drive": {"reads": [*reading_at(2e8), *reading_at(1.2e9)]}},
            {"processor": {"quota_cores": 2}},
        ],
    )
    def test_what_is_none(self, facts):
        assert problems(changed(**facts)) == []


def numbers(figures, key=""):
    """Every number in JSON with its key."""
    if isinstance(figures, dict):
        for name, value in figures.items():
            yield from numbers(value, name)
    elif isinstance(figures, list):
        for value in figures:
            yield from numbers(value, key)
    elif isinstance(figures, (int, float)) and not isinstance(figures, bool):
        yield key, figures


WORST = changed(
    folder={
        "path": "/mnt/" + "long/" * 30,
        "file_system": "nfs4",
        "kind": "network",
        "device": None,
        "takes_direct": False,
        "free_bytes": GIB,
        "removed_orphans": [ORPHAN] * 5,
        "file_limit_bytes": MIB,
    },
    memory={"buffer_huge_page_bytes": 0, "group_limit_bytes": 8 * GIB, "group_used_bytes": 8 * GIB},
    processor={"cores": 1, "quota_cores": 0.5, "name": "Processor with a long name " * 4},
    accelerator=replace(GPU, to_device_bytes_per_s=None, from_device_bytes_per_s=None),
    **NO_DRIVE,
)


ENVIRONMENTS = [{"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"COLUMNS": "200"}, {"COLUMNS": "60"}]


class TestCommand:
    def test_what_is_shown(self, shown):
        text = shown(FINE).stdout
        for line in (
            "path            ~/kv",
            "file system     ext4, local, on nvme0n1 Fast 990",
            "free space      500.0 GiB of 900.0 GiB, writable",
            "huge pages      32 MiB of a buffer of 32 MiB (kernel: madvise)",
            "reads   64 KiB  2.00 GB/s  ############",
            "         1 MiB  6.50 GB/s  " + 40 * "#",
            "random 4 KiB    P50 80 us  P95 120 us  P99 950 us  (5,000 reads)",
            "safetensors     not installed",
            'host_budget     24.0 GiB ("auto")',
            "io_threads      4 (a test of the drive read at 6.60 GB/s)",
            "prefetch_depth  layers of 1 MiB: 4, 64 MiB: 2",
            "No problems found.",
        ):
            assert f"  {line}" in text
        assert "locked memory" not in text

    def test_what_is_shown_where_the_drive_does_not_count(self, shown):
        found = changed(folder={"kind": "RAM"}, settings={"is_default_folder": False, "is_drive_tested": False})
        text = shown(found).stdout
        assert "O_DIRECT        of no use" in text
        assert "offload_dir     ~/kv, if you pass it" in text
        assert "drive not tested, taken for one of 6.60 GB/s" in text

    def test_what_is_shown_of_an_accelerator(self, shown):
        text = shown(changed(accelerator=GPU)).stdout
        assert "link            25.00 GB/s to the device, 24.00 GB/s back, pinned" in text
        assert "locked memory   8 MiB at most" in text

    @pytest.mark.parametrize("found", [FINE, WORST], ids=["fine", "worst"])
    @pytest.mark.parametrize(
        "environment", [{"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"COLUMNS": "200"}, {"COLUMNS": "60"}]
    )
    def test_lines_are_no_wider_than_80(self, found, environment, shown):
        from rich.text import Text

        lines = Text.from_ansi(shown(found, **environment).stdout).plain.splitlines()
        assert len(lines) > 30
        assert max(map(len, lines)) <= min(80, int(environment.get("COLUMNS", 80)))

    def test_every_problem_is_shown_whole(self, shown):
        text = shown(WORST).stdout
        assert len(problems(WORST)) >= 8
        assert text.count("  !") == len(problems(WORST))
        words = " ".join(text.replace("  !", " ").split())
        assert "No problems" not in text
        for line in problems(WORST):
            assert line.replace(" ", "") in words.replace(" ", "")

    @pytest.mark.parametrize("found", [FINE, WORST, changed(accelerator=GPU)], ids=["fine", "worst", "accelerator"])
    def test_json(self, found, shown):
        figures = json.loads(shown(found, "--json").stdout)
        assert figures["folder"]["free_bytes"] == found.folder.free_bytes
        assert figures["problems"] == problems(found)
        counts = {
            "cores",
            "quota_cores",
            "ratio",
            "threads",
            "io_threads",
            "reads",
            "prefetch_depth",
            "open_files_limit",
        }
        for key, _ in numbers(figures):
            assert key in counts or key.endswith(("_bytes", "_s", "_bytes_per_s")), key

    def test_json_of_this_machine_is_all_that_is_printed(self, quick, tmp_path):
        result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
        figures = json.loads(result.stdout)
        assert figures["folder"]["path"] == str(tmp_path)
        assert figures["drive"]["reads"][0]["bytes_per_s"] > 0
        assert result.exit_code == 0

    @pytest.mark.parametrize("options", [[], ["--json"]])
    def test_a_missing_folder_is_named_on_standard_error(self, options, tmp_path):
        result = CliRunner().invoke(app, ["doctor", str(tmp_path / "none"), *options])
        assert result.exit_code == 1
        assert "does not exist. Create it" in " ".join(result.stderr.split())
        assert result.stdout == ""

    def test_a_chart_is_a_png(self, shown, tmp_path):
        pytest.importorskip("matplotlib")
        result = shown(FINE, "--chart", tmp_path / "reads", "--json")
        assert (tmp_path / "reads").read_bytes().startswith(b"\x89PNG")
        assert json.loads(result.stdout)
        assert "chart: " in result.stderr

    def test_without_matplotlib_it_says_how_to_get_it(self, shown, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        result = shown(FINE, "--chart", tmp_path / "reads.png")
        assert "pip install 'nvme-cache[bench]'" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_without_rates_there_is_no_chart(self, shown, tmp_path):
        assert "no chart: Disk quota exceeded" in shown(WORST, "--chart", tmp_path / "reads.png").stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_chart_that_cannot_be_is_refused_before_anything_is_measured(self, tmp_path):
        result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--chart", str(tmp_path / "none" / "reads.png")])
        assert result.exit_code == 2
