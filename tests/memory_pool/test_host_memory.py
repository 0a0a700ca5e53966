"""Available host memory, read from made-up /proc and /sys/fs/cgroup trees."""


import pytest
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.memory_pool.host_memory import available_bytes, default_host_pool_bytes

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path):
    """A machine with 64 GiB available and no cgroup."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {99 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    return proc, cgroup


def join_v2(machine, path, groups):
    """Puts the process into a v2 cgroup; ``groups`` maps directories to (limit, used, inactive file) bytes."""
    proc, cgroup = machine
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    for directory, (limit, used, inactive) in groups.items():
        files = cgroup / directory
        files.mkdir(parents=True, exist_ok=True)
        (files / "memory.max").write_text(f"{limit}\n")
        (files / "memory.current").write_text(f"{used}\n")
        (files / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file 3\n")


def join_v1(machine, path, groups):
    proc, cgroup = machine
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n4:memory:{path}\n2:cpuacct,cpu:/\n0::/\n")
    for directory, (limit, used, inactive) in groups.items():
        files = cgroup / "memory" / directory
        files.mkdir(parents=True, exist_ok=True)
        (files / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (files / "memory.usage_in_bytes").write_text(f"{used}\n")
        (files / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {inactive}\n")


def test_without_a_cgroup_the_machine_decides(machine):
    assert available_bytes(*machine) == 64 * GIB


@pytest.mark.parametrize("join", [join_v1, join_v2])
def test_the_cgroup_limit_counts_less_usage_plus_reclaimable_cache(machine, join):
    join(machine, "/pod", {"pod": (16 * GIB, 10 * GIB, 2 * GIB)})
    assert available_bytes(*machine) == 8 * GIB


@pytest.mark.parametrize("join", [join_v1, join_v2])
def test_the_tightest_ancestor_decides(machine, join):
    join(machine, "/pod/box", {"pod": (12 * GIB, 9 * GIB, 0), "pod/box": (16 * GIB, 1 * GIB, 0)})
    assert available_bytes(*machine) == 3 * GIB


@pytest.mark.parametrize("join", [join_v1, join_v2])
def test_a_path_of_the_machine_that_the_container_does_not_mount(machine, join):
    join(machine, "/docker/0123", {".": (6 * GIB, 1 * GIB, 0)})
    assert available_bytes(*machine) == 5 * GIB


@pytest.mark.parametrize(("join", "unlimited"), [(join_v1, UNLIMITED_V1), (join_v2, "max")])
def test_an_unlimited_cgroup_leaves_the_machine(machine, join, unlimited):
    join(machine, "/pod", {"pod": (unlimited, 10 * GIB, 0)})
    assert available_bytes(*machine) == 64 * GIB


def test_a_full_cgroup_leaves_nothing(machine):
    join_v2(machine, "/", {".": (4 * GIB, 5 * GIB, 0)})
    assert available_bytes(*machine) == 0


def test_this_machine_has_an_answer():
    assert 0 < available_bytes() < 1 << 50


@pytest.mark.parametrize(("device", "ranks", "share"), [("cuda", 1, 70), ("cuda", 4, 17.5), ("cpu", 1, 35), ("cpu", 2, 17.5)])
def test_default_share(device, ranks, share):
    assert default_host_pool_bytes(100 * GIB, ranks, device) == pytest.approx(share * GIB, abs=ranks)
