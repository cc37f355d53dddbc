"""Undisturbed runs that the process tests share: made once, by whoever comes first; one that fails fails all."""

import os
import signal
from pathlib import Path

import pytest
from running import Run
from shared import Undisturbed

ARGUMENTS = ("train.py", "--steps", "3")


def making(run_dir: Path, *_: str, ranks: int, code: int = 0, **environ: str) -> Run:
    """In place of a job."""
    run_dir.mkdir()
    with (run_dir.parent.parent / "made").open("a") as file:
        file.write(f"{run_dir} {ranks} {environ}\n")
    return Run(run_dir, code, "printed", "what went wrong")


def made(folder: Path) -> list[str]:
    return (folder / "made").read_text().splitlines()


def in_a_fork(asks: Undisturbed) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asks(*ARGUMENTS, ranks=2)
            code = 0
        finally:
            os._exit(code)
    return pid


def test_it_is_made_once(tmp_path: Path) -> None:
    for _ in range(2):  # another worker
        asks = Undisturbed(tmp_path, making)
        first = asks(*ARGUMENTS, ranks=2)
        assert asks(*ARGUMENTS, ranks=2) is first
        assert (first.code, first.out) == (0, "printed")
    assert len(made(tmp_path)) == 1


def test_what_is_asked_otherwise_is_another_one(tmp_path: Path) -> None:
    asks = Undisturbed(tmp_path, making)
    found = [
        asks(*ARGUMENTS, ranks=2),
        asks(*ARGUMENTS, ranks=3),
        asks(*ARGUMENTS, "--save", ranks=2),
        asks("other.py", *ARGUMENTS[1:], ranks=2),
        asks(*ARGUMENTS, ranks=2, MS_ENABLE_TFT="{TRE:1}"),
    ]
    assert len({run.run_dir for run in found}) == len(made(tmp_path)) == len(found)


def test_workers_that_come_at_once_get_the_same(tmp_path: Path) -> None:
    told, tells = os.pipe()
    goes_on, go_on = os.pipe()

    def slow(run_dir: Path, *arguments: str, ranks: int) -> Run:
        os.write(tells, b"1")
        os.read(goes_on, 1)
        return making(run_dir, *arguments, ranks=ranks)

    children = [in_a_fork(Undisturbed(tmp_path, slow)) for _ in range(3)]
    os.read(told, 1)  # one of them holds the lock
    os.write(go_on, b"123")  # one each: if they do not wait, they end all the same, and are counted
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert len(made(tmp_path)) == 1
    Undisturbed(tmp_path, making)(*ARGUMENTS, ranks=2)
    assert len(made(tmp_path)) == 1
    for descriptor in (told, tells, goes_on, go_on):
        os.close(descriptor)


def test_a_worker_that_dies_leaves_no_lock(tmp_path: Path) -> None:
    """Nor half a run that another one would begin with."""

    def dies(run_dir: Path, *arguments: str, ranks: int) -> Run:
        making(run_dir, *arguments, ranks=ranks)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    pid = in_a_fork(Undisturbed(tmp_path, dies))
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    run = Undisturbed(tmp_path, making)(*ARGUMENTS, ranks=2)
    assert len(made(tmp_path)) == 2
    assert str(run.run_dir) not in made(tmp_path)[0]


def test_one_that_fails_fails_all_with_its_explanation(tmp_path: Path) -> None:
    def fails(run_dir: Path, *arguments: str, ranks: int) -> Run:
        return making(run_dir, *arguments, ranks=ranks, code=1)

    for asks in (Undisturbed(tmp_path, fails), Undisturbed(tmp_path, making)):
        for _ in range(2):
            with pytest.raises(AssertionError, match=r"(?s)train\.py.*what went wrong"):
                asks(*ARGUMENTS, ranks=2)
    assert len(made(tmp_path)) == 1


def test_one_that_does_not_end_fails_all(tmp_path: Path) -> None:
    def hangs(run_dir: Path, *arguments: str, ranks: int) -> Run:
        making(run_dir, *arguments, ranks=ranks)
        raise AssertionError("the job did not end within 120 s")

    for _ in range(2):
        with pytest.raises(AssertionError, match="did not end within"):
            Undisturbed(tmp_path, hangs)(*ARGUMENTS, ranks=2)
    assert len(made(tmp_path)) == 1


def test_one_with_a_recovery_is_no_reference(tmp_path: Path) -> None:
    def recovers(run_dir: Path, *arguments: str, ranks: int) -> Run:
        run = making(run_dir, *arguments, ranks=ranks)
        run.events.append({"kind": "resumed"})
        return run

    with pytest.raises(AssertionError, match="without a recovery"):
        Undisturbed(tmp_path, recovers)(*ARGUMENTS, ranks=2)
