"""The functions of ``mindio_ttp``, with MindIO's names, arguments and answers, over one controller and one processor.

``finder.py`` gives them to a script under the names of MindIO's modules. Arguments that belong to what we have not
(TLS, local copies, elastic scaling) are taken, and refused where they would be counted on.
"""

# ruff: noqa: ARG001 - the arguments are MindIO's

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.integrations.mindio import c_api, exception_handler, wire
from resilient_train.integrations.mindio.controller import Effect, Recoveries
from resilient_train.integrations.mindio.frames import Action, OptimizerType, RepairType, ReplicaGroup, ReportState
from resilient_train.integrations.mindio.hub import Hub, HubThread
from resilient_train.integrations.mindio.mindx import ACTIONS, MindX
from resilient_train.integrations.mindio.mindx_controller import MindXController, OrderError
from resilient_train.integrations.mindio.processor import Handler, Processor
from resilient_train.observe.stacks import listen_for_stacks

log = logging.getLogger("resilient_train.mindio")

__all__ = [
    "Action",
    "OptimizerType",
    "RepairType",
    "ReportState",
    "get_mindio_export_version",
    "set_mindio_export_version",
]

_wanted: tuple[int, Recoveries] | None = None
"""Of how many ranks the controller is to be, and what it may do."""
_in_agent = False
"""It is to be in no rank's process: MindX decides about faults, if it has registered that it does."""
_hub: HubThread | None = None
_processor: Processor | None = None
_mindx: dict[str, Callable[..., Any]] = {}
"""What MindX has registered, by its action."""
_framework = ""
"""Who has said that its training loop is the one that is decorated."""


def _own() -> Processor:
    if _processor is None:
        raise RuntimeError("tft_init_processor and tft_start_processor come first")
    return _processor


def _refuse(name: str, value: object) -> None:
    if value:
        raise ConfigError(f"mindio_ttp: {name}={value!r} is not understood by resilient_train; leave it out")


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Says what the controller of this job is to do. Raises ConfigError."""
    global _wanted, _in_agent
    _refuse("enable_local_copy", enable_local_copy)
    _refuse("enable_zit", enable_zit)
    if not -1 <= rank < world_size:
        raise ConfigError(f"mindio_ttp: rank {rank} of {world_size}")
    switches = config.read_switches()
    _in_agent = rank < 0
    arf = bool(enable_arf)
    _wanted = world_size, Recoveries(uce=switches.uce, hcce=switches.hcce, arf=arf, pause=arf or switches.tsp)


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Listens. Raises ConfigError where it can't, or strangers could come."""
    global _hub
    if _wanted is None:
        raise RuntimeError("tft_init_controller comes first")
    if config.is_hosted():
        log.info("mindio_ttp: resilient-run has the controller")
        return
    if enable_tls and (tls_info or not wire.is_loopback(bind_ip)):
        raise ConfigError(
            f"mindio_ttp: there is no TLS here; give enable_tls=False, {wire.VARIABLE}, and a network that nobody reads"
        )
    mindx = None
    if set(_mindx) == set(ACTIONS) and _in_agent:
        mindx = MindX(_mindx, config.mindx_wait_s())
    elif _mindx:
        who = "it has registered less than all" if _in_agent else "the controller is in a rank"
        log.warning("mindio_ttp: MindX is not asked: %s; the controller decides by itself", who)
    _hub = HubThread(Hub(bind_ip, int(port), *_wanted, _secret(), mindx=mindx))


def tft_destroy_controller() -> None:
    """The training is over."""
    global _hub
    if _hub is not None:
        _hub.close()
    _hub = None


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Says which rank this process is."""
    global _processor
    _refuse("enable_local_copy", enable_local_copy)
    _refuse("enable_zit", enable_zit)
    if config.is_hosted():
        _leave_signals_to_the_launcher()
        _write_stacks_when_asked()
    _processor = Processor(rank, world_size, _secret())
    _processor.repairs_devices = enable_uce
    _processor.cleans_before_save = config.cleans_before_save() or bool(_framework)


def _leave_signals_to_the_launcher() -> None:
    """Who ends a job may signal all its processes. ``resilient-run`` hears of it too, and has the state saved first.
    MindIO does so as well.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: log.warning("SIGTERM is left to resilient-run: send it there"))


def _write_stacks_when_asked() -> None:
    """On the signal of the hang watch, also out of native code that does not end. The file stays open."""
    if not (name := config.stacks_path()):
        return
    try:
        listen_for_stacks(Path(name))
    except OSError as error:  # a full disk is no reason not to train
        log.warning("no stacks can be written: %s", error)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Connects to the controller. Raises ControllerLostError."""
    _own().start(master_ip, int(port))
    c_api.connect(_own().mark_updating, tft_end_updating_os)


def tft_destroy_processor() -> None:
    """The training is over. A second call, behind that of the decorator's, does nothing."""
    c_api.disconnect()
    _own().close()


def tft_is_reboot_node() -> bool:
    """Whether this process came in the place of a lost one."""
    return _own().reborn


def tft_get_reboot_type() -> str:
    """How it came."""
    return "arf" if _own().reborn else ""


def set_mindio_export_version(framework_type: str) -> None:
    """The framework whose loop is decorated: handlers get that function's arguments, and no others. Its devices are
    stopped and cleaned before an end-of-life checkpoint. Raises ValueError for one that is not known.
    """
    global _framework
    if framework_type not in ("MindSpeed", "MindSpeed-LLM"):
        raise ValueError(f"{framework_type!r} is neither MindSpeed nor MindSpeed-LLM")
    _framework = framework_type
    if _processor is not None:
        _processor.cleans_before_save = True


def get_mindio_export_version() -> str | None:
    """Which one it is; None: nobody has said so."""
    return _framework or None


def tft_set_step_args(args: Any) -> None:
    """What handlers get as ``args``. Nothing where a framework has said that it decorates its loop."""
    if not _framework:
        _own().set_args(args)


def tft_set_optimizer_replica(rank: int, replica_info: Sequence[Mapping[str, Any]]) -> None:
    """The ranks that hold what this one holds: one entry for each kind of optimizer. Their order is that of numbers."""
    groups = tuple(
        ReplicaGroup(tuple(sorted(each["rank_list"])), int(each["replica_cnt"]), int(each.get("replica_shift", 0)))
        for each in replica_info
    )
    _own().set_replicas(groups)


def tft_set_dp_group_info(rank: int, dp_rank_list: Sequence[int]) -> None:
    """MindIO groups ranks by it where a checkpoint is written; ours goes by the replicas."""


def tft_start_copy_os() -> None:
    """Only with ``enable_local_copy``, which is refused. Raises ConfigError."""
    raise ConfigError("mindio_ttp: tft_start_copy_os: there are no local copies here; leave enable_local_copy out")


def tft_report_load_ckpt_step(step: int) -> None:
    """Only of a repair that loads a checkpoint, which nobody is ordered to make. Raises ConfigError: what was loaded is
    not what the others hold.
    """
    raise ConfigError(
        f"mindio_ttp: tft_report_load_ckpt_step({step}): a repair is never made from a periodic checkpoint here; its "
        "handler takes the state that another rank sends"
    )


def tft_start_updating_os(backup_step: int = -1) -> None:
    """An update begins. RuntimeError where it must not."""
    _own().start_updating()


def tft_end_updating_os(step: int) -> None:
    """Update ``step`` is over. RuntimeError for a number that was there already."""
    if step < 1:
        raise ValueError(f"step {step}: the first update is 1")
    _own().end_updating(step)


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """Says why the training thread has left its loop."""
    _own().report(ReportState(error_type), error_code)


def tft_wait_next_action() -> int:
    """Waits for what becomes of it: ``Action.RETRY.value`` or ``Action.EXIT.value``."""
    return int(_own().wait_next_action().value)


def tft_wait_repair_action() -> int:
    """MindIO's second wait: ``tft_wait_next_action`` has waited for the whole repair already."""
    return int(Action.RETRY.value)


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function: it is called again behind each fault that was repaired. Its positional arguments
    are a list that handlers get as ``args``. When it returns, the controller and the processor are destroyed.
    """
    if not callable(func):
        raise TypeError(f"tft_exception_handler: {func!r} can't be called")
    return exception_handler.handled(func, _own, _destroy)


def _destroy() -> None:
    tft_destroy_processor()
    tft_destroy_controller()


def tft_register_exception_handler(
    fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str] | None = None
) -> None:
    """Words of a RuntimeError, and the ReportState that they mean. Raises ValueError for a state that there is not."""
    exception_handler.register(fault_pattern, fault_type, fault_handle)


def tft_set_update_start_time(*_: object) -> None:
    """Taken: whether memory that was lost held state, clean's answer says, and not the time."""


def tft_set_update_end_time(*_: object) -> None:
    """Likewise."""


def tft_get_repair_step() -> int:
    """Behind which update the training goes on; 0: none."""
    return _own().repair_step


def tft_get_repair_type() -> str:
    """What is being done: dump, retry, recover, or "unknow"."""
    return _own().repair_type


def tft_reset_limit_step() -> None:
    """The training thread may update again."""
    _own().reset_limit()


def tft_pause_train(cur_step: int) -> None:
    """Waits while the ranks are to stand behind that step. RuntimeError when they are stopped."""
    _own().pause(cur_step)


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Whether memory that was found damaged then was not written to by an update in the meantime."""
    if not start_time or not end_time:
        return False
    return max(start_time, end_time) < hbm_error_time or start_time < hbm_error_time < end_time


def _registering(name: str) -> Callable[..., None]:
    def register(func: Handler, ctx: Any = None) -> None:
        if not callable(func):
            raise TypeError(f"{register.__name__}: {func!r} can't be called")
        _own().handlers[name] = (func, ctx)

    register.__name__ = register.__qualname__ = f"tft_register_{name}_handler"
    register.__doc__ = "``func`` is called, with ``ctx`` as its last argument, where the controller wants it."
    return register


tft_register_save_ckpt_handler = _registering("save_ckpt")
tft_register_rename_handler = _registering("rename")
tft_register_exit_handler = _registering("exit")
tft_register_stop_handler = _registering("stop")
tft_register_clean_handler = _registering("clean")
tft_register_rebuild_group_handler = _registering("rebuild_group")
tft_register_repair_handler = _registering("repair")
tft_register_rollback_handler = _registering("rollback")
tft_register_stream_sync_handler = _registering("stream_sync")
tft_register_zit_upgrade_rollback_handler = _registering("zit_upgrade_rollback")
tft_register_zit_upgrade_repair_handler = _registering("zit_upgrade_repair")
tft_register_zit_upgrade_rebuild_handler = _registering("zit_upgrade_rebuild")
tft_register_zit_downgrade_rebuild_handler = _registering("zit_downgrade_rebuild")
tft_register_decrypt_handler = _registering("decrypt")


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """All four before the start of a controller of rank -1, and MindX decides about faults. Returns 0; 1: refused.

    In rank 0 it is MindSpore's stand-in for MindX that registers them: there, as under ``resilient-run``, the
    controller decides by itself.
    """
    if action not in ACTIONS or not callable(func):
        log.error("mindio_ttp: %r can't be registered for %r; there are %s", func, action, ", ".join(ACTIONS))
        return 1
    _mindx[action] = func
    return 0


def _order(order: Callable[[MindXController], list[Effect]]) -> int:
    """Returns 0; 1: it can't be done, and nothing has changed."""
    why = "there is no controller in this process"
    if _hub is not None:
        try:
            _hub.obey(order)
        except OrderError as error:
            why = str(error)
        else:
            return 0
    log.error("mindio_ttp: MindX is refused: %s", why)
    return 1


def tft_notify_controller_stop_train(
    fault_ranks: Mapping[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Training stops, since these ranks (rank -> FaultKind) are faulty; or stands still ("pause") for a time."""
    if stop_type == "stop":
        return _order(lambda job: job.stop_train(fault_ranks))
    if stop_type == "pause":
        return _order(lambda job: job.pause_train(timeout or 0))
    log.error("mindio_ttp: stop_type %r is neither 'stop' nor 'pause'", stop_type)
    return 1


def tft_notify_controller_on_global_rank(fault_ranks: Mapping[int, int], time: int = 1) -> int:
    """These ranks are faulty. ``time``: seconds until a strategy may be chosen."""
    return _order(lambda job: job.on_global_rank(fault_ranks, time))


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """One of those that were reported is chosen; or "continue", behind a pause."""
    return _order(lambda job: job.change_strategy(strategy))


def tft_notify_controller_prepare_action(action: str, fault_ranks: Mapping[int, int] | None = None) -> int:
    """There is no hot switch here."""
    log.error("mindio_ttp: %r can't be prepared: a rank is replaced when it is lost, not before", action)
    return 1


def tft_notify_controller_dump() -> int:
    """The state is saved, and the job ends."""
    return _order(lambda job: job.leave("MindX wants the state to be saved, and the job to end"))


def tft_query_high_availability_switch() -> bool:
    """Whether faults are repaired: there is a controller."""
    return _hub is not None


def _secret() -> bytes:
    return wire.read_secret(config.read_settings().tft_secret_file)
