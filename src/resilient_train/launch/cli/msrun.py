"""``resilient-run`` with msrun's flags: a MindSpore job on this node, whose lost ranks are replaced.

msrun's flags (MindSpore 2.10, ``mindspore.parallel.cluster.run``) have msrun's meaning. What differs: the job is always
waited for (``--join=True``), and a killed rank does not end it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.launch.cli.findings import Grade
from resilient_train.launch.cli.mindspore_environ import look
from resilient_train.launch.spec import JobSpec
from resilient_train.protocol.policy import DEFAULT_MAX_RESTARTS, Policy

_TELLING = "worker_num"
"""The flag by which a job is known to be MindSpore's."""
_REFUSED = {
    "bind_core": "leave it out",
    "bind_numa": "leave it out",
    "sim_level": "a dry run is msrun's",
    "sim_rank_id": "a dry run is msrun's",
    "worker_log_name": "logs lie in rank_N under --log_dir",
}
"""Flags of msrun's that are known and not taken over, and what to do instead."""
_ONLY_WITH_A_SESSION = (
    "faults", "verify_every", "verify_inputs", "deviations", "on_straggler", "compare_every", "drill_records",
)  # fmt: skip
"""Settings that ask for what nobody does in a MindSpore job. Faults that never come, say, would seem to be survived."""
_FLAGS: dict[str, dict[str, Any]] = {
    "worker_num": {"type": int, "help": "ranks of the job"},
    "local_worker_num": {"type": int, "help": "ranks on this node: all of them"},
    "master_addr": {"default": "127.0.0.1", "help": "where MindSpore's scheduler listens"},
    "master_port": {"type": int, "default": 8118, "help": "likewise"},
    "node_rank": {"type": int, "default": -1, "help": "0 or -1: there is one node"},
    "log_dir": {"default": "", "help": "default: logs in the run directory"},
    "join": {"default": "True", "help": "the job is waited for in any case"},
    "cluster_time_out": {"type": int, "default": 600, "help": "seconds in which all have to come"},
    "rank_table_file": {"default": "", "help": "handed on as RANK_TABLE_FILE"},
    "tail_worker_log": {"default": "-1", "help": "ranks whose output is shown here, as 0,3; -1: all"},
    "run_dir": {"help": "where the run writes (default: ./resilient_runs/<id>)"},
    "max_restarts": {"type": int, "default": DEFAULT_MAX_RESTARTS, "help": "lost ranks that are replaced in all"},
}


class MindSporeJob(NamedTuple):
    """``environ``: of the scheduler and the ranks, without what tells them who they are. ``controller``: where that of
    ``mindio_ttp`` is to listen, address and port (0: any).
    """

    spec: JobSpec
    environ: dict[str, str]
    controller: tuple[str, int]


def is_for_mindspore(argv: list[str]) -> bool:
    """Whether the flags in front of the script are msrun's."""
    found, rest = False, iter(argv)
    for word in rest:
        name, equals, _ = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in _FLAGS.keys() | _REFUSED.keys():
            break
        found = found or name == _TELLING
        if not equals:
            next(rest, None)
    return found


def make_job(argv: list[str]) -> MindSporeJob:
    """The job that the command line describes. Raises ConfigError for what can't be run."""
    args = _parser().parse_args(argv)
    for name, instead in _REFUSED.items():
        if getattr(args, name) is not None:
            _refuse(f"--{name} is msrun's, and not understood here: {instead}")
    world = args.worker_num
    if world < 1:
        _refuse(f"--worker_num {world}: a job has at least one rank")
    if args.local_worker_num not in (None, world) or args.node_rank not in (-1, 0):
        _refuse("several nodes: replacing a single rank works on one node so far; start such a job with msrun")
    config.hand_on_switches()
    settings, switches = config.read_settings(run_dir=args.run_dir), config.read_switches()
    if asked := _asked_in_vain(settings):
        _refuse(f"{', '.join(asked)}: nothing does that in a MindSpore job, only where torch trains; unset it")
    run_dir = Path(settings.run_dir or Path("resilient_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    run_dir = run_dir.absolute()
    policy = Policy(
        max_restarts=args.max_restarts,
        replace=switches.arf,
        rebuild=switches.hcce,
        mend=switches.uce,
        pause=switches.tsp,
    )
    spec = JobSpec(
        command=_command(args.script, args.arguments),
        world_size=world,
        run_dir=run_dir,
        run_id=run_dir.name,
        policy=policy,
        settings=settings,
        host=args.master_addr,
        port=args.master_port,
        log_dir=Path(args.log_dir).absolute() if args.log_dir else run_dir / "logs",
        quiet=_quiet(args.tail_worker_log, world),
    )
    environ = _environ(args, spec)
    port = environ.get("MS_TFT_PORT") or "0"
    if not (port.isdecimal() and int(port) < 1 << 16):
        _refuse(f"MS_TFT_PORT={port!r} is no port")
    return MindSporeJob(spec, environ, (environ.get("MS_TFT_IP") or "127.0.0.1", int(port)))


def _asked_in_vain(settings: config.Settings) -> list[str]:
    usual = config.Settings()
    asked = [name for name in _ONLY_WITH_A_SESSION if getattr(settings, name) != getattr(usual, name)]
    return [config.PREFIX + name.upper() for name in asked]


def _command(script: str, arguments: list[str]) -> tuple[str, ...]:
    """As msrun has it: a script of Python's, or one of three commands and what it runs."""
    if script == "pytest":
        return (sys.executable, "-u", "-m", script, *arguments)
    words = arguments if script in ("python", "python3") else [script, *arguments]
    if not words or not Path(words[0]).is_file():
        _refuse(f"there is no script {words[0] if words else ''!r}")
    return (sys.executable, "-u", *words)


def _environ(args: argparse.Namespace, spec: JobSpec) -> dict[str, str]:
    """Raises ConfigError for what would end MindSpore's import or start."""
    found = {
        **config.environ_copy(),
        "MS_WORKER_NUM": str(spec.world_size),
        "MS_SCHED_HOST": spec.host,
        "MS_SCHED_PORT": str(spec.port),
        "MS_TOPO_TIMEOUT": str(args.cluster_time_out),
        "RANK_SIZE": str(spec.world_size),
    }
    if args.rank_table_file:
        found["RANK_TABLE_FILE"] = args.rank_table_file
    # Where the controller is, the agent says, if nobody else does.
    told = look({"MS_TFT_IP": spec.host, "MS_TFT_PORT": "1024", **found}, starts=True)
    if wrong := [f"{each.what}: {each.text}" for each in told if each.grade is Grade.PROBLEM]:
        raise ConfigError("; ".join(wrong))
    return found


def _quiet(tailed: str, world: int) -> frozenset[tuple[int, str]]:
    try:
        shown = {int(each) for each in tailed.split(",")}
    except ValueError:
        _refuse(f"--tail_worker_log={tailed!r}: write ranks, as 0,3, or -1 for all")
    return frozenset(
        (rank, name)
        for rank in range(-1, world)
        for name in ("stdout", "stderr")
        if rank == -1 or not (shown == {-1} or rank in shown)
    )


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message} (resilient-run --worker_num 1 --help lists all flags)")


def _parser() -> argparse.ArgumentParser:
    description = (
        "Starts a MindSpore job on this node like msrun (same flags), and keeps it going: a rank that is killed is "
        "replaced alone, the others keep their state."
    )
    parser = argparse.ArgumentParser(prog="resilient-run", description=description, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign] # argparse's own prints the usage, a screen of it
    for name, options in _FLAGS.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", metavar="VALUE", **options)
    for name in _REFUSED:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser
