"""``resilient-run``: torchrun's flags with torchrun's meaning, and a job that survives the loss of its processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.machinery
import itertools
import os
import re
import shlex
import signal
import stat
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from resilient_train import _register, config
from resilient_train.errors import ConfigError
from resilient_train.events import Event, now
from resilient_train.faults import nearest, parse_plan
from resilient_train.frameworks.supported import torch_problem, version_line
from resilient_train.launch.agent.console import Console
from resilient_train.launch.agent.console_text import line
from resilient_train.launch.agent.event_loop import AgentLoop
from resilient_train.launch.agent.run_dir_claim import Claim
from resilient_train.launch.cli import device_count, msrun
from resilient_train.launch.cli.findings import Grade
from resilient_train.launch.cli.mindspore_environ import RANK_TABLE, look
from resilient_train.launch.cli.mindspore_view import differs
from resilient_train.launch.exit_codes import EXIT_BUG, EXIT_WRONG_INPUT
from resilient_train.launch.fork import kept_code
from resilient_train.launch.fork.imports import target_of, uncollected, uses
from resilient_train.launch.fork.zygote import Born, Root, start_root
from resilient_train.launch.spec import JobSpec
from resilient_train.observe.closing_line import missed, summary
from resilient_train.observe.sinks import EVENTS_FILE, JsonLines, read_events
from resilient_train.protocol.policy import DEFAULT_MAX_RESTARTS, Policy
from resilient_train.tft_switches import Switches

_LAST_PORT = 65_535


def _check_torch() -> None:
    """Raises ConfigError unless there is a torch that recoveries work with."""
    try:
        with uncollected():
            import torch
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        raise ConfigError(torch_problem(None) if missing else f"torch can't be imported: {error}") from None
    if problem := torch_problem(torch.__version__):
        raise ConfigError(problem)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message} (resilient-run --help lists all flags)")


def _parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "resilient-run"
    parser.error = _refuse  # type: ignore[method-assign] # argparse's own prints the usage, a screen of it
    parser.description = (
        "Starts a training job like torchrun (same flags), and keeps it going: a rank that dies is replaced alone, the "
        "others keep their state."
    )
    if not parser.get_default("max_restarts"):  # torchrun also reads PET_MAX_RESTARTS into its default
        parser.set_defaults(max_restarts=None)
    ours = parser.add_argument_group("resilient_train")
    ours.add_argument("--version", action="version", version=version_line())
    ours.add_argument("--run-dir", "--run_dir", help="where the run writes (default: ./resilient_runs/<id>)")
    ours.add_argument("--faults", help="plan of faults to inject, e.g. 'kill rank=2 step=7 phase=UPDATING'")
    ours.add_argument("--standby", type=int, help="0: no process stands by to replace a lost rank (default: 1)")
    ours.add_argument(
        "--standby-depth",
        "--standby_depth",
        choices=config.DEPTHS,
        help="how far it is: forked (imports done), built (it has run the script up to rt.standby_point)",
    )
    return parser


def make_job(argv: list[str]) -> JobSpec | argparse.Namespace:
    """The job that the command line describes; for several nodes, the parsed flags, which torchrun itself will run.

    Raises ConfigError for what can't be run, SystemExit(2) for what argparse refuses.
    """
    if argv == ["--version"]:  # also where there is no torch, whose parser this is
        print(version_line())
        raise SystemExit(0)
    _check_torch()
    from torch.distributed import run as torchrun

    args = _parser().parse_args(argv)
    _check_numbers(args)
    settings = config.read_settings(
        run_dir=args.run_dir, faults=args.faults, standby=args.standby, standby_depth=args.standby_depth
    )
    switches = config.read_switches()
    limited = args.max_restarts is not None
    if not limited:
        args.max_restarts = 0
    try:
        args.nproc_per_node = device_count.ranks_for(args.nproc_per_node)
        with device_count.left_alone():
            # A job has its logs in its run directory. torch, not told so, leaves an empty directory in /tmp for each.
            nowhere = {} if args.log_dir or args.logs_specs else {"log_dir": os.devnull}
            here = argparse.Namespace(**vars(args) | nowhere)
            launch, command, arguments = torchrun.config_from_args(here)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"{error} (a flag of torchrun's; see resilient-run --help)") from None
    except OSError as error:  # torch makes the directory when it reads the flags
        raise ConfigError(f"--log-dir: {error}") from None
    if launch.max_nodes > 1:
        return args
    if launch.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node {args.nproc_per_node} gives {launch.nproc_per_node} ranks")
    if args.run_dir == "":
        raise ConfigError("--run-dir is empty: a job that is started again would not find what it had saved")
    run_id = str(uuid.uuid4()) if args.standalone or launch.run_id in ("", "none") else launch.run_id
    run_dir = Path(
        settings.run_dir or Path("resilient_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    ).absolute()
    if not _is_utf_8(run_dir):
        raise ConfigError(f"the run directory {str(run_dir)!r} is not UTF-8, and what is saved could not name it")
    _check_script(args)
    config.check_plan(settings, switches)
    config.check_straggler(settings, switches)
    for clause in parse_plan(settings.faults):
        if clause.rank >= launch.nproc_per_node:
            raise ConfigError(f"fault plan: {clause.describe()!r}: this job has ranks 0 to {launch.nproc_per_node - 1}")
    quiet, prefixed = _console(launch.logs_specs, launch.nproc_per_node)
    prefix = {} if launch.log_line_prefix_template is None else {"log_prefix": launch.log_line_prefix_template}
    return JobSpec(
        command=_command(command, arguments),
        world_size=launch.nproc_per_node,
        run_dir=run_dir,
        run_id=run_id,
        policy=_policy(settings, switches, args.max_restarts if limited else None),
        settings=settings,
        role=launch.role,
        port=args.master_port or 0,
        log_dir=Path(args.log_dir).absolute() if args.log_dir else run_dir / "logs",
        quiet=quiet,
        prefixed=prefixed,
        shutdown_timeout_s=float(cast("int", launch.shutdown_timeout)),
        signals=tuple(launch.signals_to_handle.split(",")),
        virtual_local_rank=launch.virtual_local_rank,
        **prefix,
    )


def _policy(settings: config.Settings, switches: Switches, max_restarts: int | None) -> Policy:
    return Policy(
        max_restarts=max_restarts if max_restarts is not None else DEFAULT_MAX_RESTARTS,
        restart_on_error=max_restarts is not None and max_restarts > 0,
        max_deviations=settings.deviations,
        neighbours=settings.verify_inputs == "neighbour",
        replace=switches.arf,
        rebuild=switches.hcce,
        mend=switches.uce,
        save_last=switches.ttp,
        pause=switches.tsp,
    )


def _check_numbers(args: argparse.Namespace) -> None:
    if args.standby is not None and args.standby < 0:
        raise ConfigError(f"--standby {args.standby}: it is 0 (no process stands by) or more")
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", args.nnodes):
        raise ConfigError(
            f"--nnodes {args.nnodes}: it is a number of nodes, or the smallest and the largest, as in 1:4"
        )
    if not 0 <= (args.master_port or 0) <= _LAST_PORT:
        raise ConfigError(f"--master-port {args.master_port}: ports are 0 (any that is free) to {_LAST_PORT}")


def _check_script(args: argparse.Namespace) -> None:
    name = args.training_script
    if args.module:
        top = name.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise ConfigError(f"there is no module {top!r}")
    elif not args.no_python and not args.run_path and not Path(name).is_file():
        raise ConfigError(f"there is no script {name!r}")
    path = Path.cwd() if args.module else Path(name).absolute()
    # C++ that an exception passes has it formatted, with the names of its files, and takes only these: in place of the
    # one that cuts a body comes one of its own (pybind11::cast_error), which ends the rank.
    if not args.no_python and not _is_utf_8(path):
        raise ConfigError(
            f"{str(path)!r} is not UTF-8: PyTorch can't pass on an exception that comes from such a file, and no rank "
            "could be recovered; rename it"
        )
    for each in args.signals_to_handle.split(","):
        if each not in signal.Signals.__members__:
            raise ConfigError(f"--signals-to-handle: {each!r} is no signal{nearest(each, signal.Signals.__members__)}")


def _is_utf_8(path: Path) -> bool:
    return not any("\udc80" <= letter <= "\udcff" for letter in str(path))  # PEP 383


def _command(command: Any, arguments: list[str]) -> tuple[str, ...]:
    if callable(command):  # --run-path
        code = "import sys; from torch.distributed.run import run_script_path; run_script_path(*sys.argv[1:])"
        return (sys.executable, "-u", "-c", code, *arguments)
    return (command, *arguments)


def _console(logs_specs: Any, world_size: int) -> tuple[frozenset[tuple[int, str]], frozenset[tuple[int, str]]]:
    """Which streams stay off the console, and which are prefixed: torchrun's ``--redirects``, ``--tee`` and filter."""
    tees, redirects = logs_specs._tee, logs_specs._redirects  # noqa: SLF001 - torchrun shows its choice no other way
    shown = logs_specs._local_ranks_filter  # noqa: SLF001 - likewise
    quiet, prefixed = set(), set()
    for rank in range(world_size):
        for name, bit in (("stdout", 1), ("stderr", 2)):
            tee = _std(tees, rank) & bit
            redirected = _std(redirects, rank) & bit
            hidden = shown is not None and rank not in shown
            if tee:
                prefixed.add((rank, name))
            if hidden or (redirected and not tee):
                quiet.add((rank, name))
    return frozenset(quiet), frozenset(prefixed)


def _std(setting: Any, rank: int) -> int:
    return int(setting.get(rank, 0) if isinstance(setting, dict) else setting)


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``resilient-run``. Returns in the ranks that are forked from this process, else exits."""
    _open_streams()
    argv = sys.argv[1:] if argv is None else argv
    if msrun.is_for_mindspore(argv):
        _run_mindspore(argv)
    _register.wrap_for_forks()
    guessed = config.set_threads(_ranks_wanted(argv))
    environ = config.environ_copy()
    try:
        job = make_job(argv)
        if guessed and isinstance(job, JobSpec) and job.world_size == 1:
            config.unset_threads()
        _look_at_mindspore(job)
    except ConfigError as error:
        print(f"resilient-run: {error}", file=sys.stderr)
        sys.exit(EXIT_WRONG_INPUT)
    _hand_on_switches(job)
    was_quiet = signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # see start.py
    if was_quiet:  # a script has Python's own, and may be a fork of what is made here
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(job, argparse.Namespace):
        from torch.distributed import run as torchrun

        print(
            "resilient-run: several nodes: started as by torchrun; replacing a single rank works on one node so far",
            file=sys.stderr,
        )
        torchrun.run(job)  # type: ignore[no-untyped-call] # torch's
        sys.exit(0)
    claim = _enter_run_dir(job)
    root = _start_root(job, environ)
    if isinstance(root, Born):
        root.begin()  # nothing of ours may catch what the script raises
        return
    if was_quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the agent hears it
    from resilient_train.launch.agent.agent import Agent

    code = run_job(job, argv, lambda sink: Agent(job, sink, root))
    claim.close()
    _leave(code)


def _leave(code: int) -> NoReturn:
    """All is written and closed. Torch's libraries, which nobody here has used, take half a second to end, and one that
    hangs in there would keep a job that is over.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _run_mindspore(argv: list[str]) -> NoReturn:
    """Runs a job that msrun's flags describe, and exits with its code."""
    from resilient_train.launch.agent.mindspore_agent import MindSporeAgent

    try:
        job = msrun.make_job(argv)
    except ConfigError as error:
        print(f"resilient-run: {error}", file=sys.stderr)
        sys.exit(EXIT_WRONG_INPUT)
    claim = _enter_run_dir(job.spec)
    code = run_job(job.spec, argv, lambda sink: MindSporeAgent(*job, sink))
    claim.close()
    _leave(code)


def _hand_on_switches(job: JobSpec | argparse.Namespace) -> None:
    """``MS_ENABLE_TFT`` in its normal form, for us and the ranks.

    Told where MindSpore had made something else of it, and the script uses MindSpore: to others it makes no difference.
    """
    told = differs(config.given_switches() or "")
    config.hand_on_switches()
    if told and isinstance(job, JobSpec) and uses(target_of(job.command), "mindspore"):
        handed_on = config.given_switches() or ""
        cure = "" if differs(handed_on) == told else f"; the ranks get {handed_on}"
        print(f"resilient-run: MS_ENABLE_TFT: as it stands, {told}{cure}", file=sys.stderr)


def _look_at_mindspore(job: JobSpec | argparse.Namespace) -> None:
    """What would end MindSpore's import or start is told before it, where the script uses MindSpore.

    Raises ConfigError for a rank table that is wrong: a job whose ranks can't find each other need not start.
    """
    told = [each for each in look(config.environ_copy(), starts=True) if each.grade is Grade.PROBLEM]
    if not told or not isinstance(job, JobSpec) or not uses(target_of(job.command), "mindspore"):
        return
    for each in told:
        if each.what == RANK_TABLE:
            raise ConfigError(f"{each.what}: {each.text}")
        print(f"resilient-run: {each.what}: {each.text}", file=sys.stderr)


def _open_streams() -> None:
    """Who has closed one of the standard streams wants nothing from it. Any other file could get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 - it stays
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _enter_run_dir(job: JobSpec) -> Claim:
    """Makes the run directory, for this user alone, and takes it; the ranks will keep the user's code there. Exits with
    2 if that can't be.
    """
    try:
        job.run_dir.parent.mkdir(parents=True, exist_ok=True)
        job.run_dir.mkdir(mode=0o700, exist_ok=True)
        claim = Claim(job.run_dir)
    except ConfigError as error:
        print(f"resilient-run: {error}", file=sys.stderr)
        sys.exit(EXIT_WRONG_INPUT)
    except OSError as error:
        print(f"resilient-run: the run directory can't be written: {error}", file=sys.stderr)
        sys.exit(EXIT_WRONG_INPUT)
    if not claim.locked:
        print(
            f"resilient-run: the file system of {job.run_dir} knows no locks: take care that no launcher on another "
            "machine uses it at the same time",
            file=sys.stderr,
        )
    if job.run_dir.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        print(
            f"resilient-run: others may write in {job.run_dir}, and so take the job over: `chmod go-w {job.run_dir}`",
            file=sys.stderr,
        )
    config.hand_on_kept_code(str(kept_code.begin(job.run_dir) or ""))
    return claim


def _ranks_wanted(argv: list[str]) -> str:
    """The value of ``--nproc-per-node``, found before there is a parser: it decides with what torch is imported."""
    for here, after in itertools.pairwise([*argv, ""]):
        name, equals, value = here.partition("=")
        if name.startswith("--nproc"):
            return value if equals else after
    return config.environ_copy().get("PET_NPROC_PER_NODE", "1")


def _start_root(job: JobSpec, environ: dict[str, str]) -> Root | Born | str:
    if not job.settings.standby:
        return "switched off (--standby 0)"
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        return start_root(job.log_dir / "standby.log", environ)
    except OSError as error:
        return str(error)


def _set_aside(events: Path) -> None:
    """Events of an earlier run in the same directory keep their own file: a report is about one run."""
    number = 1
    while events.exists():
        older = events.with_name(f"events-{number}.jsonl")
        if not older.exists():
            events.rename(older)
        number += 1


def _without_effect() -> list[str]:
    """What the user switched on, or off, and should know the effect of."""
    switches = config.read_switches()
    planned = [name for name in ("rsc",) if getattr(switches, name)]
    off = config.why_off(config.read_settings(), switches)
    if off:
        return [f"{off}: no fault is recovered, a lost rank ends the job"]
    texts = [f"MS_ENABLE_TFT: {name.upper()} is known, but does nothing in this version" for name in planned]
    if not switches.arf:
        texts.append("MS_ENABLE_TFT has no ARF:1, so a lost rank ends the job instead of being replaced")
    if not switches.hcce:
        texts.append("MS_ENABLE_TFT has no HCCE:1, so a collective that fails although nobody died ends the job")
    return texts


class _Runs(Protocol):
    async def run(self) -> int: ...


def run_job(job: JobSpec, argv: list[str], agent: Callable[[JsonLines], _Runs]) -> int:
    """Runs a job of one node; returns its exit code."""
    console = Console(sys.stderr.fileno())
    try:
        _set_aside(job.run_dir / EVENTS_FILE)
    except OSError as error:
        console.say(f"resilient-run: the run directory can't be written: {error}")
        return EXIT_WRONG_INPUT
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.say(f"resilient-run: logs can't be written (--log-dir): {error}")
        return EXIT_WRONG_INPUT
    sink = JsonLines(job.run_dir / EVENTS_FILE)
    for text in (f"{job.world_size} ranks, run directory {job.run_dir}", *_without_effect()):
        console.say(line(text))
    sink.write(now("run_start", detail={"world_size": job.world_size, "argv": argv, "pid": os.getpid()}))

    async def serve() -> int:
        return await agent(sink).run()

    try:
        with asyncio.Runner(loop_factory=AgentLoop) as runner:
            code = runner.run(serve())
    except ConfigError as error:
        console.say(f"resilient-run: {error}")
        return EXIT_WRONG_INPUT
    except Exception as error:
        console.say("".join(traceback.format_exception(error)))
        console.say(line(f"the job ends: internal error of the agent: {error!r} (please report it)"))
        code = EXIT_BUG
    sink.close()
    if sink.dropped:
        console.say(line(f"{sink.dropped} events could not be written, so what is told of the run now may be wrong"))
    _sum_up(job, code, console)
    if code == 128 + signal.SIGINT:
        console.say(line("interrupted"))
    return code


def _whole(path: Path) -> list[Event]:
    """All events. Raises LookupError where a rank has made a new file, since the one of before is elsewhere."""
    events = read_events(path)
    if not any(event.kind == "run_start" for event in events):
        raise LookupError(f"{path} has lost its begin: was the run directory moved, emptied, or full?")
    return events


def _sum_up(job: JobSpec, code: int, console: Console) -> None:
    """The last line, and the trace. They only tell: the job is over, and its exit code is known."""
    from resilient_train.observe.trace import TRACE_FILE, write_trace

    try:
        events = _whole(job.run_dir / EVENTS_FILE)
        if code != EXIT_WRONG_INPUT or any(event.kind == "started" for event in events):
            report = f"resilient-train report {shlex.quote(str(job.run_dir))}"
            told = f"{summary(events, code)}. Logs: {job.log_dir}; all of it: {report}"
            if short := missed(events, parse_plan(job.settings.faults)):
                console.say(line(short))
            console.say(line(told))
    except FileNotFoundError:
        gone = f"{job.run_dir} was moved or removed while the job ran, with its events and what it had saved"
        console.say(line(f"ended with exit code {code}; {gone}"))
        return
    except Exception as error:
        why = str(error) if isinstance(error, LookupError) else repr(error)
        console.say(line(f"ended with exit code {code}; what became of the run can't be told from its events: {why}"))
        return
    try:
        write_trace(events, job.run_dir / TRACE_FILE)
    except Exception as error:
        console.say(line(f"{TRACE_FILE} could not be written: {error}"))


if __name__ == "__main__":
    config.fix_hash_seed()
    main()
