"""Available host memory, read from made-up /proc and /sys/fs/cgroup trees."""

import subprocess
import sys

import pytest

from sglang_freekv.memory_pool.host_memory import Room, available_bytes, default_host_pool_bytes, room, room_to_write

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


def limit(machine, address_space="unlimited", data="unlimited"):
    """Gives the process limits; it has mapped 5 GiB, 3 of them data."""
    proc, _ = machine
    (proc / "self" / "status").write_text(f"VmPeak:\t{9 << 20} kB\nVmSize:\t{5 << 20} kB\nVmRSS:\t{1 << 20} kB\nVmData:\t{3 << 20} kB\n")
    (proc / "self" / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {data:<20} unlimited            bytes     \n"
        "Max resident set          7                    unlimited            bytes     \n"
        f"Max address space         {address_space:<20} {address_space:<20} bytes     \n"
    )


def test_without_a_cgroup_the_machine_decides(machine):
    assert room(*machine) == Room(64 * GIB, "this machine", "end what takes the memory")


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


@pytest.mark.parametrize("join", [join_v1, join_v2])
def test_a_cgroup_that_bounds_is_named(machine, join):
    join(machine, "/pod", {"pod": (16 * GIB, 10 * GIB, 0)})
    assert room(*machine) == Room(6 * GIB, "a cgroup", "`docker run --memory=64g`, or a higher memory limit of the pod or slice")


@pytest.mark.parametrize(("limits", "left", "option"), [
    ({"address_space": 9 * GIB}, 4 * GIB, "-v"),
    ({"data": 9 * GIB}, 6 * GIB, "-d"),
    ({"address_space": 9 * GIB, "data": 6 * GIB}, 3 * GIB, "-d"),
    ({"address_space": 4 * GIB}, 0, "-v"),
])  # fmt: skip
def test_limits_of_the_process_count_what_it_has_mapped(machine, limits, left, option):
    join_v2(machine, "/pod", {"pod": (16 * GIB, 1 * GIB, 0)})
    limit(machine, **limits)
    remedy = f"`ulimit {option} unlimited` before the server, in a new shell if this one refuses"
    assert room(*machine) == Room(left, f"`ulimit {option}`", remedy)
    assert room_to_write(*machine).num_bytes == 15 * GIB, "what is mapped already counts twice"


@pytest.mark.parametrize("limits", [{}, {"address_space": 40 * GIB, "data": 40 * GIB}])
def test_limits_that_do_not_bound_are_not_named(machine, limits):
    join_v2(machine, "/pod", {"pod": (16 * GIB, 1 * GIB, 0)})
    limit(machine, **limits)
    assert room(*machine).bound == "a cgroup"


def test_a_proc_that_lacks_a_line_is_told(machine):
    (machine[0] / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(RuntimeError, match="meminfo: expected a line MemAvailable, which Linux has since 3.14, found none"):
        room(*machine)


def test_this_machine_has_an_answer():
    assert 0 < available_bytes() < 1 << 50


@pytest.mark.parametrize("option", ["-v", "-d"])
def test_a_real_limit_of_this_machine_is_what_mmap_keeps_to(option):
    script = """
import mmap
from sglang_freekv.memory_pool.host_memory import room
def fits(num_bytes):
    try:
        return bool(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError:
        return False
held = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
found = room()
print(found.bound, found.num_bytes <= 384 << 20, fits(found.num_bytes - (4 << 20)), fits(found.num_bytes + (4 << 20)))
"""
    command = f'ulimit {option} {512 << 10} && exec "$0" -P -c "$1"'
    run = subprocess.run(["sh", "-c", command, sys.executable, script], capture_output=True, text=True, timeout=300)
    assert (run.stdout.split(), run.stderr) == (["`ulimit", f"{option}`", "True", "True", "False"], "")


def test_resident_bytes_are_those_that_were_written_and_are_of_no_file(tmp_path):
    # a process of its own: in this one other tests' memory comes and goes meanwhile
    script = """
import mmap, sys
from sglang_freekv.memory_pool.host_memory import resident_bytes
held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
with open(sys.argv[1], "w+b") as file:
    file.truncate(64 << 20)
    mapped = mmap.mmap(file.fileno(), 0)
before = resident_bytes()
assert not any(mapped[:: mmap.PAGESIZE])
read = resident_bytes()
held[: 32 << 20 : mmap.PAGESIZE] = b"1" * ((32 << 20) // mmap.PAGESIZE)
print(read - before >> 20, resident_bytes() - read >> 20)
"""
    run = subprocess.run([sys.executable, "-P", "-c", script, str(tmp_path / "file")], capture_output=True, text=True, timeout=300)
    assert run.stderr == ""
    read, written = map(int, run.stdout.split())
    assert -8 <= read < 8 and 24 < written < 40


@pytest.mark.parametrize(("device", "ranks", "share"), [("cuda", 1, 70), ("cuda", 4, 17.5), ("cpu", 1, 35), ("cpu", 2, 17.5)])
def test_default_share(device, ranks, share):
    assert default_host_pool_bytes(100 * GIB, ranks, device) == pytest.approx(share * GIB, abs=ranks)
