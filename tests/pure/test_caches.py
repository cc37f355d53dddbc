"""Compile caches: where the ranks of a run have them, and what doctor says of the places."""

from pathlib import Path

import msgspec
import pytest

from pure.test_doctor import HEALTHY
from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.launch.agent.compile_caches import PLACES, SWITCHES, Cache, given, look
from resilient_train.launch.agent.processes import Processes
from resilient_train.launch.cli.doctor import Grade, as_dict, judge
from resilient_train.launch.spec import JobSpec
from resilient_train.protocol.policy import Policy


def test_in_the_run_directory_and_the_same_for_a_later_run(tmp_path: Path) -> None:
    found = given(tmp_path, {"PATH": "/bin"})
    assert set(found) == {*PLACES, *SWITCHES}
    places = [Path(found[name]) for name in PLACES]
    assert len(set(places)) == len(places)
    assert all(place.is_dir() and place.is_relative_to(tmp_path) for place in places)
    (places[0] / "kernel").write_text("compiled")
    assert given(tmp_path, {}) == found
    assert (places[0] / "kernel").read_text() == "compiled"


@pytest.mark.parametrize("name", [*PLACES, *SWITCHES])
def test_what_the_user_has_set_stays(name: str, tmp_path: Path) -> None:
    found = given(tmp_path, {name: ""})
    assert set(found) == {*PLACES, *SWITCHES} - {name}
    if name in PLACES:
        assert not (tmp_path / "compile_cache" / PLACES[name]).exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "compile_cache").write_text("in the way")
    with pytest.raises(ConfigError, match=r"compile_cache/mindspore can't be made: .*set MS_COMPILER_CACHE_PATH"):
        given(tmp_path, {})


class StandbySpy:
    """Remembers which environments the zygote gets."""

    def begin(self, environs: list[dict[str, str]]) -> None:
        self.environs = environs


class NoLogs:
    def folder(self, rank: int) -> Path:
        return Path("/logs") / str(rank)


def environs(run_dir: Path, max_restarts: int) -> list[dict[str, str]]:
    """Of a first rank, a replacement, one after a restart of all, and the standbys."""
    job = JobSpec(
        command=("true",),
        world_size=2,
        run_dir=run_dir,
        run_id="x",
        policy=Policy(max_restarts=max_restarts),
        settings=config.Settings(),
        log_dir=run_dir,
    )
    spy = StandbySpy()
    started = Processes(job, NoLogs(), spy, run_dir / "socket", 1, "token")
    started.begin()
    first = started._environ(0, 0, 0, joining=False)
    return [first, started._environ(1, 3, 0, joining=True), started._environ(0, 1, 2, joining=False), *spy.environs]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACES, *SWITCHES):
        monkeypatch.delenv(name, raising=False)


def test_ranks_replacements_and_standbys_have_the_same(bare: None, tmp_path: Path) -> None:
    expected = given(tmp_path, {})
    for each in environs(tmp_path, max_restarts=1):
        assert {name: each[name] for name in expected} == expected


def test_the_users_own_reach_the_ranks(bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/shared/inductor")
    monkeypatch.setenv("MS_COMPILER_CACHE_ENABLE", "0")
    for each in environs(tmp_path, max_restarts=100):
        assert each["TORCHINDUCTOR_CACHE_DIR"] == "/shared/inductor"
        assert each["MS_COMPILER_CACHE_ENABLE"] == "0"


def test_without_restarts_nothing_is_set(bare: None, tmp_path: Path) -> None:
    assert not any(name in each for each in environs(tmp_path, max_restarts=0) for name in (*PLACES, *SWITCHES))
    assert not (tmp_path / "compile_cache").exists()


# -- doctor


def test_look_makes_nothing_and_tells_the_source(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    found = {cache.variable: cache for cache in look(tmp_path / "new", {"ASCEND_CACHE_PATH": str(mine)})}
    assert set(found) == set(PLACES)
    assert found["ASCEND_CACHE_PATH"].source == "environment"
    assert found["ASCEND_CACHE_PATH"].path == str(mine)
    assert found["TORCHINDUCTOR_CACHE_DIR"].source == "run directory"
    assert all(cache.writable and cache.free_bytes > 0 for cache in found.values())
    assert list(tmp_path.iterdir()) == []


def test_look_at_a_place_that_is_a_file_or_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {"ASCEND_CACHE_PATH": str(tmp_path / "file" / "deep"), "MS_COMPILER_CACHE_PATH": "/dev/shm/ms"}
    found = {cache.variable: cache for cache in look(tmp_path, environ)}
    assert not found["ASCEND_CACHE_PATH"].writable
    assert found["MS_COMPILER_CACHE_PATH"].in_memory


GOOD = Cache("ASCEND_CACHE_PATH", "/data/ascend", "environment", True, "ext4", 1 << 40)


@pytest.mark.parametrize(
    ("change", "grade", "words"),
    [
        ({}, Grade.OK, "/data/ascend (environment): on ext4, for the processes of this node alone; 1024.0 GiB free"),
        ({"filesystem": "nfs4"}, Grade.OK, "on nfs4, for all nodes that mount it"),
        ({"filesystem": "fuse.juicefs"}, Grade.OK, "for all nodes that mount it"),
        ({"filesystem": "fuse.overlay"}, Grade.OK, "this node alone"),
        ({"filesystem": "tmpfs"}, Grade.NOTE, "on tmpfs: it takes memory"),
        ({"free_bytes": 1 << 20}, Grade.NOTE, "only 0.0 GiB free"),
        ({"writable": False}, Grade.PROBLEM, "can't be written: every process"),
    ],
)
def test_doctor_judges_a_cache(change: dict[str, object], grade: Grade, words: str) -> None:
    facts = msgspec.structs.replace(HEALTHY, caches=(msgspec.structs.replace(GOOD, **change),))
    (told,) = [finding for finding in judge(facts) if finding.what == "ASCEND_CACHE_PATH"]
    assert told.grade is grade
    assert words in told.text
    assert as_dict(facts, judge(facts))["caches"][0]["source"] == "environment"


def test_an_unwritable_run_directory_is_told_once() -> None:
    cache = msgspec.structs.replace(GOOD, writable=False, source="run directory")
    facts = msgspec.structs.replace(HEALTHY, caches=(cache,), run_dir_writable=False)
    assert [finding.what for finding in judge(facts) if finding.grade is Grade.PROBLEM] == ["run directory"]


def test_doctor_tells_what_the_user_switched() -> None:
    facts = msgspec.structs.replace(HEALTHY, cache_switches={"MS_COMPILER_CACHE_ENABLE": "0"})
    (told,) = [finding for finding in judge(facts) if finding.what == "MS_COMPILER_CACHE_ENABLE"]
    assert told.text == "0 (environment; resilient-run would set 1)"
