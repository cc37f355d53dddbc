"""Settings and switches. The only module that reads ``os.environ``.

Flags beat variables beat defaults; ``describe`` tells where each value came from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any, get_type_hints

import msgspec

from resilient_train.errors import ConfigError
from resilient_train.faults import ANOMALIES, nearest, parse_plan
from resilient_train.tft_switches import DEFAULT_SWITCHES, SWITCHES, Switches, auto_save, normal_form, parse_switches

PREFIX = "RESILIENT_"
DEPTHS = ("forked", "built")
"""How far a standby can be, each further than the one before."""

ON_STRAGGLER = ("report", "replace")
_VERIFY_INPUTS = ("own", "neighbour")


class AgentLink(msgspec.Struct, frozen=True):
    """What the agent told this process about itself when it started it; see ``launch/agent/processes.py``."""

    socket: str
    rank: int
    world_size: int
    incarnation: int
    joining: bool
    run_dir: str
    token: str = ""
    """By which this agent knows its own ranks."""
    attempt: int = 0
    """How often all ranks have been started again."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One field per ``RESILIENT_*`` variable; the variable is the field's name in capitals behind the prefix."""

    run_dir: str = ""
    """Where the run writes; empty: ``./resilient_runs/<id>``."""
    faults: str = ""
    """Plan of injected faults, see ``faults.parse_plan``."""
    wrap_backend: bool = True
    """Under our agent, ``init_process_group()`` without a backend, or with gloo, makes a group that can be rebuilt."""
    join_timeout_s: float = 600.0
    """How long each phase of a recovery may take: until all ranks have joined, and from then to its end."""
    verdict_timeout_s: float = 60.0
    """How long a rank whose collective failed waits for the agent to say why, before it raises the error itself."""
    watchdog: bool = True
    """Off: a Session is a plain loop. Not set: what torch_npu's variables say, see ``read_settings``."""
    beat_ms: int = 50
    """Interval of the native watchdog's beats."""
    grace_ms: int = 5
    """Time between closing a group's sockets and interrupting the main thread by signal."""
    hang: bool = True
    """Replace a rank that stands still while the others wait for it."""
    hang_timeout_s: float = 0.0
    """How long a rank may stand still; 0: ten times the job's own usual step, and at least ``hang_floor_s``."""
    hang_floor_s: float = 60.0
    """See ``hang_timeout_s``."""
    on_straggler: str = "report"
    """What is done about a rank that computes slower than before: ``report`` it, or ``replace`` it as well, once."""
    compare_every: int = 32
    """Replicas compare their bits at least every so many updates; 0: before saves, after recoveries and at the end."""
    verify_every: int = 0
    """Every so many steps one is computed twice, and its update applied if both come to the same bits; 0: none."""
    verify_inputs: str = "own"
    """From whose inputs a rank computes twice: its ``own``, or a ``neighbour``'s as well (a replica's)."""
    deviations: int = 0
    """A job ends when a rank has come to other bits so often on one device (``verify_every``); 0: it never does."""
    exit_grace_s: float = 25.0
    """How long a job that was asked to end (SIGTERM, SIGUSR1, SIGHUP) may take to save its state."""
    last_save_timeout_s: float = 600.0
    """The same for a job that ends because a fault can't be repaired."""
    keep_checkpoints: int = 2
    """How many checkpoints of ``save_every`` stay in the run directory."""
    tail_log_bytes: int = 4 << 20
    """Room, per rank, for the inputs of collectives that the loop calls after the update."""
    pinned_bytes: int = 1 << 30
    """Host memory, per rank, through which state on an accelerator is copied; at least 64 MiB are."""
    hccl: bool = False
    """Groups over HCCL are rebuilt after a fault, too; else a Session with such a group is a plain loop."""
    hccl_library: str = ""
    """The libhccl.so whose communicators are asked for errors where ``hccl`` is on; by default the system's."""
    nccl: bool = False
    """Groups over NCCL are rebuilt after a fault, too; else a Session with such a group is a plain loop."""
    acl_library: str = ""
    """The ACL runtime that is asked for errors; empty: ``libascendcl.so`` where torch_npu is in use."""
    nvml_library: str = ""
    """The NVML that is asked for errors; empty: ``libnvidia-ml.so.1`` where torch has set up CUDA."""
    probe_ms: int = 50
    """Interval at which the device's libraries are asked for errors."""
    standby: int = 1
    """Forks that stand by to become a rank; any more are made when they are needed. 0: nothing is forked, all processes
    start cold."""
    standby_depth: str = "forked"
    """How far they are: ``forked`` has its imports done, ``built`` has run the script up to ``standby_point``."""
    standby_limit_s: float = 600.0
    """How long a standby may take from the script's first line to where it waits (depth ``built``)."""
    drill_records: bool = False
    """Each rank writes a digest of each part of its state before each step, as ``resilient-train drill`` wants it."""
    norm_threshold: float = float("inf")
    """A gradient norm from this on is an anomaly (``TRE``), as one that is not finite always is."""
    loss_threshold: float = float("inf")
    """The same for the loss."""
    tft_secret_file: str = ""
    """What the controller of ``mindio_ttp`` and its ranks prove to each other, in a file that only its owner may read;
    needed where the controller listens to other hosts."""
    trace: bool = False
    """Each rank writes every event of its machine, and what that wants done, see ``session/rank_trace.py``."""
    transfer: str = "auto"
    """How state reaches a replacement: ``memory`` (same host), ``group`` (over the process group), ``auto``."""

    def __post_init__(self) -> None:
        if self.transfer not in ("auto", "memory", "group"):
            known = ("auto", "memory", "group")
            raise ConfigError(f"{PREFIX}TRANSFER={self.transfer!r}: unknown{nearest(self.transfer, known)}")
        if not 0 <= self.hang_timeout_s < float("inf"):
            raise ConfigError(f"{PREFIX}HANG_TIMEOUT_S must be a number of seconds from 0, not {self.hang_timeout_s}")
        if self.verify_inputs not in _VERIFY_INPUTS:
            hint = nearest(self.verify_inputs, _VERIFY_INPUTS)
            raise ConfigError(
                f"{PREFIX}VERIFY_INPUTS={self.verify_inputs!r}: unknown{hint}; write {' or '.join(_VERIFY_INPUTS)}"
            )
        if self.verify_inputs != "own" and not self.verify_every:
            raise ConfigError(f"{PREFIX}VERIFY_INPUTS={self.verify_inputs} needs {PREFIX}VERIFY_EVERY=N")
        if self.on_straggler not in ON_STRAGGLER:
            hint = nearest(self.on_straggler, ON_STRAGGLER)
            raise ConfigError(
                f"{PREFIX}ON_STRAGGLER={self.on_straggler!r}: unknown{hint}; write {' or '.join(ON_STRAGGLER)}"
            )
        times = ("join_timeout_s", "verdict_timeout_s", "hang_floor_s", "standby_limit_s", "exit_grace_s")
        for name in (*times, "last_save_timeout_s", "beat_ms", "grace_ms", "probe_ms"):
            if not getattr(self, name) > 0:  # also for nan
                raise ConfigError(f"{PREFIX}{name.upper()} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.tail_log_bytes <= 1 << 40:
            raise ConfigError(f"{PREFIX}TAIL_LOG_BYTES must be from 0 to 2^40, not {self.tail_log_bytes}")
        if not 0 <= self.pinned_bytes <= 1 << 40:
            raise ConfigError(f"{PREFIX}PINNED_BYTES must be from 0 to 2^40, not {self.pinned_bytes}")
        check_thresholds(f"{PREFIX}NORM_THRESHOLD", self.norm_threshold, f"{PREFIX}LOSS_THRESHOLD", self.loss_threshold)
        if self.keep_checkpoints < 1:
            raise ConfigError(f"{PREFIX}KEEP_CHECKPOINTS must be 1 or more, not {self.keep_checkpoints}")
        for name in ("standby", "compare_every", "verify_every", "deviations"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{PREFIX}{name.upper()} must be 0 or more, not {getattr(self, name)}")
        if self.standby_depth not in DEPTHS:
            hint = nearest(self.standby_depth, DEPTHS)
            raise ConfigError(f"{PREFIX}STANDBY_DEPTH={self.standby_depth!r}: unknown{hint}; write {', '.join(DEPTHS)}")
        parse_plan(self.faults)


def check_thresholds(norm_name: str, norm: float, loss_name: str, loss: float) -> None:
    """Raises ConfigError for what no norm, and no loss, can be measured by."""
    given: tuple[tuple[str, object], ...] = ((norm_name, norm), (loss_name, loss))
    for name, value in given:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"{name} must be a number, not {value!r}")
    if not norm > 0:  # also for nan
        raise ConfigError(f"{norm_name} must be above 0, not {norm}")
    if not loss > -float("inf"):
        raise ConfigError(f"{loss_name} must be a number, not {loss}")


_SWITCHES = "MS_ENABLE_TFT"


def read_switches(environ: Mapping[str, str] | None = None) -> Switches:
    """The switches of this process: ``MS_ENABLE_TFT``, or the default where it isn't set."""
    text = given_switches(environ)
    return DEFAULT_SWITCHES if text is None else parse_switches(text)


def check_plan(settings: Settings, switches: Switches) -> None:
    """Raises ConfigError for planned faults that nothing would see."""
    if not switches.tre and any(each.kind in ANOMALIES for each in parse_plan(settings.faults)):
        raise ConfigError("fault plan: norm and loss are seen by TRE, which is off: MS_ENABLE_TFT has no TRE:1")


def check_straggler(settings: Settings, switches: Switches) -> None:
    """Raises ConfigError where a rank is to be replaced that is slow, and none is that is lost."""
    if settings.on_straggler == "replace" and not switches.arf:
        raise ConfigError(f"{PREFIX}ON_STRAGGLER=replace: ranks are replaced by ARF, which is off (MS_ENABLE_TFT)")


def why_off(settings: Settings, switches: Switches) -> str:
    """Why a Session is a plain loop although an agent stands behind it; empty if it isn't."""
    if not settings.watchdog:
        return "the watchdog is switched off (RESILIENT_WATCHDOG or HCCL_ASYNC_ERROR_HANDLING is 0)"
    if not any(getattr(switches, name.lower()) for name in SWITCHES) and auto_save(switches) is None:
        return "MS_ENABLE_TFT switches nothing on"
    return ""


def given_switches(environ: Mapping[str, str] | None = None) -> str | None:
    """``MS_ENABLE_TFT`` as the user wrote it; None where he did not."""
    return (os.environ if environ is None else environ).get(_SWITCHES)


def hand_on_switches() -> None:
    """``MS_ENABLE_TFT`` becomes its normal form, in this process and in the ranks, which get its environment.

    All of MindSpore's parsers read that alike. Raises ConfigError for a text that is wrong.
    """
    text = given_switches()
    if text is not None:
        os.environ[_SWITCHES] = normal_form(text)


DEFAULT = "default"


class Described(msgspec.Struct, frozen=True):
    """A setting for people: ``source`` is DEFAULT, ``environment`` or ``flag``."""

    variable: str
    value: str
    source: str


def describe(settings: Settings, environ: Mapping[str, str] | None = None) -> tuple[Described, ...]:
    """Each setting, and where it came from."""
    environ = os.environ if environ is None else environ
    usual, found = Settings(), []
    for name in Settings.__struct_fields__:
        variable, value = PREFIX + name.upper(), getattr(settings, name)
        source = "environment" if variable in environ else DEFAULT if value == getattr(usual, name) else "flag"
        if name == "watchdog" and source == "flag":
            source = next(each for each in _ASYNC_ERROR_HANDLING if each in environ)
        found.append(Described(variable, str(value), source))
    return tuple(found)


_ASYNC_ERROR_HANDLING = ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")
"""torch_npu's switch of its own watchdog, the newer name first: 0 is off, 1 to 3 are ways to be on."""
_TYPES = get_type_hints(Settings)
"""Here, and so in the zygote: to evaluate them takes a millisecond."""
_WANTED = {bool: ": write 1 or 0", int: " must be a whole number", float: " must be a number"}


def read_settings(environ: Mapping[str, str] | None = None, **flags: Any) -> Settings:
    """Settings from the environment, overridden by ``flags`` that aren't None.

    Where ``RESILIENT_WATCHDOG`` isn't set, ``[TORCH_]HCCL_ASYNC_ERROR_HANDLING`` decides, as for torch_npu.
    Raises ConfigError for an unknown ``RESILIENT_*`` variable or a value of the wrong type.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in _LINK_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in _TYPES:
            known = [PREFIX + field.upper() for field in _TYPES]
            raise ConfigError(f"unknown variable {variable}{nearest(variable, known)}")
        values[name] = _typed(variable, text, _TYPES[name])
    for variable in _ASYNC_ERROR_HANDLING:
        if variable in environ:
            if environ[variable] not in ("0", "1", "2", "3"):
                raise ConfigError(f"{variable}={environ[variable]!r}: write 0 (off) or 1 (on); 2 and 3 are on as well")
            values.setdefault("watchdog", environ[variable] != "0")
    values.update({name: value for name, value in flags.items() if value is not None})
    return Settings(**values)


def _typed(variable: str, text: str, kind: type) -> Any:
    word = text if kind is str else text.strip().lower()
    if kind is bool:
        word = {"on": "1", "off": "0"}.get(word, word)
    try:
        return msgspec.convert(word, kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{variable}={text!r}{_WANTED[kind]}") from None


_LINK_VARIABLES = (
    PREFIX + "FAKE_DEVICE",  # read by the look-alike libraries alone, see testing/fake_device.py
    PREFIX + "AGENT",
    PREFIX + "INCARNATION",
    PREFIX + "JOINING",
    PREFIX + "TOKEN",
    PREFIX + "KEPT_CODE",
    PREFIX + "TFT_HOSTED",
    PREFIX + "TFT_STACKS",
    PREFIX + "TFT_RANKS",
)


def link_environ(link: AgentLink) -> dict[str, str]:
    """The variables by which an agent tells a rank where it is; ``read_link`` is the inverse."""
    return {
        PREFIX + "AGENT": link.socket,
        PREFIX + "INCARNATION": str(link.incarnation),
        PREFIX + "JOINING": "1" if link.joining else "0",
        PREFIX + "RUN_DIR": link.run_dir,
        PREFIX + "TOKEN": link.token,
        "RANK": str(link.rank),
        "WORLD_SIZE": str(link.world_size),
    }


def read_link(environ: Mapping[str, str] | None = None) -> AgentLink | None:
    """How this process reaches its agent; None when no agent of ours started it."""
    environ = os.environ if environ is None else environ
    socket = environ.get(PREFIX + "AGENT")
    if not socket:
        return None
    try:
        return AgentLink(
            socket=socket,
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            incarnation=int(environ[PREFIX + "INCARNATION"]),
            joining=environ[PREFIX + "JOINING"] == "1",
            run_dir=environ[PREFIX + "RUN_DIR"],
            token=environ[PREFIX + "TOKEN"],
            attempt=int(environ.get(ATTEMPT, "0")),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{PREFIX}AGENT is set, but {error} is missing or no number: was it exported by hand?"
        ) from None


def hand_on_kept_code(folder: str) -> None:
    """The ranks, which get this process's environment, find the job's copies of the user's code in ``folder``."""
    os.environ[PREFIX + "KEPT_CODE"] = folder


def kept_code() -> str:
    """Where they are; empty: there are none."""
    return os.environ.get(PREFIX + "KEPT_CODE", "")


def joins_late() -> bool:
    """Whether this process is a rank's that takes another one's place, in a job that goes on or is started again."""
    return os.environ.get(PREFIX + "JOINING") == "1" or os.environ.get(ATTEMPT, "0") != "0"


def hosted_environ(address: str, port: int, secret_file: str) -> dict[str, str]:
    """The variables by which ``resilient-run`` tells a MindSpore rank where it has the controller of ``mindio_ttp``."""
    where = {"MS_TFT_IP": address, "MS_TFT_PORT": str(port)}
    return {**where, PREFIX + "TFT_SECRET_FILE": secret_file, PREFIX + "TFT_HOSTED": "1"}


def ranks_environ(folder: str) -> dict[str, str]:
    """The variable by which it tells a MindSpore rank where it is to say how far it is; see ``ranks_folder``."""
    return {PREFIX + "TFT_RANKS": folder}


def ranks_folder() -> str:
    """Where that is; empty: nobody asks."""
    return os.environ.get(PREFIX + "TFT_RANKS", "")


def stacks_environ(path: str) -> dict[str, str]:
    """The variable by which it tells a rank where its Python stacks are to be written; see ``stacks_path``."""
    return {PREFIX + "TFT_STACKS": path}


def stacks_path() -> str:
    """Where they are to be written; empty: nobody asks for them."""
    return os.environ.get(PREFIX + "TFT_STACKS", "")


def is_hosted() -> bool:
    """Whether it did so."""
    return os.environ.get(PREFIX + "TFT_HOSTED") == "1"


_MINDX_WAIT = "MINDIO_WAIT_MINDX_TIME"


def mindx_wait_s(environ: Mapping[str, str] | None = None) -> int:
    """How long MindX may take to answer a controller of ``mindio_ttp``. Raises ConfigError."""
    text = (os.environ if environ is None else environ).get(_MINDX_WAIT, "30")
    if not text.isdecimal() or not 1 <= int(text) <= 3600:
        raise ConfigError(f"{_MINDX_WAIT}={text!r} must be a whole number of seconds from 1 to 3600")
    return int(text)


def cleans_before_save() -> bool:
    """``TTP_STOP_CLEAN_BEFORE_DUMP``: a rank of ``mindio_ttp`` has its device stopped and cleaned before it saves."""
    return os.environ.get("TTP_STOP_CLEAN_BEFORE_DUMP") == "1"


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank of anything: it speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def own_rank() -> int:
    """The rank of this process, which has one."""
    return int(os.environ["RANK"])


def init_barrier_wanted() -> bool:
    """Whether torch's ``init_process_group`` ends with a barrier of its own."""
    return os.environ.get("TORCH_DIST_INIT_BARRIER", "0") not in ("", "0")


def gloo_connects_late() -> bool:
    """Whether gloo is told to connect two ranks when they first need it."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")


def checks_for_nan() -> bool:
    """Whether torch is told to look for NaN in what is given to collectives."""
    return os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1"


def recorder_entries() -> int:
    """How many collectives torch's flight recorder keeps: by its variable, by that one's older name, or by default."""
    given = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or ""
    return int(given) if given.isdecimal() else 2000


_HASH_SEED = "PYTHONHASHSEED"
_THREADS = "OMP_NUM_THREADS"


def wraps_backend() -> bool:
    """Whether ``init_process_group()`` without a backend, or with gloo, makes a group that can be rebuilt."""
    settings = read_settings()
    return settings.wrap_backend and not why_off(settings, read_switches())


def rebuilds_hccl() -> bool:
    """Whether a group over HCCL is to be one that can be rebuilt. Never tried on a device."""
    return read_settings().hccl


def rebuilds_nccl() -> bool:
    """Whether a group over NCCL is to be one that can be rebuilt."""
    return read_settings().nccl


_NOT_BY_TORCH = (
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_ENABLE_MONITORING",  # ends a process whose abort takes long
    "TORCH_NCCL_PROPAGATE_ERROR",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",  # resolves Python's stacks for seconds, on a thread that needs the GIL
)


def set_nccl_environment() -> None:
    """What torch must not do by itself when a peer dies, before it makes a group over NCCL.

    Raises ConfigError where the user has said otherwise.
    """
    # Else torch ends the process when a peer dies. Launchers set it for everybody, so it is nobody's choice.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    for name in _NOT_BY_TORCH:
        given = os.environ.setdefault(name, "0")
        if given != "0":
            raise ConfigError(
                f"{name}={given}: torch would act on a failure of NCCL by itself, and no group could be rebuilt; unset "
                f"it, or leave {PREFIX}NCCL out"
            )


def fix_hash_seed() -> None:
    """Begins this process anew with one hash seed for all jobs, unless the user has chosen one, or has Python look at
    no variables (``-I``).

    Forked ranks have the launcher's hashes. A cold start, a worker by *spawn* and the next launcher, which goes on from
    a checkpoint, would have others: a table that is made in the order of a set of strings would be another one there.
    """
    if os.environ.get(_HASH_SEED) or sys.flags.ignore_environment or not sys.executable:
        return
    os.environ[_HASH_SEED] = "0"
    if not sys.flags.hash_randomization:
        return  # it is so already: somebody (a sitecustomize) has removed the variable
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - it is this process


def set_threads(ranks: str) -> bool:
    """One OpenMP thread for each of several ranks, as torchrun sets it, unless the user has said how many.

    Here it is set before torch and numpy are imported, which look at it only then: ranks are forks of this process.
    Returns whether it was set here.
    """
    if ranks == "1" or _THREADS in os.environ:
        return False
    os.environ[_THREADS] = "1"
    return True


def unset_threads() -> None:
    """It is one rank after all: the number of its threads is nobody's business but its own."""
    del os.environ[_THREADS]


def environ_copy() -> dict[str, str]:
    """A copy of the environment, for processes that the agent starts."""
    return dict(os.environ)


PER_RANK = frozenset(
    {
        *(PREFIX + name for name in ("AGENT", "INCARNATION", "JOINING")),
        *("RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
    }
)
"""Variables that differ between the processes of a job. Nothing that torch's import runs reads one of them."""


def shared_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of a job have in common."""
    return {name: value for name, value in environ.items() if name not in PER_RANK}


def replace_environ(environ: Mapping[str, str]) -> None:
    """This process's variables become these, for C libraries as well."""
    os.environ.clear()
    os.environ.update(environ)


def take_life(environ: Mapping[str, str]) -> None:
    """This process's variables become these, but what modules have set, or removed, when they were imported stays."""
    ours = shared_environ(os.environ)
    told = {name: value for name, value in environ.items() if name in PER_RANK or name in ours}
    replace_environ({**told, **ours})


def take_rank(environ: Mapping[str, str]) -> None:
    """This process gets a rank: what differs between ranks is taken over, what the script has set itself is kept."""
    for name in PER_RANK:
        if name in environ:
            os.environ[name] = environ[name]
        else:
            os.environ.pop(name, None)


ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""How often all ranks were started again; the name of torch's store depends on it."""
