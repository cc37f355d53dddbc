"""What is said of the variables of MindSpore, MindIO and HCCL."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train.config import Settings
from resilient_train.errors import ConfigError
from resilient_train.launch.cli import run
from resilient_train.launch.cli.doctor import gather, judge
from resilient_train.launch.cli.findings import Grade
from resilient_train.launch.cli.mindspore_environ import look
from resilient_train.launch.spec import JobSpec
from resilient_train.protocol.policy import Policy

NEEDS = {"MS_ENABLE_TFT": "{TTP:1,ARF:1}"}
WHERE = {"MS_TFT_IP": "127.0.0.1", "MS_TFT_PORT": "30051"}
TABLE = {
    "version": "1.0",
    "status": "completed",
    "server_count": "1",
    "server_list": [{"server_id": "10.0.0.1", "device": [{"device_id": "0", "device_ip": "", "rank_id": "0"}]}],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that ``MS_ENABLE_THM`` and ``RANK_TABLE_FILE`` can name."""
    monkeypatch.chdir(tmp_path)
    both = {"HCCL_STATUS_SAVE_PATH": "/tmp", "HCCL_STATUS_SAVE_INTERVAL": 30}
    files = {
        "both.json": both,
        "none.json": {},
        "path.json": {"HCCL_STATUS_SAVE_PATH": "/tmp"},
        "relative.json": both | {"HCCL_STATUS_SAVE_PATH": "status"},
        "list.json": [],
        "right.json": TABLE,
        "early.json": TABLE | {"status": "initializing"},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "torn.json").write_text("{")
    return tmp_path


SAVES = "HCCL_STATUS_SAVE:1,HCCL_STATUS_SAVE_CONFIG:"
MONITORING = [
    ("{HCCL_WATCHDOG:0}", Grade.OK, "'{HCCL_WATCHDOG:0}', for MindSpore alone"),
    ("{ HCCL_WATCHDOG : 1 }", Grade.OK, "for MindSpore alone"),
    (f"{{{SAVES}'both.json'}}", Grade.OK, "for MindSpore alone"),
    (f"{{{SAVES}both.json}}", Grade.OK, "for MindSpore alone"),
    (
        "HCCL_WATCHDOG",
        Grade.PROBLEM,
        "has no colon, and ends MindSpore's import in an IndexError; write HCCL_WATCHDOG:1",
    ),
    ("{HCCL_WATCHDOG=0}", Grade.PROBLEM, "'HCCL_WATCHDOG=0' has no colon"),
    ("{HCCL_WATCHDOG = 0}", Grade.PROBLEM, "in an IndexError; write HCCL_WATCHDOG:0"),
    (
        "{HCCL_WATCHDOG:0, ,HCCL_STATUS_SAVE:0}",
        Grade.PROBLEM,
        "' ' has no colon, and ends MindSpore's import in an IndexError; take it out",
    ),
    (
        "{HCCL_WATCHDOG:1,HCCL_STATUS_SAVE:1}",
        Grade.PROBLEM,
        "without HCCL_STATUS_SAVE_PATH ends MindSpore's import in a Type",
    ),
    ("{HCCL_STATUS_SAVE:1,HCCL_STATUS_SAVE_PATH:/tmp}", Grade.PROBLEM, "add HCCL_STATUS_SAVE_CONFIG:'FILE.json', with"),
    ("{HCCL_STATUS_SAVE:1, HCCL_STATUS_SAVE_CONFIG:'both.json'}", Grade.PROBLEM, "in a TypeError"),
    (f"{{{SAVES}'none.json'}}", Grade.PROBLEM, "with HCCL_STATUS_SAVE_PATH and HCCL_STATUS_SAVE_INTERVAL in the file"),
    ("{HCCL_STATUS_SAVE_CONFIG='./abc.json'}", Grade.PROBLEM, "write HCCL_STATUS_SAVE_CONFIG:./abc.json"),
    (
        f"{{{SAVES}'nowhere.json'}}",
        Grade.PROBLEM,
        "'nowhere.json' can't be read (No such file or directory), and that ends",
    ),
    (f"{{{SAVES} 'both.json'}}", Grade.PROBLEM, "can't be read"),
    (f"{{{SAVES}'a:b.json'}}", Grade.PROBLEM, "'a' can't be read"),
    (f"{{{SAVES}'torn.json'}}", Grade.PROBLEM, "'torn.json' is no JSON, and that ends MindSpore's import"),
    (f"{{{SAVES}'list.json'}}", Grade.PROBLEM, "'list.json' is no JSON object"),
    (f"{{{SAVES}'path.json'}}", Grade.NOTE, "HCCL_STATUS_SAVE_INTERVAL is missing: MindSpore takes 'None' for it"),
    (
        f"{{{SAVES}'relative.json'}}",
        Grade.NOTE,
        "HCCL_STATUS_SAVE_PATH 'status' is not absolute: MindSpore writes to /tmp",
    ),
    (
        "{HCCL_WATCHDOG:off}",
        Grade.NOTE,
        "'HCCL_WATCHDOG:off' is neither on nor off; write HCCL_WATCHDOG:1 or HCCL_WATCHDOG:0",
    ),
    ("{'HCCL_WATCHDOG':0}", Grade.NOTE, "has no effect (did you mean 'HCCL_WATCHDOG'?)"),
    ("{HCCL_WATCHDOGS:0}", Grade.NOTE, "'HCCL_WATCHDOGS' has no effect (did you mean 'HCCL_WATCHDOG'?)"),
    ("{ARF:1}", Grade.NOTE, "'ARF' has no effect; the keys are HCCL_WATCHDOG, HCCL_STATUS_SAVE,"),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("text", "grade", "told"), MONITORING)
def test_monitoring(text: str, grade: Grade, told: str) -> None:
    (finding,) = look({"MS_ENABLE_THM": text})
    assert finding.what == "MS_ENABLE_THM"
    assert finding.grade is grade
    assert told in finding.text


def test_arf_switches_mindspores_watchdog_off() -> None:
    (finding,) = look(NEEDS | {"MS_ENABLE_THM": "{HCCL_WATCHDOG:1}"})
    assert (finding.grade, "ARF switches MindSpore's watchdog off" in finding.text) == (Grade.NOTE, True)
    (finding,) = look({"MS_ENABLE_TFT": "{TTP:1}", "MS_ENABLE_THM": "{HCCL_WATCHDOG:1}"})
    assert finding.grade is Grade.OK


CONTROLLER = [
    ("MS_TFT_IP", "127.0.0.1", Grade.OK, "127.0.0.1 (MindIO's controller)"),
    ("MS_TFT_IP", "node-0.train.svc", Grade.OK, "node-0.train.svc (MindIO's"),
    ("MS_TFT_IP", "0.0.0.0", Grade.PROBLEM, "'0.0.0.0' is refused by MindIO; write for example MS_TFT_IP="),
    ("MS_TFT_IP", "10.0.0.256", Grade.PROBLEM, "'10.0.0.256' is no IPv4 address"),
    ("MS_TFT_IP", "10.0.0", Grade.PROBLEM, "is no IPv4 address"),
    ("MS_TFT_IP", "127.0.0.1:30051", Grade.PROBLEM, "has the port in it, which belongs into MS_TFT_PORT"),
    ("MS_TFT_IP", " 127.0.0.1", Grade.PROBLEM, "is neither an IPv4 address nor a host name"),
    ("MS_TFT_IP", "", Grade.PROBLEM, "not set, and MS_ENABLE_TFT has TTP, ARF: on an Ascend"),
    ("MS_TFT_PORT", "30051", Grade.OK, "30051 (MindIO's controller)"),
    ("MS_TFT_PORT", "1024", Grade.OK, "1024"),
    ("MS_TFT_PORT", "65535", Grade.OK, "65535"),
    (
        "MS_TFT_PORT",
        "1023",
        Grade.PROBLEM,
        "'1023' is refused by MindIO, which takes ports from 1024 to 65535; write for",
    ),
    ("MS_TFT_PORT", "65536", Grade.PROBLEM, "from 1024 to 65535"),
    ("MS_TFT_PORT", "-1", Grade.PROBLEM, "from 1024 to 65535"),
    (
        "MS_TFT_PORT",
        "any",
        Grade.PROBLEM,
        "'any' is no whole number, and MindSpore ends in a ValueError; write for example",
    ),
    ("MS_TFT_PORT", "", Grade.PROBLEM, "is no whole number"),
    ("MS_TFT_PORT", "1" * 5000, Grade.PROBLEM, "is no whole number"),
]


@pytest.mark.parametrize(("name", "text", "grade", "told"), CONTROLLER)
def test_where_the_controller_is(name: str, text: str, grade: Grade, told: str) -> None:
    (finding,) = [each for each in look(NEEDS | WHERE | {name: text}) if each.what == name]
    assert finding.grade is grade
    assert told in finding.text


@pytest.mark.parametrize("missing", WHERE)
def test_one_without_the_other(missing: str) -> None:
    environ = {name: value for name, value in WHERE.items() if name != missing}
    (finding,) = [each for each in look(NEEDS | environ) if each.what == missing]
    assert finding.grade is Grade.PROBLEM
    assert finding.text.endswith(f"write for example {missing}={WHERE[missing]}")
    assert ("in a TypeError" in finding.text) == (missing == "MS_TFT_PORT")
    assert {each.grade for each in look(environ)} == {Grade.OK}, "nothing needs it"


def test_neither_is_missed_until_mindspore_starts() -> None:
    """A job of torch's has ``MS_ENABLE_TFT`` as well, and no need of a controller."""
    assert look(NEEDS) == []
    assert [each.what for each in look(NEEDS, starts=True)] == ["MS_TFT_IP", "MS_TFT_PORT"]
    assert [each.what for each in look(NEEDS | {"MINDIO_FOR_MINDSPORE": "1"})][:2] == ["MS_TFT_IP", "MS_TFT_PORT"]
    for text in ("{TRE:1}", "{RSC:1}", "{}", ""):
        assert look({"MS_ENABLE_TFT": text}, starts=True) == []
    assert look({}, starts=True) == []


def test_nobody_reads_them() -> None:
    ip, port = look({"MS_TFT_IP": "127.0.0.1", "MS_TFT_PORT": "80"})
    assert (ip.grade, ip.text) == (
        Grade.OK,
        "127.0.0.1 (nobody reads it: MS_ENABLE_TFT has nothing that needs MindIO)",
    )
    assert port.grade is Grade.NOTE


FLAGS = [
    ("MINDIO_FOR_MINDSPORE", "1", Grade.OK, "on: MindIO works for MindSpore"),
    ("MINDIO_FOR_MINDSPORE", "True", Grade.OK, "on: "),
    ("MINDIO_FOR_MINDSPORE", "0", Grade.OK, "off"),
    ("MINDIO_FOR_MINDSPORE", "tRUE", Grade.NOTE, "'tRUE': MindIO takes it for on; write 1 or 0"),
    ("MINDIO_FOR_MINDSPORE", "yes", Grade.NOTE, "'yes': MindIO takes it for off; write 1 or 0"),
    ("MINDIO_FOR_MINDSPORE", "1 ", Grade.NOTE, "takes it for off"),
    ("PROCESS_RECOVER", "on", Grade.OK, "on: taskd recovers processes through MindIO. Whether resilient-run replaces"),
    ("PROCESS_RECOVER", "off", Grade.OK, "off"),
    ("PROCESS_RECOVER", "1", Grade.NOTE, "'1': MindCluster's taskd takes it for off; write on or off"),
    ("PROCESS_RECOVER", "ON", Grade.NOTE, "takes it for off; write on or off"),
    ("RESUME_MODE_ENABLE", "1", Grade.OK, "on: a torch_npu that reads it only warns"),
    ("RESUME_MODE_ENABLE", "0", Grade.OK, "off"),
    ("RESUME_MODE_ENABLE", "true", Grade.NOTE, "'true': torch_npu takes it for off; write 1 or 0"),
    ("RESUME_MODE_ENABLE", "02", Grade.NOTE, "'02': torch_npu takes it for on; write 1 or 0"),
]


@pytest.mark.parametrize(("name", "text", "grade", "told"), FLAGS)
def test_what_is_on_or_off(name: str, text: str, grade: Grade, told: str) -> None:
    (finding,) = look({name: text})
    assert (finding.what, finding.grade) == (name, grade)
    assert told in finding.text
    assert look({name: ""}) == []


@pytest.mark.parametrize(("text", "grade"), [("1", Grade.OK), ("0", Grade.NOTE), ("yes", Grade.NOTE)])
def test_mindio_is_for_pytorch_unless_it_is_told(text: str, grade: Grade) -> None:
    *_, finding = look(NEEDS | WHERE | {"MINDIO_FOR_MINDSPORE": text})
    assert finding.grade is grade
    looks = (
        f"{text!r} is off, so MindIO looks for PyTorch, and MS_ENABLE_TFT has TTP, ARF; write MINDIO_FOR_MINDSPORE=1"
    )
    assert (finding.text == looks) == (grade is Grade.NOTE)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "grade", "told"),
    [
        ("right.json", Grade.OK, "version 1.0, ranks: 1, servers: 1"),
        ("early.json", Grade.PROBLEM, "'early.json': status: 'initializing', not 'completed'"),
        ("nowhere.json", Grade.PROBLEM, "there is no file 'nowhere.json'"),
    ],
)
def test_the_rank_table(path: str, grade: Grade, told: str) -> None:
    (finding,) = look({"RANK_TABLE_FILE": path})
    assert (finding.what, finding.grade) == ("RANK_TABLE_FILE", grade)
    assert told in finding.text
    assert look({"RANK_TABLE_FILE": ""}) == [], "that is not set, to MindSpore"


@given(
    st.sampled_from(["MS_ENABLE_THM", "MS_TFT_IP", "MS_TFT_PORT"]),
    st.text(alphabet="HCCL_STAU:=,{} '01.x", max_size=30),
)
def test_any_text_gives_findings_in_one_line_each(name: str, text: str) -> None:
    for finding in look(NEEDS | {name: text}, starts=True):
        assert finding.text.isprintable()


def test_the_doctor_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MS_ENABLE_TFT", "MS_ENABLE_THM", *WHERE, "RANK_TABLE_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert gather().mindspore == ()
    monkeypatch.setenv("MS_ENABLE_THM", "HCCL_WATCHDOG")
    facts = gather()
    assert facts.mindspore
    assert set(facts.mindspore) <= set(judge(facts))


# -- resilient-run


def job_of(script: Path, text: str) -> JobSpec:
    script.write_text(text)
    return JobSpec(
        command=(sys.executable, "-u", str(script)),
        world_size=1,
        run_dir=script.parent,
        run_id="x",
        policy=Policy(max_restarts=0),
        settings=Settings(),
        log_dir=script.parent,
    )


def test_what_would_end_the_start_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (NEEDS | WHERE | {"MS_TFT_PORT": "80", "MS_ENABLE_THM": "{X:1}"}).items():
        monkeypatch.setenv(name, value)
    run._look_at_mindspore(job_of(here / "other.py", "import torch\n"))
    run._look_at_mindspore(argparse.Namespace())
    assert capsys.readouterr().err == "", "to others it makes no difference"
    run._look_at_mindspore(job_of(here / "train.py", "import mindspore\n"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("resilient-run: MS_TFT_PORT: '80' is refused by MindIO")
    for name in WHERE:
        monkeypatch.delenv(name)
    run._look_at_mindspore(job_of(here / "train.py", "import mindspore\n"))
    assert capsys.readouterr().err.count(": not set, and MS_ENABLE_TFT has TTP, ARF: on an Ascend device ") == 2


def test_a_rank_table_that_is_wrong_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_ENABLE_TFT", raising=False)
    monkeypatch.setenv("RANK_TABLE_FILE", str(here / "early.json"))
    run._look_at_mindspore(job_of(here / "other.py", "import torch\n"))
    job = job_of(here / "train.py", "def train():\n    import mindspore as ms\n")
    with pytest.raises(ConfigError, match=r"^RANK_TABLE_FILE: '.*early.json': status: 'initializing', not 'completed'"):
        run._look_at_mindspore(job)
    monkeypatch.setenv("RANK_TABLE_FILE", str(here / "right.json"))
    run._look_at_mindspore(job)
