"""What this machine lets the process have: CPUs and memory, control groups included (v1 and v2, up the tree)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """max(1, min(affinity, cgroup quota rounded down, physical cores))."""
    limits = [len(os.sched_getaffinity(0)), _physical_cores()]
    if (quota := _cgroup_cpus()) is not None:
        limits.append(int(quota))
    return max(1, min(limits))


def available_memory() -> int:
    """Bytes the process may still take without swapping: free memory, or what its control groups leave of it.

    Above memory.high a group is slowed down until it has given memory back, so that counts as a limit too.
    """
    free = [_meminfo("MemAvailable")]
    for folder in _cgroup_folders("memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None:
                free.append(max(0, limit - usage + _reclaimable(folder)))
    return min(free)


def trim_heap() -> None:
    """Give freed heap memory back to the system, where the C library can: after parsing, before large allocations."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _physical_cores() -> int:
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        core, package = _number(topology / "core_id"), _number(topology / "physical_package_id")
        cores.add((package, core) if core is not None else cpu)
    return len(cores)


def _cgroup_cpus() -> float | None:
    """The smallest CPU quota of the process's control groups, in CPUs."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        text = _read(folder / "cpu.max").split()
        if len(text) == 2 and text[0].isdigit() and text[1].isdigit() and int(text[1]):
            quotas.append(int(text[0]) / int(text[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Folders of the process's control group and of its parents, for v2 and for a v1 controller."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            root = CGROUP_ROOT
        elif controller in controllers.split(","):
            # Controllers mounted together may be listed in another order than their folder's name has them.
            root = next((r for r in (CGROUP_ROOT / controllers, CGROUP_ROOT / controller) if r.is_dir()), CGROUP_ROOT)
        else:
            continue
        folder = root / name.lstrip("/")
        while True:
            yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def _reclaimable(folder: Path) -> int:
    """Bytes of page cache that the kernel would drop first; a group's usage counts them.

    Version 1 has two figures. Usage counts groups below too, as only the one called total does.
    """
    found = {}
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            found[name] = int(value)
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _meminfo(key: str) -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
