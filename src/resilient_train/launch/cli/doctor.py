"""Says what works on this machine and with these switches, what does not, and why: ``resilient-train doctor``.

``gather`` looks at the machine; ``judge`` is a function of what it found.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from resilient_train import config
from resilient_train._native import Probes, ProbeStatus, death_watch_supported
from resilient_train.errors import ConfigError, ResilientError
from resilient_train.frameworks.supported import torch_installed, torch_problem
from resilient_train.integrations.mindio import finder
from resilient_train.launch.agent import compile_caches
from resilient_train.launch.cli import asking
from resilient_train.launch.cli.findings import Finding, Grade
from resilient_train.launch.cli.mindspore_environ import look
from resilient_train.launch.cli.mindspore_view import differs
from resilient_train.observe.report import Line
from resilient_train.protocol.messages import Query
from resilient_train.tft_switches import Switches, normal_form

_DESCRIPTORS_MIN = 4096
_DEVICES = {"NVIDIA GPU": "/dev/nvidia0", "Ascend NPU": "/dev/davinci0"}
_LIBRARIES = {
    "acl": ("Ascend runtime", "memory errors, failed collectives and failures of the device"),
    "hccl": ("HCCL", "errors of communicators (with RESILIENT_HCCL=1)"),
    "nvml": ("NVML", "ECC errors and XID events"),
    "nccl": ("NCCL", "errors of communicators (with RESILIENT_NCCL=1)"),
}
_PROBE_LIMIT_S = 10.0
_WITHOUT_EFFECT = ("rsc",)
_WORKS = {
    "uce": "tensors whose memory lost data are fetched again from a replica (no real device has been tried)",
    "arf": "a rank that died or hangs is replaced",
    "ttp": "a job that has to end saves its state first",
    "tsp": "all ranks stand still before one step while somebody wants it",
    "tre": "a step whose loss or norm can't be right is redone before its update",
    "hcce": "process groups are rebuilt when a collective fails and nobody died",
}


_ZYGOTE = "ranks are forks of a process with their imports done (some 240 MB), and so is what stands by"
_DEPTHS = {
    "forked": f"{_ZYGOTE} (some 2 MB)",
    "built": f"{_ZYGOTE}, which has the model, and what else the script holds at standby_point (from 26 MB on)",
}


class Probe(msgspec.Struct, frozen=True):
    """A device library, as the native probe found it: its ``state`` is that of ``_native.ProbeStatus``."""

    name: str
    state: str
    reason: str
    missing: tuple[str, ...]


class StandingBy(msgspec.Struct, frozen=True):
    """A process of a running job that stands by; ``own_bytes``: memory that it shares with no other."""

    pid: int
    depth: str
    ready: bool
    own_bytes: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``gather`` found. None: not there, or could not be read."""

    system: str
    kernel: str
    torch: str | None
    deaths_by_futex: bool
    ptrace_scope: int | None
    core_limit: int
    core_pattern: str
    descriptors: int
    run_dir: str
    run_dir_writable: bool
    devices: tuple[str, ...]
    probes: tuple[Probe, ...] = ()
    switches: Switches
    switches_given: str | None
    """``MS_ENABLE_TFT``, as the user wrote it."""
    mindspore: tuple[Finding, ...] = ()
    """Of MindSpore's other variables, see ``mindspore_environ``."""
    off: str = ""
    """See ``config.why_off``."""
    settings: tuple[config.Described, ...]
    standby: int = 1
    depth: str = "forked"
    standing_by: tuple[StandingBy, ...] = ()
    """Of the job that was started last here, if it runs."""
    caches: tuple[compile_caches.Cache, ...] = ()
    cache_switches: dict[str, str] = {}
    """Those that the user has set, see ``compile_caches.SWITCHES``."""


def gather() -> Facts:
    """Looks at this machine and this environment. Raises ConfigError for switches or settings that are wrong."""
    settings, switches, environ = config.read_settings(), _read_switches(), config.environ_copy()
    parent = Path(settings.run_dir or "resilient_runs").absolute()
    while not parent.exists():
        parent = parent.parent
    return Facts(
        system=platform.system(),
        kernel=platform.release(),
        torch=torch_installed(),
        deaths_by_futex=death_watch_supported(),
        ptrace_scope=_number("/proc/sys/kernel/yama/ptrace_scope"),
        core_limit=resource.getrlimit(resource.RLIMIT_CORE)[0],
        core_pattern=_text("/proc/sys/kernel/core_pattern") or "",
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        run_dir=settings.run_dir or "./resilient_runs",
        run_dir_writable=os.access(parent, os.W_OK | os.X_OK),
        devices=tuple(name for name, path in _DEVICES.items() if Path(path).exists()),
        probes=_try_probes(settings),
        switches=switches,
        switches_given=config.given_switches(),
        mindspore=(*look(environ), *_provider()),
        off=config.why_off(settings, switches),
        settings=config.describe(settings),
        standby=settings.standby,
        depth=settings.standby_depth,
        standing_by=_standing_by(),
        caches=compile_caches.look(Path(settings.run_dir or "resilient_runs/<id>"), environ),
        cache_switches={name: environ[name] for name in compile_caches.SWITCHES if name in environ},
    )


def _provider() -> Iterator[Finding]:
    """Whose ``mindio_ttp`` a MindSpore script would get."""
    if theirs := finder.of_mindio():
        yield Finding(Grade.OK, "mindio_ttp", f"MindIO's is installed ({theirs}): scripts get that one")
    elif importlib.util.find_spec("mindspore") is not None:
        text = "not installed: scripts that `resilient-run --worker_num N` starts get resilient_train's"
        yield Finding(Grade.OK, "mindio_ttp", text)


def _read_switches() -> Switches:
    try:
        return config.read_switches()
    except ConfigError as error:
        # Not every job is started by us.
        raise ConfigError(f"{error} ({differs(config.given_switches() or '')})") from None


def _standing_by() -> tuple[StandingBy, ...]:
    try:
        status = asking.ask(asking.newest_run(), Query()).status
    except ResilientError:
        return ()  # no job runs here, or it has no time for this: doctor is about the machine
    return msgspec.convert(status.get("standbys", ()), tuple[StandingBy, ...])


def _try_probes(settings: config.Settings) -> tuple[Probe, ...]:
    """Loads what device libraries there are, as a rank would, and asks each a few times."""
    acl, nvml = settings.acl_library or "libascendcl.so", settings.nvml_library or "libnvidia-ml.so.1"
    probes = Probes(acl=acl, nvml=nvml, poll_ms=1)
    probes.start()
    deadline = time.monotonic() + _PROBE_LIMIT_S
    try:
        while any(map(_undecided, probes.status())) and time.monotonic() < deadline:
            time.sleep(0.001)
        found = probes.status()
    finally:
        probes.stop()
    return tuple(Probe(each.name, each.state, each.reason, tuple(each.missing)) for each in found)


def _undecided(status: ProbeStatus) -> bool:
    # A library that loads may still fail at what it is asked: some questions are one too few to see that.
    return status.state in ("waiting", "opening") or (status.state == "polling" and status.polls < 5)


def judge(facts: Facts) -> list[Finding]:
    """What the facts mean for a job."""
    return [*_machine(facts), *_limits(facts), *_caches(facts), *_choices(facts)]


def _machine(facts: Facts) -> Iterator[Finding]:
    if facts.system != "Linux":
        yield Finding(Grade.PROBLEM, "system", f"{facts.system}: only Linux is supported")
    problem = torch_problem(facts.torch)
    yield Finding(Grade.PROBLEM if problem else Grade.OK, "torch", problem or str(facts.torch))
    if facts.deaths_by_futex:
        yield Finding(Grade.OK, "death of a rank", "seen within a millisecond, whatever its memory")
    else:
        text = (
            f"Linux {facts.kernel} has no futex_waitv (5.16): seen only when its memory is freed, some 250 ms per GiB"
        )
        yield Finding(Grade.NOTE, "death of a rank", text)
    if facts.ptrace_scope is not None and facts.ptrace_scope >= 2:
        text = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: it goes over the process group, several times slower"
        yield Finding(Grade.NOTE, "state from a replica", text)
    else:
        yield Finding(Grade.OK, "state from a replica", "read out of its memory")
    yield from _probes(facts.probes)
    text = "of a loop in the main thread only; one in another thread notices a fault at its next collective or step"
    yield Finding(Grade.OK, "prompt interrupts", text)
    for device in facts.devices:
        text = f"there is a {device}, but with nccl or hccl groups a Session repairs nothing by default: gloo only"
        yield Finding(Grade.NOTE, "devices", text)


def _probes(probes: tuple[Probe, ...]) -> Iterator[Finding]:
    absent = [_LIBRARIES[probe.name][0] for probe in probes if probe.state == "absent"]
    if absent:
        yield Finding(Grade.OK, "device libraries", f"not here, so not asked: {', '.join(absent)}")
    for probe in probes:
        name, tells = _LIBRARIES[probe.name]
        lacks = f"; not {', '.join(probe.missing)}" if probe.missing else ""
        if probe.state == "polling":
            yield Finding(Grade.OK, name, f"is asked for {tells}{lacks}")
        elif probe.state != "absent":
            yield Finding(Grade.NOTE, name, f"can't be used: {probe.reason or probe.state}{lacks}")


def _limits(facts: Facts) -> Iterator[Finding]:
    dumps = facts.core_limit != 0 and facts.core_pattern
    if dumps:
        text = "a rank that crashes writes one before its death is seen: ulimit -c 0 in the job saves that time"
        yield Finding(Grade.NOTE, "core dumps", text)
    if facts.descriptors < _DESCRIPTORS_MIN:
        text = f"ulimit -n is {facts.descriptors}: many recoveries may use that up; {_DESCRIPTORS_MIN} is safe"
        yield Finding(Grade.NOTE, "open files", text)
    if not facts.run_dir_writable:
        yield Finding(Grade.PROBLEM, "run directory", f"{facts.run_dir} can't be written")


def _caches(facts: Facts) -> Iterator[Finding]:
    """Where restarted processes find what was compiled before."""
    for cache in facts.caches:
        where = f"{cache.path} ({cache.source})"
        free = f"{cache.free_bytes / (1 << 30):.1f} GiB free"
        if not cache.writable:
            if cache.source == "environment":  # else the run directory can't be written, which is told once
                text = f"{where} can't be written: every process of the job compiles anew, or fails"
                yield Finding(Grade.PROBLEM, cache.variable, text)
        elif cache.in_memory:
            text = f"{where}: on {cache.filesystem}: it takes memory, and is gone when the machine starts again; {free}"
            yield Finding(Grade.NOTE, cache.variable, text)
        elif cache.free_bytes < compile_caches.ROOM_BYTES:
            text = f"{where}: only {free}; what is compiled may not be kept"
            yield Finding(Grade.NOTE, cache.variable, text)
        else:
            whose = "all nodes that mount it" if cache.shared else "the processes of this node alone"
            text = f"{where}: on {cache.filesystem}, for {whose}; {free}"
            yield Finding(Grade.OK, cache.variable, text)
    for name, value in facts.cache_switches.items():
        usual = compile_caches.SWITCHES[name]
        yield Finding(Grade.OK, name, f"{value} (environment; resilient-run would set {usual})")


def _choices(facts: Facts) -> Iterator[Finding]:
    if facts.switches_given is not None:
        yield _given(facts.switches_given)
    yield from facts.mindspore
    if facts.off:
        yield Finding(Grade.PROBLEM, "sessions", f"{facts.off}: a Session is a plain loop, a lost rank ends the job")
    else:
        yield from _switches(facts)
    for setting in facts.settings:
        if setting.source != config.DEFAULT:
            yield Finding(Grade.OK, setting.variable, f"{setting.value} ({setting.source})")


def _given(text: str) -> Finding:
    """What the text means, and what becomes of it where it is not us who read it."""
    normal = normal_form(text)
    means = f"{text!r} means {normal}, which resilient-run gives the ranks" if normal != text else normal or "empty"
    other = differs(text)
    if not other:
        return Finding(Grade.OK, "MS_ENABLE_TFT", means)
    return Finding(Grade.NOTE, "MS_ENABLE_TFT", f"{means}; as it stands, {other}")


def _switches(facts: Facts) -> Iterator[Finding]:
    source = "MS_ENABLE_TFT" if facts.switches_given is not None else "the default, MS_ENABLE_TFT is not set"
    for name, text in _WORKS.items():
        if getattr(facts.switches, name):
            yield Finding(Grade.OK, name.upper(), f"on ({source}): {text}")
        elif name != "tre" or facts.switches_given is not None:  # it is off unless somebody asks for it
            yield Finding(Grade.PROBLEM if name == "arf" else Grade.NOTE, name.upper(), f"off ({source}); on: {text}")
    if facts.switches.arf and facts.standby:
        text = f"{_DEPTHS[facts.depth]}; events.jsonl says where a script does not allow it"
        yield Finding(Grade.OK, "standby", f"on, {facts.depth}: {text}")
        for each in facts.standing_by:
            state = "" if each.ready else ", on its way"
            text = f"{each.depth}{state}: {each.own_bytes / (1 << 20):.1f} MiB of its own (process {each.pid})"
            yield Finding(Grade.OK, "standby now", text)
    elif facts.switches.arf:
        text = "off (RESILIENT_STANDBY): every process starts Python and imports torch first, some 2 s"
        yield Finding(Grade.NOTE, "standby", text)
    idle = [name.upper() for name in _WITHOUT_EFFECT if getattr(facts.switches, name)]
    if idle and facts.switches_given is not None:
        yield Finding(Grade.NOTE, "switches", f"{', '.join(idle)} do nothing in this version")


def as_dict(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    """The result as a JSON-able object."""
    return {
        "ok": all(finding.grade is not Grade.PROBLEM for finding in findings),
        "findings": msgspec.to_builtins(findings),
        "settings": msgspec.to_builtins(facts.settings),
        "switches": msgspec.to_builtins(facts.switches),
        "caches": msgspec.to_builtins(facts.caches),
    }


def as_lines(findings: list[Finding]) -> list[Line]:
    """The result for a person."""
    styles = {Grade.OK: "green", Grade.NOTE: "yellow", Grade.PROBLEM: "bold red"}
    width = max(len(finding.what) for finding in findings)
    return [Line(f"{f.grade:<8} {f.what:<{width}}  {f.text}", styles[f.grade]) for f in findings]


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None
