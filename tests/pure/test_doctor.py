"""What the doctor says of a machine."""

from __future__ import annotations

import msgspec
import pytest

from resilient_train.config import Described, Settings, describe, read_settings
from resilient_train.errors import ConfigError
from resilient_train.launch.cli.doctor import Facts, Grade, Probe, StandingBy, as_dict, as_lines, gather, judge
from resilient_train.tft_switches import DEFAULT_SWITCHES, Switches

HEALTHY = Facts(
    system="Linux",
    kernel="6.18",
    torch="2.13.0+cpu",
    deaths_by_futex=True,
    ptrace_scope=1,
    core_limit=0,
    core_pattern="core",
    descriptors=1 << 20,
    run_dir="./resilient_runs",
    run_dir_writable=True,
    devices=(),
    switches=DEFAULT_SWITCHES,
    switches_given=None,
    settings=(),
)


def test_a_healthy_machine() -> None:
    findings = judge(HEALTHY)
    assert {finding.grade for finding in findings} == {Grade.OK}
    assert as_dict(HEALTHY, findings)["ok"] is True


@pytest.mark.parametrize(
    ("change", "grade", "words"),
    [
        ({"system": "Darwin"}, Grade.PROBLEM, "only Linux"),
        ({"torch": None}, Grade.PROBLEM, "not installed"),
        ({"torch": "2.12.1"}, Grade.PROBLEM, "2.12.1"),
        ({"deaths_by_futex": False}, Grade.NOTE, "futex_waitv"),
        ({"ptrace_scope": 2}, Grade.NOTE, "ptrace_scope is 2"),
        ({"core_limit": -1}, Grade.NOTE, "ulimit -c 0"),
        ({"descriptors": 1024}, Grade.NOTE, "1024"),
        ({"run_dir_writable": False}, Grade.PROBLEM, "can't be written"),
        ({"devices": ("NVIDIA GPU",)}, Grade.NOTE, "a Session repairs nothing"),
        ({"switches": Switches(hcce=True), "switches_given": ""}, Grade.PROBLEM, "on: a rank that died"),
        ({"switches": Switches(arf=True), "switches_given": ""}, Grade.NOTE, "on: process groups"),
        ({"switches": Switches(arf=True, tre=1), "switches_given": ""}, Grade.OK, "is redone before its update"),
        (
            {"switches": Switches(arf=True, hcce=True, uce=True, rsc=True), "switches_given": ""},
            Grade.NOTE,
            "RSC do nothing",
        ),
        ({"switches_given": "{TTP:1,ARF:1}"}, Grade.OK, "{TTP:1,ARF:1}"),
        ({"switches_given": "{TTP:1, ARF:1}"}, Grade.OK, "means {TTP:1,ARF:1}, which resilient-run gives the ranks"),
        ({"switches_given": "{ TRE : 1 }"}, Grade.NOTE, "Python code would switch on nothing, its C++ code TRE"),
        ({"switches_given": "{'ARF':1, }"}, Grade.NOTE, "as it stands, MindSpore would switch on nothing"),
        ({"switches_given": "{TTP:1, ,ARF:1}"}, Grade.NOTE, "MindSpore could not be imported with this: ' ' has"),
        ({"off": "the watchdog is off"}, Grade.PROBLEM, "a Session is a plain loop"),
        ({"probes": (Probe("nvml", "absent", "", ()),)}, Grade.OK, "not asked: NVML"),
        ({"probes": (Probe("nvml", "polling", "", ("XID events",)),)}, Grade.OK, "not XID events"),
        ({"probes": (Probe("acl", "disabled", "the trial crashed", ()),)}, Grade.NOTE, "be used: the trial crashed"),
        ({"standby": 0}, Grade.NOTE, "off (RESILIENT_STANDBY)"),
        ({"depth": "built"}, Grade.OK, "on, built: "),
        ({"standing_by": (StandingBy(7, "idle", False, 3 << 20),)}, Grade.OK, "idle, on its way: 3.0 MiB of its own"),
        ({"settings": (Described("RESILIENT_HANG", "False", "environment"),)}, Grade.OK, "False (environment)"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, object], grade: Grade, words: str) -> None:
    facts = msgspec.structs.replace(HEALTHY, **change)
    findings = judge(facts)
    (told,) = [finding for finding in findings if words in finding.text]
    assert told.grade is grade
    assert as_dict(facts, findings)["ok"] is (grade is not Grade.PROBLEM)
    assert any(words in line.text for line in as_lines(findings))


def test_what_is_refused_is_told_with_what_mindspore_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "TTP=1")
    with pytest.raises(ConfigError, match=r"write TTP:1 \(MindSpore could not be imported with this: 'TTP=1' has no"):
        gather()


def test_this_machine_can_be_looked_at() -> None:
    facts = gather()
    assert len(facts.settings) == len(Settings.__struct_fields__)
    assert judge(facts)


def test_settings_know_where_they_came_from() -> None:
    environ = {"RESILIENT_BEAT_MS": "50", "RESILIENT_GRACE_MS": "7"}
    settings = read_settings(environ, faults="kill rank=0 step=1")
    told = {each.variable: each.source for each in describe(settings, environ)}
    assert told["RESILIENT_BEAT_MS"] == told["RESILIENT_GRACE_MS"] == "environment"
    assert told["RESILIENT_FAULTS"] == "flag"
    assert told["RESILIENT_TRANSFER"] == "default"
