"""How a job ends when something else than a fault ends it: user errors, signals, bad input, no agent at all."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import JOBS, LAUNCHER, Reference, Run, launch, read_events, start
from served import changed

TRAIN = str(JOBS / "train.py")
ENDS = (JOBS / "ends.py").read_text().splitlines()
RAISED_AT = next(n for n, line in enumerate(ENDS, 1) if "raise ValueError" in line and 'mode == "raise"' in ENDS[n - 2])


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def samples(run_dir: Path, rank: int) -> int:
    path = run_dir / f"samples_rank{rank}.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition: object, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_user_error_ends_the_job_at_once_with_its_own_traceback(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "ends.py", "raise", ranks=2)
    assert run.code == 1, run.explain()
    assert run.err.count("Traceback") == 1, "only the culprit speaks"
    assert run.of("fault") == []
    log = f"{run.run_dir}/logs/rank_1/0.err"
    assert f"rank 1 failed: ValueError: the user's own mistake (ends.py:{RAISED_AT}); its traceback: {log}" in run.err


def test_an_error_whose_process_ends_slowly_is_no_fault(tmp_path: Path) -> None:
    """The others' collectives fail long before it has gone: nobody is to speak of a recovery that can't be."""
    run = launch(tmp_path / "run", "ends.py", "raise-slowly", ranks=2)
    assert run.code == 1, run.explain()
    assert "recovery 1" not in run.err
    assert run.of("fault") == [], run.explain()
    assert "rank 1 failed: ValueError: the user's own mistake (ends.py:" in run.err
    assert "gloo" not in run.err


def test_an_error_after_the_update_is_the_users_too(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "ends.py", "raise-after", ranks=2)
    assert run.code == 1, run.explain()
    assert "ValueError: the user's own mistake" in run.err


@pytest.mark.parametrize("mode", ["closes-in-step", "closes-between"])
def test_a_session_that_is_closed_in_its_loop_does_not_end_the_training_early(tmp_path: Path, mode: str) -> None:
    """In silence, with exit code 0: the loop had five steps, and made three."""
    run = launch(tmp_path / "run", "ends.py", mode, ranks=2)
    assert run.code == 1, run.explain()
    assert "UsageError: session.close() was called in the Session's loop" in run.err


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("second-session", "a Session is open already"),
        ("no-group", "no process group"),
        ("gloo-kept", "cannot take a replacement in"),
        ("other-torch", "torch 2.16.0 is installed, and recoveries need 2.13, 2.14 or 2.15"),
        ("bad-replicas", "leave a shard uncovered"),
        ("unequal", "differs at the start"),
        ("bad-state", "cannot be carried"),
    ],
)
def test_a_wrong_session_ends_with_code_2(tmp_path: Path, mode: str, told: str) -> None:
    run = launch(tmp_path / "run", "ends.py", mode, ranks=2)
    assert run.code == 2, run.explain()
    lines = [line for line in run.err.splitlines() if "resilient-run: the job ends: " in line]
    assert len(lines) == 1, run.explain()
    assert told in lines[0]


@pytest.mark.parametrize(
    ("flags", "environ", "told"),
    [
        (["--faults", "kil rank=0 step=1"], {}, "did you mean 'kill'"),
        (["--faults", "kill rank=7 step=1"], {}, "ranks 0 to 1"),
        ([], {"MS_ENABLE_TFT": "{ARG:1}"}, "did you mean 'ARF'"),
        ([], {"RESILIENT_BEAT": "5"}, "did you mean 'RESILIENT_BEAT_MS'"),
        ([], {"RESILIENT_TRANSFER": "mail"}, "RESILIENT_TRANSFER"),
        (["--nproc-per-node", "0"], {}, "0 ranks"),
        (["--max-restarts", "-1"], {}, "max_restarts"),
        (["--master-port", "99999"], {}, "to 65535"),
        (["--run-dir", ""], {}, "--run-dir is empty"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path: Path, flags: list[str], environ: dict[str, str], told: str) -> None:
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), *flags, TRAIN]
    with start(command, **environ) as process:
        out, err = process.communicate(timeout=60)
    ours = [line for line in err.splitlines() if line.startswith("resilient-run:")]
    assert process.returncode == 2, out + err
    assert len(ours) == 1, err
    assert told in ours[0]
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists(), "nothing was started, nothing is left"


def test_missing_script(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "not_there.py", ranks=2)
    assert run.code == 2
    assert "not_there.py" in run.err


def test_all_start_again_when_one_is_lost_before_the_first_step(tmp_path: Path) -> None:
    """The groups had been built: those of the second attempt must not look for the dead ones' addresses."""
    run = launch(tmp_path / "run", "restarted.py", ranks=2)
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == 1, run.explain()
    assert [(run.run_dir / f"attempt_of_rank{rank}").read_text() for rank in range(2)] == ["1", "1"]


@pytest.mark.parametrize(
    ("process", "starts"),
    [pytest.param(0, ["forked"] * 2 + ["cold"] * 2, marks=pytest.mark.long), (1, ["forked"] * 3 + ["cold"])],
    ids=["first", "replacement"],
)
def test_a_rank_is_lost_while_it_builds_its_model(
    tmp_path: Path, undisturbed: Reference, process: int, starts: list[str]
) -> None:
    """It has a group by then, and no Session: the others wait for it in the constructor of DDP, or in a recovery.

    A fork that ends there is not tried twice: whoever comes next is a new interpreter.
    """
    flags = ("--faults", "kill rank=1 step=4 phase=COMPUTE at=backward") if process else ()
    arguments = ("train.py", "--steps", "9", "--variant", f"unbuilt{process}")
    run = launch(tmp_path / "run", *arguments, ranks=2, flags=flags)
    assert run.code == 0, run.explain()
    assert [len(run.of("restart_all")), run.recoveries()] == [1 - process, process], run.explain()
    assert [event["detail"]["start"] for event in run.of("spawned")] == starts
    reference = undisturbed(ranks=2, steps=9)
    assert (run.digests(), run.ends()) == (reference.digests(), reference.ends())


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_job_of_which_no_process_is_left_is_not_over(tmp_path: Path, ranks: int) -> None:
    """It was, with exit code 0 and nothing trained: between the last one's death and the start of all again."""
    run = launch(tmp_path / "run", "restarted.py", "all", ranks=ranks)
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == 1, run.explain()
    assert len(run.of("session_end")) == ranks, run.explain()
    assert [(run.run_dir / f"attempt_of_rank{rank}").read_text() for rank in range(ranks)] == ["1"] * ranks


def test_a_process_that_was_ended_by_the_loss_of_another_is_forked_again(tmp_path: Path) -> None:
    """It had done nothing wrong. It was started as a new interpreter, which takes seconds, since it had no Session."""
    run = launch(tmp_path / "run", "restarted.py", "behind", ranks=3)
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == 1, run.explain()
    assert {event["detail"]["start"] for event in run.of("spawned")} == {"forked"}, run.explain()


def test_max_restarts_bounds_replacements(tmp_path: Path) -> None:
    plan = "kill rank=1 step=2 phase=COMPUTE; kill rank=0 step=4 phase=COMPUTE"
    flags = ("--max-restarts", "1", "--faults", plan)
    run = launch(tmp_path / "run", "train.py", "--steps", "8", ranks=2, flags=flags)
    assert run.code not in (0, 2), run.explain()
    assert "--max-restarts 1 is used up" in run.err
    assert run.recoveries() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), TRAIN, "--steps", "100000"]
    with start(command) as process:
        wait_for((run_dir / "samples_rank0.jsonl").exists)
        wait_for(lambda: len(descendants(process.pid)) == 5)  # two ranks, a spare, the zygote and the root
        family = descendants(process.pid)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number, err
        assert psutil.wait_procs(family, timeout=60)[1] == []
        assert "Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_to_all_processes_loses_no_worker(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """As systemd ends a control group. Without its workers a rank could not end its step, and nothing was saved."""
    run_dir = tmp_path / "run"
    arguments = ["--nproc-per-node", "2", "--run-dir", str(run_dir), TRAIN, "--steps", "100000", "--variant", "workers"]
    with start([*LAUNCHER, *arguments]) as process:
        wait_for(lambda: all(samples(run_dir, rank) > 3 for rank in range(2)))
        ranks = {event["detail"]["pid"] for event in read_events(run_dir) if event["kind"] == "spawned"}
        workers: list[psutil.Process] = []

        def found() -> bool:
            workers[:] = [child for rank in ranks for child in descendants(rank)]
            return len(workers) >= 2

        wait_for(found)
        for each in [*workers, *descendants(process.pid), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "has lost a worker" not in err
    assert "is saved: " in err
    assert [path.name for path in (run_dir / "checkpoints").iterdir() if not path.name.endswith("_tmp")], err


def test_ctrl_c_among_the_launchers_imports_is_no_error(tmp_path: Path) -> None:
    """They take seconds on a busy machine, and a traceback through all of them says nothing."""
    command = [str(Path(sys.executable).with_name("resilient-run")), "--run-dir", str(tmp_path / "run"), TRAIN]
    with start(command, new=True) as process:
        wait_for(lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")


def test_a_rank_that_ends_well_before_its_session_ends_the_job(tmp_path: Path) -> None:
    """The other one stands before its first step, for ever."""
    run = launch(tmp_path / "run", "ends.py", "leave-before", ranks=2)
    assert run.code == 1, run.explain()
    assert "ranks [1] exited with code 0 before the first step, and ranks [0] wait there" in run.err


def test_a_rank_that_can_not_publish_what_it_has_of_its_own_ends_the_job(tmp_path: Path) -> None:
    with changed(code="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, 10_000_000))"):
        run = launch(tmp_path / "run", "ends.py", "large", ranks=2)
    assert run.code == 2, run.explain()
    assert "bytes of shared memory for a rank can't be had: [Errno 27] File too large (ulimit -f)" in run.err
    assert "Traceback" not in run.err, run.explain()


def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), TRAIN, "--steps", "100000"]
    with start(command) as process:
        wait_for((run_dir / "samples_rank0.jsonl").exists)
        family = descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
        assert psutil.wait_procs(family, timeout=60)[1] == []


def test_a_console_that_goes_away_costs_no_recovery(tmp_path: Path, undisturbed: Reference) -> None:
    """`2>&1 | head`, or a terminal that is closed: the agent's next line must not be its last act."""
    run_dir = tmp_path / "run"
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), "--faults", "kill rank=1 step=4"]
    with start([*command, str(JOBS / "train.py"), "--steps", "9"]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        code = process.wait(timeout=60)
    run = Run(run_dir, code, "", "", read_events(run_dir))
    assert code == 0, run.explain()
    assert run.recoveries() == 1
    assert run.digests() == undisturbed(ranks=2, steps=9).digests()


@pytest.mark.parametrize(
    ("device", "asked", "uses", "plain"),
    [
        ("privateuseone", [], "privateuseone:lookalike", True),
        ("privateuseone", ["cpu:gloo,privateuseone:lookalike"], "cpu:gloo,privateuseone:lookalike", True),
        ("privateuseone", ["gloo"], "cpu:gloo", False),
        ("cpu", [], "cpu:gloo", False),
    ],
)
def test_the_accelerators_own_backend_stays_torchs(
    tmp_path: Path, device: str, asked: list[str], uses: str, *, plain: bool
) -> None:
    """What torchrun runs, we run: a Session is a plain loop where its groups can't be rebuilt yet, and says so once."""
    run = launch(tmp_path / "run", "accelerator.py", device, *asked, ranks=2)
    assert run.code == 0, run.explain()
    told = json.loads(run.out)
    assert (told["uses"], told["protected"]) == (uses, not plain)
    how = "without RESILIENT_NCCL=1" if "nccl" in uses else "yet"
    line = f"the process group uses {uses}, which can't take a replacement in {how}: the Session is a plain loop"
    assert run.err.count(line) == plain, run.explain()
    assert len(run.of("plain_loop")) == plain


def test_a_fault_in_a_plain_loop_ends_the_job(tmp_path: Path) -> None:
    """As under torchrun. A loop of hours would begin anew if it were taken for one that is about to begin."""
    run = launch(tmp_path / "run", "accelerator.py", "privateuseone", "--kill", ranks=2)
    assert run.code != 0
    assert run.of("spawned")[2:] == []
    why = "it has no Session, or one that is a plain loop (--max-restarts N would restart it)"
    assert f"the job ends: rank 1 was killed by signal 9, and {why}" in run.err, run.explain()


@pytest.mark.parametrize(
    ("device", "environ"),
    [("privateuseone", {}), pytest.param("cpu", {"RESILIENT_WATCHDOG": "0"}, marks=pytest.mark.long)],
)
def test_a_plain_loop_is_started_again_where_that_is_asked_for(
    tmp_path: Path, device: str, environ: dict[str, str]
) -> None:
    """torch's groups find nothing in the store of those who have died. Three times: as many as fail without that."""
    job = (device, "--kill", "--once")
    for number in range(3):
        run = launch(
            tmp_path / f"run{number}", "accelerator.py", *job, ranks=2, flags=("--max-restarts", "1"), **environ
        )
        assert run.code == 0, run.explain()
        assert len(run.of("restart_all")) == 1


def test_where_one_session_is_a_plain_loop_and_another_is_not(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "accelerator.py", "cpu", "--plain", ranks=2)
    assert run.code == 2, run.explain()
    assert "the Session of some ranks is a plain loop, and that of others is not" in run.err


@pytest.mark.long
def test_what_torchrun_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our workers have the variables of its workers; under it, and under plain python, a Session is a plain loop."""
    # What a test has compiled in this process leaves its folder in the environment, which the launcher would respect.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    ours = launch(tmp_path / "run", "environment.py", ranks=2, flags=("--role", "worker"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(JOBS / "environment.py"), str(JOBS / "plain.py"), "both"]
    with start([*torchrun, "--role", "worker", *script]) as process:
        theirs, err = process.communicate(timeout=90)
    assert ours.code == process.returncode == 0, ours.explain() + err
    told = [json.loads(line) for line in theirs.splitlines()]
    assert len(told) == 3, theirs
    assert_environment(ours, {each["RANK"]: each for each in told if "RANK" in each})
    (loops,) = (each for each in told if "RANK" not in each)
    assert err.count("the Session is a plain loop") == 1
    assert_plain(tmp_path / "off", loops)
    alone = subprocess.run(
        [sys.executable, str(JOBS / "plain.py"), "alone"], capture_output=True, text=True, timeout=90, check=True
    )
    assert "the Session is a plain loop" in alone.stderr


def assert_environment(ours: Run, theirs: dict[str, dict[str, str]]) -> None:
    """The variables that torchrun gives its workers, with the same values."""
    assert len(theirs) == 2
    own = {each["RANK"]: each for each in map(json.loads, ours.out.splitlines())}
    ignored = {
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "MASTER_ADDR",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_MAX_RESTARTS",
    }
    for rank, expected in theirs.items():
        found = own[rank]
        assert set(expected) - set(found) == set()
        differing = {key for key in expected if found[key] != expected[key]} - ignored
        assert differing == set()
        assert Path(found["TORCHINDUCTOR_CACHE_DIR"]) == ours.run_dir / "compile_cache" / "inductor"
        assert found["MS_COMPILER_CACHE_ENABLE"] == "1"


def assert_plain(run_dir: Path, loops: dict[str, dict[str, Any]]) -> None:
    """Same numbers, no thread, no handler: under torchrun, and where all is switched off."""
    assert loops["session"] == loops["bare"]
    off = launch(run_dir, "plain.py", "session", ranks=2, HCCL_ASYNC_ERROR_HANDLING="0")
    assert json.loads(off.out)["session"] == loops["bare"], "off means off: and an agent that says so"
    assert off.err.count("the watchdog is switched off") == 2
