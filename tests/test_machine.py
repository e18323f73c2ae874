"""CPU and memory limits, on faked machines: /proc, /sys and both versions of control groups below tmp_path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy import machine

GIB = 2**30


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """fake(groups, files, cpus, cores, meminfo): what /proc/self/cgroup says, and the files below /sys/fs/cgroup."""

    def build(
        groups: str = "",
        files: dict[str, str] | None = None,
        cpus: int = 16,
        cores: Callable[[int], tuple[int, int]] | None = None,
        meminfo: str = f"MemTotal: {2**26} kB\nMemAvailable: {2**25} kB\n",
    ) -> None:
        tree = {"/proc/self/cgroup": groups, "/proc/meminfo": meminfo}
        for cpu in range(cpus) if cores else ():
            package, core = cores(cpu)  # type: ignore[misc]
            folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
            tree |= {f"{folder}/physical_package_id": f"{package}\n", f"{folder}/core_id": f"{core}\n"}
        tree |= {f"/sys/fs/cgroup/{name}": text for name, text in (files or {}).items()}
        for name, text in tree.items():
            path = tmp_path / name[1:]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        read = machine._read

        def moved(path: Path) -> str:
            return read(path if path.is_relative_to(tmp_path) else tmp_path / str(path)[1:])

        monkeypatch.setattr(machine, "_read", moved)
        monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path / "sys/fs/cgroup")
        monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(cpus)))

    return build


# --- threads -----------------------------------------------------------------------------------------------------


def test_affinity_and_physical_cores(fake: Any) -> None:
    fake(cpus=6)
    assert machine.default_threads() == 6  # no topology: every CPU is a core


@pytest.mark.parametrize(
    ("cores", "want"),
    [
        (lambda cpu: (0, cpu // 2), 4),  # two threads a core
        (lambda cpu: (cpu // 4, cpu % 4), 8),  # two packages with the same core numbers
        (lambda cpu: (cpu // 4, cpu % 2), 4),
    ],
)
def test_hyperthreads_count_once(fake: Any, cores: Callable[[int], tuple[int, int]], want: int) -> None:
    fake(cpus=8, cores=cores)
    assert machine.default_threads() == want


@pytest.mark.parametrize(
    ("quota", "want"),
    [("250000 100000", 2), ("399999 100000", 3), ("50000 100000", 1), ("max 100000", 16), ("9900000 100000", 16)],
)
def test_quota_of_version_2_is_rounded_down(fake: Any, quota: str, want: int) -> None:
    fake("0::/app/worker\n", {"app/worker/cpu.max": quota + "\n"})
    assert machine.default_threads() == want


def test_quota_of_a_parent_counts(fake: Any) -> None:
    files = {"a/b/c/cpu.max": "max 100000", "a/b/cpu.max": "800000 100000", "a/cpu.max": "150000 50000"}
    fake("0::/a/b/c\n", files)
    assert machine.default_threads() == 3


def test_a_sibling_does_not_count(fake: Any) -> None:
    fake("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/c/cpu.max": "100000 100000", "b/cpu.max": "100000 100000"})
    assert machine.default_threads() == 16


@pytest.mark.parametrize(("quota", "want"), [("350000", 3), ("-1", 16), ("1000", 1)])
def test_quota_of_version_1(fake: Any, quota: str, want: int) -> None:
    folder = "cpu/docker/abc"
    fake(
        "7:memory:/docker/abc\n4:cpu:/docker/abc\n1:name=systemd:/docker/abc\n",
        {f"{folder}/cpu.cfs_quota_us": quota + "\n", f"{folder}/cpu.cfs_period_us": "100000\n"},
    )
    assert machine.default_threads() == want


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpuacct,cpu", "cpu"])
def test_controllers_mounted_together(fake: Any, folder: str) -> None:
    """The kernel lists them in its own order; the folder may have another, with links for each controller."""
    files = {f"{folder}/job/cpu.cfs_quota_us": "200000", f"{folder}/job/cpu.cfs_period_us": "100000"}
    if folder == "cpu,cpuacct":  # the link "cpu", which fakes as a folder of its own
        files |= {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"}
    fake("4:cpuacct,cpu:/job\n", files)
    assert machine.default_threads() == 2


def test_inside_a_container_the_root_is_its_own_group(fake: Any) -> None:
    """/proc/self/cgroup shows the host's path, but what is mounted is the container's group."""
    files = {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}
    fake("4:cpu:/kubepods/pod1/x\n", files)
    assert machine.default_threads() == 3


def test_the_stricter_version_wins_where_both_are_mounted(fake: Any) -> None:
    files = {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000", "cpu.max": "200000 100000"}
    fake("4:cpu:/\n0::/\n", files)
    assert machine.default_threads() == 2


@pytest.mark.parametrize("text", ["", "garbage", "0::/../../x\n", "a:b:c\n:::\n", "4:cpu:/x\n"])
def test_unreadable_groups_limit_nothing(fake: Any, text: str) -> None:
    fake(text, {"x/cpu.max": "1 0"}, cpus=5)
    assert machine.default_threads() == 5


@pytest.mark.parametrize("quota", ["", "nonsense", "100000", "-1 100000", "100000 0", "1 2 3"])
def test_damaged_quotas_limit_nothing(fake: Any, quota: str) -> None:
    fake("0::/\n", {"cpu.max": quota}, cpus=5)
    assert machine.default_threads() == 5


def test_this_machine() -> None:
    assert 1 <= machine.default_threads() <= len(machine.os.sched_getaffinity(0))
    assert 0 < machine.available_memory() <= machine.os.sysconf("SC_PHYS_PAGES") * machine.os.sysconf("SC_PAGE_SIZE")


# --- memory ------------------------------------------------------------------------------------------------------


def test_free_memory_without_groups(fake: Any) -> None:
    fake()
    assert machine.available_memory() == 2**25 * 1024


def test_without_meminfo_all_of_it(fake: Any) -> None:
    fake(meminfo="")
    assert machine.available_memory() == machine.os.sysconf("SC_PHYS_PAGES") * machine.os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("limit", "usage", "want"),
    [(f"{GIB}", f"{GIB // 4}", GIB // 4 * 3), ("max", f"{GIB}", 32 * GIB), (f"{GIB}", f"{2 * GIB}", 0)],
)
def test_limit_of_version_2(fake: Any, limit: str, usage: str, want: int) -> None:
    fake("0::/app\n", {"app/memory.max": limit + "\n", "app/memory.current": usage + "\n"})
    assert machine.available_memory() == want


def test_limit_of_a_parent_counts(fake: Any) -> None:
    files = {"a/b/memory.max": f"{8 * GIB}", "a/b/memory.current": f"{GIB}"}
    fake("0::/a/b\n", files | {"a/memory.max": f"{4 * GIB}", "a/memory.current": f"{3 * GIB}"})
    assert machine.available_memory() == GIB


@pytest.mark.parametrize(("limit", "want"), [(2 * GIB, GIB), (9223372036854771712, 32 * GIB)])
def test_limit_of_version_1(fake: Any, limit: int, want: int) -> None:
    folder = "memory/job"
    files = {f"{folder}/memory.limit_in_bytes": f"{limit}\n", f"{folder}/memory.usage_in_bytes": f"{GIB}\n"}
    fake("4:memory:/job\n2:cpu:/\n", files)
    assert machine.available_memory() == want


@pytest.mark.parametrize(("high", "want"), [(f"{2 * GIB}", GIB), ("max", 7 * GIB), (f"{9 * GIB}", 7 * GIB)])
def test_where_a_group_of_version_2_is_slowed_down_counts(fake: Any, high: str, want: int) -> None:
    files = {"app/memory.max": f"{8 * GIB}", "app/memory.high": high, "app/memory.current": f"{GIB}"}
    fake("0::/app\n", files)
    assert machine.available_memory() == want


def test_page_cache_that_can_be_dropped_does_not_count_as_used(fake: Any) -> None:
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {2 * GIB}\nactive_file 77\nworkingset_refault_file x\n"
    files = {"app/memory.max": f"{4 * GIB}", "app/memory.current": f"{3 * GIB}", "app/memory.stat": stat}
    fake("0::/app\n", files)
    assert machine.available_memory() == 3 * GIB


def test_page_cache_of_the_groups_below_counts_in_version_1(fake: Any) -> None:
    """As their usage does; inside a container, whose own group is what is mounted."""
    files = {
        "memory/memory.limit_in_bytes": f"{4 * GIB}",
        "memory/memory.usage_in_bytes": f"{3 * GIB}",
        "memory/memory.stat": f"cache {GIB}\ninactive_file {GIB // 4}\ntotal_inactive_file {GIB}\n",
    }
    fake("4:memory:/docker/abc\n", files)
    assert machine.available_memory() == 2 * GIB


@pytest.mark.parametrize("damaged", ["memory.max", "memory.current"])
def test_a_damaged_limit_or_usage_limits_nothing(fake: Any, damaged: str) -> None:
    fake("0::/app\n", {"app/memory.max": f"{GIB}", "app/memory.current": "0", f"app/{damaged}": "a lot\n"})
    assert machine.available_memory() == 32 * GIB
