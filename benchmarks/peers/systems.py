"""How each system is started: the commands of a job, with the settings that its own documentation names."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import launcher

from peers.installs import python_of

_HERE = Path(__file__).parent
CHECKPOINT_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Trial:
    """One job that is to be run."""

    model: str
    ranks: int
    folder: Path
    limit_s: int
    """The job's processes end by themselves after this time, whatever happens to the benchmark."""
    venvs: Path

    def script(self, name: str, **options: Any) -> list[str]:
        """A job's script and its arguments."""
        return [str(_HERE / name), self.model, str(self.folder), str(self.limit_s), json.dumps(options)]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One command of a job."""

    command: list[str]
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    serves: bool = False
    """It only serves the others: the job is over when all the rest have ended."""


@dataclasses.dataclass(frozen=True)
class System:
    """One column of the comparison."""

    name: str
    launches: Callable[[Trial], list[Launch]]
    spares: int = 0
    """Processes beyond the ranks that the job is started with, each with a journal."""
    rejoins: bool = True
    """A killed rank comes back or is replaced. If not, a job is started for every fault."""
    one_fault: bool = False
    """Each fault has its own job, since what stood in for the lost rank is not restocked."""
    standby: bool = False
    """The first fault waits for ``standby_ready`` among our events."""


_RESTARTS = 1000
_TORCHRUN_TUNED = ("--monitor-interval=0.01", "--shutdown-timeout=1")


def _torchrun(*flags: str, new_store: bool = True, **options: Any) -> Callable[[Trial], list[Launch]]:
    def launches(trial: Trial) -> list[Launch]:
        command = [*launcher("torchrun", trial.ranks, trial.folder), f"--max-restarts={_RESTARTS}", *flags]
        # Else restarted ranks find the gloo addresses of dead ones in the store (pytorch issue 135712).
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if new_store else {}
        return [Launch(command + trial.script("torchrun_job.py", **options), environ)]

    return launches


def _resilient(standby: int) -> Callable[[Trial], list[Launch]]:
    def launches(trial: Trial) -> list[Launch]:
        command = launcher("resilient-run", trial.ranks, trial.folder / "run")
        command += [f"--max-restarts={_RESTARTS}", f"--standby={standby}"]
        return [Launch(command + trial.script("resilient_job.py"))]

    return launches


def _torchft(
    lighthouse: tuple[str, ...], flags: tuple[str, ...] = (), **options: Any
) -> Callable[[Trial], list[Launch]]:
    def launches(trial: Trial) -> list[Launch]:
        python = python_of("torchft", trial.venvs)
        port, *ports = _free_ports(1 + trial.ranks)
        serve = [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"[::]:{port}", *lighthouse]
        found = [Launch(serve, {"RUST_BACKTRACE": "1"}, serves=True)]
        for group in range(trial.ranks):
            command = [python, "-m", "torch.distributed.run", f"--master_port={ports[group]}", "--nnodes=1"]
            command += ["--nproc_per_node=1", f"--max_restarts={_RESTARTS}", *flags]
            environ = {
                "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": str(trial.ranks),
            }
            found.append(Launch(command + trial.script("torchft_job.py", **options), environ))
        return found

    return launches


def _in_job(*flags: str, **options: Any) -> Callable[[Trial], list[Launch]]:
    def launches(trial: Trial) -> list[Launch]:
        python = python_of("nvrx", trial.venvs)
        command = [str(Path(python).parent / "ft_launcher"), f"--nproc-per-node={trial.ranks}", "--standalone"]
        command += [f"--max-restarts={_RESTARTS}", "--ft-enable-nic-monitor=false", *flags]
        return [Launch(command + trial.script("injob_job.py", checkpoint_every=CHECKPOINT_EVERY, **options))]

    return launches


def _in_process(spares: int = 0, *, hosted: bool = False, **options: Any) -> Callable[[Trial], list[Launch]]:
    """Bare processes: a launcher that ended all ranks when one dies would leave nothing to restart."""

    def launches(trial: Trial) -> list[Launch]:
        python = python_of("nvrx", trial.venvs)
        # The job takes MASTER_PORT + 1 for its own store, the Wrapper takes MASTER_PORT + 2.
        port, store_port = _free_ports(2)
        settings: dict[str, Any] = {"checkpoint_every": CHECKPOINT_EVERY, **options}
        found = []
        if hosted:
            server = [python, str(_HERE / "store_server.py"), str(store_port), str(trial.limit_s)]
            found.append(Launch(server, serves=True))
            settings["store_port"] = store_port
        if spares:
            settings["active"] = trial.ranks
        world = trial.ranks + spares
        for rank in range(world):
            environ = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            found.append(Launch([python, *trial.script("inprocess_job.py", **settings)], environ))
        return found

    return launches


def _free_ports(count: int) -> list[int]:
    """Ports that are well apart, for some jobs take the next two as well. Nobody holds them for the job."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if all(abs(port - other) > 2 for other in found) and port < 65_000:
            found.append(port)
    return found


_IN_PROCESS_TUNED: dict[str, Any] = {
    "group_timeout_s": 2,
    "times_s": {
        "last_call_wait": 0.0,
        # Shorter is not better: with 20 ms for the monitor thread a recovery took 4.5 s instead of 0.9.
        "monitor_thread_interval": 0.25,
        "monitor_process_interval": 0.05,
        "progress_watchdog_interval": 0.25,
        "heartbeat_interval": 0.2,
        "heartbeat_timeout": 4.0,
        "soft_timeout": 2.0,
        "hard_timeout": 3.0,
        "termination_grace_time": 0.2,
        "barrier_timeout": 30.0,
    },
}
_LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000")
_LIGHTHOUSE_TUNED = (
    "--min_replicas=1", "--quorum_tick_ms=20", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000"
)  # fmt: skip
PLAIN = System("plain DDP under torchrun", _torchrun(new_store=False, checkpoint_every=0))
"""Nothing is saved, nothing recovered: what a step costs without any of the others."""
SYSTEMS = {
    "torchrun": System("torchrun", _torchrun(new_store=False, checkpoint_every=CHECKPOINT_EVERY)),
    "torchrun-store": System("torchrun, new store", _torchrun(checkpoint_every=CHECKPOINT_EVERY)),
    "torchrun-tuned": System(
        "torchrun, tuned", _torchrun(*_TORCHRUN_TUNED, checkpoint_every=CHECKPOINT_EVERY, group_timeout_s=2)
    ),
    "torchft": System("torchft", _torchft(_LIGHTHOUSE)),
    "torchft-tuned": System(
        "torchft, tuned", _torchft(_LIGHTHOUSE_TUNED, _TORCHRUN_TUNED, http=True, timeout_s=5, group_timeout_s=2)
    ),
    "inprocess": System("NVRx in-process", _in_process(), rejoins=False, one_fault=True),
    "inprocess-tuned": System(
        "NVRx in-process, tuned", _in_process(hosted=True, **_IN_PROCESS_TUNED), rejoins=False, one_fault=True
    ),
    "inprocess-reserve": System(
        "NVRx in-process, tuned, reserve rank",
        _in_process(1, hosted=True, **_IN_PROCESS_TUNED),
        spares=1,
        one_fault=True,
    ),
    "injob": System("NVRx in-job", _in_job("--ignore-missing-fault-tol-cfg", calculate_after=50)),
    "injob-tuned": System(
        "NVRx in-job, tuned",
        _in_job(
            "--ft-workload-check-interval=0.2",
            "--ft-rank-heartbeat-timeout=2",
            "--ft-initial-rank-heartbeat-timeout=60",
            "--monitor-interval=0.01",
            "--workers-stop-timeout=1",
        ),
    ),
    "resilient-cold": System("resilient_train, cold", _resilient(0)),
    "resilient-standby": System("resilient_train, standby", _resilient(1), standby=True),
}
