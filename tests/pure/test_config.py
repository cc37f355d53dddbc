"""Switches and settings: what is accepted, and errors that name the variable and the nearest right one."""

import os
import sys

import pytest

from resilient_train import config
from resilient_train.config import (
    AgentLink,
    Settings,
    describe,
    fix_hash_seed,
    link_environ,
    read_link,
    read_settings,
    read_switches,
    why_off,
)
from resilient_train.errors import ConfigError
from resilient_train.tft_switches import DEFAULT_SWITCHES, Switches


def test_default_switches() -> None:
    assert read_switches({}) == DEFAULT_SWITCHES
    assert read_switches({"MS_ENABLE_TFT": ""}) == Switches()


def test_settings_and_where_they_come_from() -> None:
    environ = {
        "RESILIENT_BEAT_MS": "10",
        "RESILIENT_WRAP_BACKEND": "Off",
        "RESILIENT_JOIN_TIMEOUT_S": " 1.5",
        "RESILIENT_NORM_THRESHOLD": "Inf",
        "PATH": "x",
    }
    settings = read_settings(environ, beat_ms=20, grace_ms=None)
    assert (settings.beat_ms, settings.wrap_backend, settings.join_timeout_s) == (20, False, 1.5)
    assert settings.grace_ms == Settings().grace_ms


TORCH_NPU = "TORCH_HCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize(
    ("environ", "on", "source"),
    [
        ({}, True, "default"),
        ({"HCCL_ASYNC_ERROR_HANDLING": "0"}, False, "HCCL_ASYNC_ERROR_HANDLING"),
        ({"HCCL_ASYNC_ERROR_HANDLING": "1"}, True, "default"),
        ({"HCCL_ASYNC_ERROR_HANDLING": "1", TORCH_NPU: "0"}, False, TORCH_NPU),
        ({"HCCL_ASYNC_ERROR_HANDLING": "0", "RESILIENT_WATCHDOG": "1"}, True, "environment"),
        ({"RESILIENT_WATCHDOG": "0"}, False, "environment"),
    ],
)
def test_watchdog_switches(environ: dict[str, str], on: bool, source: str) -> None:
    settings = read_settings(environ)
    assert settings.watchdog is on
    (described,) = (each for each in describe(settings, environ) if each.variable == "RESILIENT_WATCHDOG")
    assert described.source == source
    assert ("watchdog is switched off" in why_off(settings, DEFAULT_SWITCHES)) is not on


def test_nothing_switched_on() -> None:
    assert "switches nothing on" in why_off(Settings(), Switches())
    assert why_off(Settings(), Switches(tre=2)) == ""


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("RESILIENT_BEET_MS", "1", "unknown variable RESILIENT_BEET_MS .*'RESILIENT_BEAT_MS'"),
        ("RESILIENT_BEAT_MS", "x", "RESILIENT_BEAT_MS='x' must be a whole number"),
        ("RESILIENT_BEAT_MS", "1.5", "RESILIENT_BEAT_MS='1.5' must be a whole number"),
        ("RESILIENT_JOIN_TIMEOUT_S", "soon", "must be a number"),
        ("RESILIENT_BEAT_MS", "0", "RESILIENT_BEAT_MS must be above 0"),
        ("RESILIENT_KEEP_CHECKPOINTS", "0", "RESILIENT_KEEP_CHECKPOINTS must be 1 or more"),
        ("RESILIENT_PINNED_BYTES", "-1", "RESILIENT_PINNED_BYTES must be from 0"),
        ("RESILIENT_WRAP_BACKEND", "maybe", "write 1 or 0"),
        ("RESILIENT_TRANSFER", "memry", "RESILIENT_TRANSFER='memry': unknown .*'memory'"),
        ("RESILIENT_FAULTS", "kil rank=1", "unknown kind 'kil'"),
        ("HCCL_ASYNC_ERROR_HANDLING", "yes", "HCCL_ASYNC_ERROR_HANDLING='yes': write 0 .off. or 1"),
        ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "4", "TORCH_HCCL_ASYNC_ERROR_HANDLING='4'"),
        ("RESILIENT_JOIN_TIMEOUT_S", "nan", "RESILIENT_JOIN_TIMEOUT_S must be above 0"),
    ],
)
def test_wrong_settings(variable: str, value: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_settings({variable: value})


def test_link_round_trip() -> None:
    link = AgentLink("/run/agent.sock", 3, 8, 2, True, "/run/job", "token")
    environ = link_environ(link)
    assert read_link(environ) == link
    assert read_settings(environ).run_dir == "/run/job", "the link's own variables are no unknown settings"


def test_no_agent() -> None:
    assert read_link({}) is None
    assert read_link({"RESILIENT_AGENT": ""}) is None


@pytest.mark.parametrize(
    "missing",
    ["RANK", "WORLD_SIZE", "RESILIENT_INCARNATION", "RESILIENT_JOINING", "RESILIENT_RUN_DIR", "RESILIENT_TOKEN"],
)
def test_half_a_link(missing: str) -> None:
    environ = link_environ(AgentLink("/s", 0, 1, 0, False, "/r"))
    del environ[missing]
    with pytest.raises(ConfigError, match=missing):
        read_link(environ)


def test_a_link_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match="exported by hand"):
        read_link({**link_environ(AgentLink("/s", 0, 1, 0, False, "/r")), "RANK": "first"})


@pytest.mark.parametrize(("given", "begins"), [(None, True), ("", True), ("random", False), ("7", False)])
def test_the_launcher_begins_anew_for_one_hash_seed(
    monkeypatch: pytest.MonkeyPatch, given: str | None, begins: bool
) -> None:
    """Not where the user has chosen one, ``random`` included."""
    begun: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: begun.append(command))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-O", "resilient-run", "train.py"])
    monkeypatch.setenv("PYTHONHASHSEED", given or "")
    if given is None:
        del os.environ["PYTHONHASHSEED"]
    fix_hash_seed()
    assert begun == [[sys.executable, "-O", "resilient-run", "train.py"]] * begins
    assert os.environ["PYTHONHASHSEED"] == ("0" if begins else given)


@pytest.mark.parametrize(
    ("environ", "late"),
    [({}, False), ({"JOINING": "0"}, False), ({"JOINING": "1"}, True), ({"JOINING": "0", "COUNT": "1"}, True)],
    ids=["none", "first", "in a place", "all again"],
)
def test_who_comes_late(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *, late: bool) -> None:
    """Files may have changed since the job began, for all ranks too that are started again."""
    for name, own in (("JOINING", config.PREFIX + "JOINING"), ("COUNT", config.ATTEMPT)):
        monkeypatch.delenv(own, raising=False)
        if name in environ:
            monkeypatch.setenv(own, environ[name])
    assert config.joins_late() is late
