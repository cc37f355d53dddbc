"""msrun's flags, as ``resilient-run`` takes them."""

import sys
from pathlib import Path

import pytest

from resilient_train.errors import ConfigError
from resilient_train.launch.cli import msrun
from resilient_train.launch.cli.run import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESILIENT_RUN_DIR", str(tmp_path / "run"))
    for name in ("MS_ENABLE_TFT", "MS_TFT_IP", "MS_TFT_PORT", "RANK_TABLE_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--worker_num 4 train.py", True),
        ("--worker-num=4 train.py", True),
        ("--run_dir here --master_port 9 --join=True --worker_num=4 train.py", True),
        ("--worker_num 1 --help", True),
        ("--bind_core True --worker_num=4 train.py", True),
        ("--nproc-per-node 4 train.py --worker_num 4", False),
        ("--standalone train.py --worker_num 4", False),
        ("train.py --worker_num 4", False),
        ("--master_port 9 train.py", False),
        ("--master_port 9 train.py --worker_num 4", False),
        ("", False),
    ],
)
def test_which_jobs_are_mindspores(text: str, *, expected: bool) -> None:
    assert msrun.is_for_mindspore(text.split()) is expected


def test_what_a_job_becomes(script: str, tmp_path: Path) -> None:
    spec, environ, _ = msrun.make_job(f"--worker_num=2 --master_port=9000 --tail_worker_log=1 {script} --lr 1".split())
    assert spec.command == (sys.executable, "-u", script, "--lr", "1")
    assert (spec.world_size, spec.log_dir) == (2, tmp_path / "run/logs")
    assert {rank for rank, _ in spec.quiet} == {-1, 0}, "the scheduler's output lies in its file only"
    wanted = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "9000", "RANK_SIZE": "2"}
    assert wanted.items() <= environ.items()
    assert environ["MS_TOPO_TIMEOUT"] == "600"


def test_where_the_controller_listens(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert msrun.make_job(["--worker_num=2", script]).controller == ("127.0.0.1", 0)
    monkeypatch.setenv("MS_TFT_IP", "127.0.0.2")
    monkeypatch.setenv("MS_TFT_PORT", "9001")
    assert msrun.make_job(["--worker_num=2", script]).controller == ("127.0.0.2", 9001)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("pytest -k x", (sys.executable, "-u", "-m", "pytest", "-k", "x")),
        ("python SCRIPT 1", (sys.executable, "-u", "SCRIPT", "1")),
        ("SCRIPT", (sys.executable, "-u", "SCRIPT")),
    ],
)
def test_commands_in_front_of_a_script(script: str, words: str, command: tuple[str, ...]) -> None:
    spec, _, _ = msrun.make_job(["--worker_num=2", *words.replace("SCRIPT", script).split()])
    assert spec.command == tuple(script if word == "SCRIPT" else word for word in command)


def test_what_is_switched_off_stays_off(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "TTP:1, UCE:1")
    spec, environ, _ = msrun.make_job(["--worker_num=2", script])
    assert (spec.policy.replace, spec.policy.rebuild, spec.policy.mend) == (False, False, True)
    assert environ["MS_ENABLE_TFT"] == "{TTP:1,UCE:1}", "all of MindSpore's parsers read that alike"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--worker_num 0 SCRIPT", "a job has at least one rank"),
        ("--worker_num x SCRIPT", "invalid int value"),
        ("--worker_num 4 --local_worker_num 2 SCRIPT", "several nodes"),
        ("--worker_num 4 --node_rank 1 SCRIPT", "several nodes"),
        ("--worker_num 4 --bind_core True SCRIPT", "--bind_core is msrun's, and not understood here: leave it out"),
        ("--worker_num 4 --sim_level 1 SCRIPT", "a dry run is msrun's"),
        ("--worker_num 4 --worker_log_name w SCRIPT", "rank_N under --log_dir"),
        ("--worker_num 4 --tail_worker_log x SCRIPT", "write ranks, as 0,3"),
        ("--worker_num 4 --nproc-per-node 4 SCRIPT", "unrecognized arguments|there is no script"),
        ("--worker_num 4 nowhere.py", "there is no script 'nowhere.py'"),
        ("--worker_num 4 python", "there is no script ''"),
        ("--worker_num 4", "required: script"),
        ("--worker_num 4 --rank_table_file nowhere.json SCRIPT", "RANK_TABLE_FILE: "),
    ],
)
def test_what_is_refused(script: str, text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=told):
        msrun.make_job(text.replace("SCRIPT", script).split())
    with pytest.raises(SystemExit) as end:
        main(text.replace("SCRIPT", script).split())
    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FAULTS", "kill rank=1 step=3"),
        ("VERIFY_EVERY", "100"),
        ("ON_STRAGGLER", "replace"),
        ("COMPARE_EVERY", "5"),
    ],
)
def test_what_nothing_does_in_such_a_job_is_refused(
    script: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"RESILIENT_{name}", value)
    with pytest.raises(ConfigError, match=f"RESILIENT_{name}: nothing does that in a MindSpore job"):
        msrun.make_job(["--worker_num=2", script])


@pytest.mark.parametrize(
    ("name", "value"), [("MS_TFT_PORT", "x"), ("MS_ENABLE_TFT", "{TTP:2}"), ("MS_ENABLE_THM", "x")]
)
def test_wrong_variables_are_refused_before_the_start(
    script: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        msrun.make_job(["--worker_num=2", script])
