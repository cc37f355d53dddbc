"""What of MindSpore is bound to Ascend, replaced for the CPU; all else is stock, ``TrainFaultTolerance`` above all.

``replace(comm)`` takes the job's own collectives (``collectives.py``). Each double does what the name says on a device:

    context, get_rank, get_group_size      it is an Ascend device, and the job is data parallel
    ops.AllReduce, TensorReport            the sum of ``tft_g_one_flag``; the mark that an update begins
    _stop_device                           what hangs in a collective raises ForceStopError, and whoever calls one
    clean_tdt_channel                      collectives can be called again
    _repair_device, _get_uce_*             memory that lost data; whether state was in it
    send_recv, reset_params                parameters from one rank to another, by ``copy_`` (``set_data`` would leave
                                           the compiled optimizer on old buffers)
    direct_copy_to_host                    a parameter's value
    the rest                               nothing: queues, semaphores and groups that the CPU has not
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
from collectives import Collectives
from mindspore import Tensor, context, ops
from mindspore.graph.api import jit_class
from mindspore.train import model as train_model
from mindspore.train.callback import _train_fault_tolerance as stock
from mindspore.utils import utils as stock_handler


class _Context:
    """``mindspore.context`` of an Ascend device, data parallel."""

    def __getattr__(self, name: str) -> Any:
        return getattr(context, name)

    def get_context(self, name: str) -> Any:
        return "Ascend" if name == "device_target" else 0 if name == "device_id" else context.get_context(name)

    def get_auto_parallel_context(self, name: str) -> Any:
        return "data_parallel" if name == "parallel_mode" else context.get_auto_parallel_context(name)


class _Ops:
    def __init__(self, comm: Collectives, *, in_graph: bool) -> None:
        self.AllReduce = lambda: _all_reduce(comm, in_graph=in_graph)

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)


def _all_reduce(comm: Collectives, *, in_graph: bool) -> ops.Custom:
    """In graphs as well: the stock optimizer wrapper is compiled with the optimizer."""

    def total(value: np.ndarray) -> np.ndarray:
        summed = value * comm.world_size if in_graph else comm.sum("flag", [value])[0]
        return summed.astype(np.int32)

    return ops.Custom(total, lambda shape: shape, lambda dtype: dtype, func_type="pyfunc")


@jit_class
class _TensorReport:
    """The first of the two in an optimizer says that an update begins, by the library that MindSpore's C++ code opens.

    As there the answer is not looked at.
    """

    def __init__(self) -> None:
        self.mark = ops.Custom(_begins, lambda shape: shape, lambda dtype: dtype, func_type="pyfunc")
        self.ends = False

    def add_prim_attr(self, name: str, _: object) -> None:
        self.ends = self.ends or name == "optimizer_end"

    def __call__(self, _: str, value: Tensor) -> Tensor:
        return value if self.ends else self.mark(value)


def _begins(value: np.ndarray) -> np.ndarray:
    import mindio_ttp

    folder = mindio_ttp.__path__[0]
    ctypes.CDLL(f"{folder}/framework_ttp/libttp_framework.so")
    ctypes.CDLL(f"{folder}/mindspore_api/libttp_c_api.so").MindioTtpSetOptimStatusUpdating(ctypes.c_int64(-1))
    return value


def replace(comm: Collectives, *, in_graph: bool = False) -> None:
    """From here on a script's callback works on this machine. ``in_graph``: behind the gradients' sum
    nothing of a step may fail there, so the flag says what it would be if all are there.
    """

    def nothing(*_: object) -> None:
        pass

    def send_recv(parameters: list, source: int, target: int) -> int:
        if comm.rank == source:
            comm.send(target, [each.asnumpy() for each in parameters])
        else:
            for parameter, value in zip(parameters, comm.receive(source), strict=True):
                parameter.copy_(Tensor(value))
        return 0

    def reset_params(parameters: list) -> int:
        for each in parameters:
            each.copy_(ops.zeros_like(each))
        return 0

    for module in (stock, stock_handler):
        module.context = _Context()
    stock.get_rank, stock.get_group_size = lambda: comm.rank, lambda: comm.world_size
    stock.ops, stock.TensorReport = _Ops(comm, in_graph=in_graph), _TensorReport
    stock._stop_device = lambda _: comm.abort()
    stock.clean_tdt_channel = comm.resume
    stock._get_uce_process_strategy = lambda: comm.uce
    stock.send_recv, stock.reset_params = send_recv, reset_params
    stock.direct_copy_to_host = lambda parameter: parameter.asnumpy().reshape(-1)[0]
    manager = SimpleNamespace(resume_hccl_comm=nothing)
    stock.CollectiveManager = SimpleNamespace(get_instance=lambda: manager)
    idle = ("_repair_device", "_tft_sem_enable", "_tft_sem_post", "_get_uce_mem_info")
    idle += (
        "_reset_opt_event_info",
        "_finalize_comm",
        "_rebuild_group",
        "_pre_launch_send_recv",
        "_reset_snapshot_state",
    )
    for name in idle:
        setattr(stock, name, nothing)
    for name in ("clean_tdt_channel", "_reset_error_state"):
        setattr(train_model, name, nothing)
