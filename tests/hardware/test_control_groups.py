"""How much memory a process can take: the machine's, within a container's limit."""

import os

import pytest

from nanovllm.hardware.control_groups import available_memory

MEMINFO = "MemTotal:       65000000 kB\nMemFree:          300000 kB\nMemAvailable:   20000000 kB\nHugePages_Total: 0"
OF_THE_MACHINE = 20_000_000 << 10


@pytest.fixture
def machine(tmp_path):
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group(root, directory, limit, used, kept):
    """A control group of version 2."""
    write(root, f"sys/fs/cgroup/{directory}/memory.max", limit)
    write(root, f"sys/fs/cgroup/{directory}/memory.current", used)
    write(root, f"sys/fs/cgroup/{directory}/memory.stat", f"anon 12\ninactive_file {kept}\nactive_file 900000000")


def test_memory_that_holds_files_is_available(machine):
    assert available_memory(machine) == OF_THE_MACHINE


@pytest.mark.parametrize(
    "limit, available",
    [
        ("max", OF_THE_MACHINE),
        (50_000_000_000, OF_THE_MACHINE),
        (2_000_000_000, 1_700_000_000),
        (400_000_000, 100_000_000),
    ],
)
def test_a_container_has_the_rest_of_its_limit(machine, limit, available):
    write(machine, "proc/self/cgroup", "0::/docker/7")
    group(machine, "docker/7", limit, used=500_000_000, kept=200_000_000)
    assert available_memory(machine) == available


def test_a_group_has_no_more_than_those_that_it_is_in(machine):
    write(machine, "proc/self/cgroup", "0::/outer/inner")
    group(machine, "outer", 3_000_000_000, used=2_900_000_000, kept=0)
    group(machine, "outer/inner", 3_000_000_000, used=500_000_000, kept=0)
    assert available_memory(machine) == 100_000_000


def test_control_groups_of_version_1(machine):
    write(machine, "proc/self/cgroup", "5:memory:/docker/7\n4:cpu,cpuacct:/docker/7\n0::/docker/7")
    directory = "sys/fs/cgroup/memory"  # in the container the group is at the root
    write(machine, f"{directory}/memory.limit_in_bytes", 1_000_000_000)
    write(machine, f"{directory}/memory.usage_in_bytes", 700_000_000)
    write(machine, f"{directory}/memory.stat", "inactive_file 1\ntotal_inactive_file 100000000")
    assert available_memory(machine) == 400_000_000
    write(machine, f"{directory}/memory.limit_in_bytes", 2**63 - 4096)  # none
    assert available_memory(machine) == OF_THE_MACHINE


def test_a_group_beyond_its_limit_has_nothing(machine):
    write(machine, "proc/self/cgroup", "0::/")
    group(machine, "", 300_000_000, used=400_000_000, kept=0)
    assert available_memory(machine) == 0


def test_a_system_that_does_not_tell(tmp_path):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_memory(tmp_path) == total // 2
