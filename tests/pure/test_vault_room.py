"""Memory limits, read from made-up /proc and /sys trees."""

from pathlib import Path

import pytest

from resilient_train.state.vault.room import MARGIN_BYTES, Room, refusal, tightest

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def machine(free_gib: int = 16) -> dict[str, object]:
    return {"proc/meminfo": f"MemTotal: {32 << 20} kB\nMemFree: 5 kB\nMemAvailable: {free_gib << 20} kB\nHugePages: 0"}


def group(path: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup/{path}"
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.current": used,
        f"{base}/memory.stat": f"anon 5\nfile {cached + 7}\ninactive_file {cached}\nactive_file 0",
    }


def test_the_machine_alone(tmp_path: Path) -> None:
    root = write(tmp_path, {**machine(), "proc/self/cgroup": "0::/"})
    assert tightest(root) == Room("the memory of this machine", 16 * GIB, 32 * GIB)


def test_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    files = {
        **machine(),
        "proc/self/cgroup": "0::/pod/job",
        **group("pod/job", "max", 0),
        **group("pod", 8 * GIB, 6 * GIB),
    }
    room = tightest(write(tmp_path, files))
    assert room == Room("the memory limit /sys/fs/cgroup/pod/memory.max", 2 * GIB, 8 * GIB)


def test_page_cache_is_given_up_for_snapshots(tmp_path: Path) -> None:
    files = {**machine(), "proc/self/cgroup": "0::/job", **group("job", 8 * GIB, 8 * GIB, cached=5 * GIB)}
    assert tightest(write(tmp_path, files)).free_bytes == 5 * GIB


def test_a_container_sees_its_own_group_at_the_base(tmp_path: Path) -> None:
    files = {**machine(), "proc/self/cgroup": "0::/../../host/path/that/is/not/here", **group("", 4 * GIB, GIB)}
    assert tightest(write(tmp_path, files)).free_bytes == 3 * GIB


def test_version_1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/docker"
    files = {
        **machine(),
        "proc/self/cgroup": "5:cpu:/docker\n4:memory,hugetlb:/docker",
        f"{base}/memory.limit_in_bytes": 2 * GIB,
        f"{base}/memory.usage_in_bytes": 2 * GIB,
        f"{base}/memory.stat": f"cache 1\ntotal_inactive_file {GIB}",
    }
    room = tightest(write(tmp_path, files))
    assert room == Room("the memory limit /sys/fs/cgroup/memory/docker/memory.limit_in_bytes", GIB, 2 * GIB)


def test_this_machine_has_some_room() -> None:
    assert tightest().free_bytes > 0


@pytest.mark.parametrize("missing", [-1, 0])
def test_what_fits_is_not_refused(missing: int) -> None:
    assert refusal(0, 100, 50, Room("x", 150 + MARGIN_BYTES - missing, GIB)) == ""


def test_a_refusal_says_how_much_is_needed_and_where() -> None:
    text = refusal(3, 4 * GIB, GIB, Room("the memory limit /sys/fs/cgroup/memory.max", 2 * GIB, 8 * GIB))
    for part in ("rank 3", "4.00 GiB", "of 8.00 GiB leaves 2.00 GiB", "1.00 GiB are promised", "Nothing was allocated"):
        assert part in text
    assert "Raise the limit by 3.06 GiB" in text
