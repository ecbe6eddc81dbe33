"""How many threads the C++ kernels have: physical cores, within a container's share of time."""

import os

import pytest

from nanovllm.kernels.cpu.cores import num_threads, usable_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root directory; processors 0 to 7, of which 2 i and 2 i + 1 share a core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for cpu in range(8):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu // 2 * 2}-{cpu | 1}")
    return tmp_path


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_one_for_each_physical_core_of_the_affinity(machine, monkeypatch):
    assert usable_cores(machine) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5}, raising=False)
    assert usable_cores(machine) == 2
    assert usable_cores(machine / "nowhere") == 3  # nothing says which share a core


@pytest.mark.parametrize(
    "quota, cores",
    [("max 100000", 4), ("100000 100000", 1), ("150000 100000", 2), ("1000 100000", 1), ("800000 100000", 4)],
)
def test_no_more_than_the_quota_of_the_control_group(machine, quota, cores):
    write(machine, "proc/self/cgroup", "0::/system.slice/ours")
    write(machine, "sys/fs/cgroup/system.slice/ours/cpu.max", quota)
    assert usable_cores(machine) == cores


def test_a_group_has_no_more_than_those_that_it_is_in(machine):
    write(machine, "proc/self/cgroup", "0::/outer/inner")
    write(machine, "sys/fs/cgroup/outer/cpu.max", "200000 100000")
    write(machine, "sys/fs/cgroup/outer/inner/cpu.max", "300000 100000")
    assert usable_cores(machine) == 2


def test_a_container_sees_its_own_group_at_the_root(machine):
    write(machine, "proc/self/cgroup", "0::/../../kubepods/pod7")
    write(machine, "sys/fs/cgroup/cpu.max", "100000 100000")
    assert usable_cores(machine) == 1


def test_control_groups_of_version_1(machine):
    write(machine, "proc/self/cgroup", "5:memory:/docker/7\n4:cpu,cpuacct:/docker/7\n0::/docker/7")
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert usable_cores(machine) == 4
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000")
    assert usable_cores(machine) == 3


def test_the_variable_decides(machine):
    assert num_threads("7") == 7
    assert num_threads(None) == usable_cores()
    for wrong in ("0", "abc", "-1", "2.5", "", str(2**31)):
        with pytest.raises(ValueError, match=f"NANOVLLM_CPU_THREADS='{wrong}': expected a positive integer"):
            num_threads(wrong)
