"""DistributedDataParallel's buckets after a recovery.

DDP reduces gradients in buckets, and after its first backward passes lays them out anew, in the order in which the
gradients became ready. With three or more ranks the layout decides the order of additions, hence the bits; and ranks
whose layouts differ can't reduce at all. A DDP object made by a replacement, or one whose backward was cut, must
therefore get the layout that the job has. Backward passes over a function that is zero everywhere, whose gradients
become ready in the recorded order, do that without touching the user's code, and then the buckets are laid out as they
had been.

Which pass decides: the first that reduces. With ``static_graph`` the first pass of all only counts how often each
gradient is written, and reduces when it is over; the second one decides. A model with ``find_unused_parameters`` keeps
the layout it was made with.

``Reducer`` is private to torch: ``tests/pure/test_torch_private.py`` pins what is used of it for each version.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from resilient_train.errors import ConfigError, TransferError
from resilient_train.frameworks.torch.communication.process_group import alone


class Pass(msgspec.Struct, array_like=True, frozen=True):
    """One backward pass: in which update it was, and the parameters (by DDP's index) as their gradients were written.

    A parameter stands there several times if its gradient was written by several (re-entrant) passes.
    """

    update: int
    written: list[int]


class PassHistory(msgspec.Struct, array_like=True):
    """Of each DDP wrapper the backward passes that decided its buckets, and whether its next forward pass begins with
    rank 0's buffers: not so behind a pass without gradients or in ``no_sync``.
    """

    passes: list[list[Pass]]
    shares_buffers: list[bool]


def wrappers_in(models: tuple[torch.nn.Module, ...]) -> list[DistributedDataParallel]:
    """All DDP wrappers in the models."""
    return [module for model in models for module in model.modules() if isinstance(module, DistributedDataParallel)]


class Buckets:
    """The reducers of a rank, and the backward passes that decided their layout (``passes``, a list per wrapper)."""

    def __init__(self, models: tuple[torch.nn.Module, ...]) -> None:
        self._wrappers = wrappers_in(models)
        self._parameters = [_reduced(wrapper) for wrapper in self._wrappers]
        self.passes: list[list[Pass]] = [[] for _ in self._wrappers]
        self._open: list[list[list[int]]] = [[] for _ in self._wrappers]
        self._hooks: list[Any] = []
        self.known = False
        """All passes that decide are recorded: in nearly every step ``record`` and ``recorded`` have nothing to do."""

    @property
    def shares_buffers(self) -> list[bool]:
        """Of each wrapper, whether its next forward pass begins with rank 0's buffers, by what the last one was."""
        return [wrapper.require_forward_param_sync for wrapper in self._wrappers]

    @shares_buffers.setter
    def shares_buffers(self, values: list[bool]) -> None:
        for wrapper, value in zip(self._wrappers, values, strict=True):
            wrapper.require_forward_param_sync = value

    def record(self) -> None:
        """An update begins: listens to its backward passes, unless all that matters is known. ``recorded`` ends it."""
        if self.known:
            return
        self.forget()
        for wrapper, parameters, passes, heard in zip(
            self._wrappers, self._parameters, self.passes, self._open, strict=True
        ):
            heard.clear()
            if len(passes) < _deciding(wrapper):
                with _as_built(wrapper, parameters):  # a parameter that is frozen takes no hook
                    self._listen(wrapper, parameters, heard, first=not passes)

    def _listen(
        self,
        wrapper: DistributedDataParallel,
        parameters: list[torch.nn.Parameter],
        heard: list[list[int]],
        *,
        first: bool,
    ) -> None:
        def forward_begins(_module: torch.nn.Module, _args: Any) -> None:
            counts = wrapper.static_graph and first and not heard
            if torch.is_grad_enabled() and (wrapper.require_backward_grad_sync or counts):
                heard.append([])

        self._hooks.append(wrapper.register_forward_pre_hook(forward_begins))
        for index, parameter in enumerate(parameters):
            hook = parameter.register_post_accumulate_grad_hook(_note(heard, index))  # type: ignore[no-untyped-call] # torch's
            self._hooks.append(hook)

    def recorded(self, update: int) -> None:
        """``update`` is about to be applied: its backward passes are over."""
        if self.known:
            return
        self.forget()
        for wrapper, passes, heard in zip(self._wrappers, self.passes, self._open, strict=True):
            passes.extend(Pass(update, written) for written in heard if written)
            del passes[_deciding(wrapper) :]
            heard.clear()
        self.known = self._complete()

    def _complete(self) -> bool:
        return all(
            len(passes) == _deciding(wrapper) for wrapper, passes in zip(self._wrappers, self.passes, strict=True)
        )

    def forget(self) -> None:
        """Stops listening."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def layout(self) -> PassHistory:
        """The record, for another process."""
        return PassHistory(self.passes, self.shares_buffers)

    def restore(self, layout: PassHistory | None, commits: int) -> None:
        """Brings every reducer to where an undisturbed one is before update ``commits``. No collective is run.

        ``layout`` is a replica's record, None for a rank that has its own. Raises TransferError.
        """
        self.forget()
        if layout is not None:
            self._take(layout)
        self.passes = [[each for each in of_one if each.update < commits] for of_one in self.passes]
        self.known = self._complete()
        with alone():  # laying out broadcasts the layout
            for wrapper, parameters, of_one in zip(self._wrappers, self._parameters, self.passes, strict=True):
                _restore(wrapper, parameters, of_one)

    def _take(self, history: PassHistory) -> None:
        if len(history.passes) != len(self._wrappers):
            raise TransferError(f"the replica has {len(history.passes)} DDP wrappers, this rank {len(self._wrappers)}")
        self.passes, self.shares_buffers = history.passes, history.shares_buffers


def _restore(wrapper: DistributedDataParallel, parameters: list[torch.nn.Parameter], passes: list[Pass]) -> None:
    with _ending_by_itself(wrapper), _as_built(wrapper, parameters), _without_comm_hooks(wrapper):
        _lay_out(wrapper, parameters, passes)


@contextlib.contextmanager
def _ending_by_itself(wrapper: DistributedDataParallel) -> Iterator[None]:
    """Inside the block a backward pass ends when its last bucket is reduced, as a rehearsal has to. From torch 2.15 on
    the loop may have taken that over (``finalize_backward``); a new reducer hears of it behind the block.
    """
    ddp: Any = wrapper
    if not getattr(ddp, "require_manual_backward_finalization", False):
        yield
        return
    ddp.reducer._reset_state()  # torch refuses to switch in the middle of a pass
    ddp.require_manual_backward_finalization = False
    try:
        yield
    finally:
        ddp.require_manual_backward_finalization = True


@contextlib.contextmanager
def _as_built(wrapper: DistributedDataParallel, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Inside the block those parameters want a gradient that did when the wrapper was made: a reducer is made of these,
    and rehearses with them. The loop may have frozen some since, and a new process's has not yet.
    """
    built = set(map(id, parameters))
    others = [each for each in wrapper.parameters() if each.requires_grad is not (id(each) in built)]
    for each in others:
        each.requires_grad_(not each.requires_grad)
    try:
        yield
    finally:
        for each in others:
            each.requires_grad_(not each.requires_grad)


def _lay_out(wrapper: DistributedDataParallel, parameters: list[torch.nn.Parameter], passes: list[Pass]) -> None:
    wrapper.reducer._reset_state()  # also forgets that it has laid out anew, so a survivor rehearses as well
    if wrapper.static_graph:
        _restore_static(wrapper, parameters, passes)
    elif not passes and wrapper._has_rebuilt_buckets:
        _renew(wrapper)  # in the very update that is redone: its first pass had the first layout
    elif passes and not wrapper.find_unused_parameters:
        order = list(dict.fromkeys(passes[0].written))
        if len(order) == len(parameters):
            _rehearse(wrapper, parameters, [order])


def _restore_static(wrapper: DistributedDataParallel, parameters: list[torch.nn.Parameter], passes: list[Pass]) -> None:
    counted = wrapper._static_graph_delay_allreduce_enqueued
    if not passes:
        if counted:
            _renew(wrapper)
        return
    rounds = _rounds(passes[0].written)
    if not counted:
        _rehearse(wrapper, parameters, rounds, counting=True)
        wrapper._static_graph_delay_allreduce_enqueued = True
    if len(passes) == _deciding(wrapper):
        _rehearse(wrapper, parameters, rounds)


def _rounds(written: list[int]) -> list[list[int]]:
    """``written`` as backward passes in which each parameter comes once; the last has them as they became complete."""
    counts = Counter(written)
    rounds = [[index for index in counts if counts[index] > place] for place in range(1, max(counts.values()))]
    return [*rounds, list(dict.fromkeys(reversed(written)))[::-1]]


def _deciding(wrapper: DistributedDataParallel) -> int:
    """How many backward passes decide about the buckets."""
    return 2 if wrapper.static_graph else 1


def _reduced(wrapper: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that DDP reduces, in its own order: those that wanted a gradient when it was made. The script may
    have frozen some since. Raises ConfigError.
    """
    trained, _ = _for_reducer(wrapper)
    told: Any = wrapper.logger
    if len(trained) == told._get_ddp_logging_data().ints_map["num_parameter_tensors"]:
        return trained
    try:
        # As large as all gradients for a moment: so not where there is no need to ask.
        buckets = wrapper.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # torch can't make zeros for a bucket of sparse gradients
        raise ConfigError(
            "model: parameters were frozen, or set free, behind DistributedDataParallel(...), and which gradients it "
            "averages can't be found out where some are sparse: call requires_grad_() in front of it"
        ) from None
    theirs = {id(each) for bucket in buckets for each in bucket.parameters()}
    return [each for each in wrapper.module.parameters() if id(each) in theirs]


def _note(heard: list[list[int]], index: int) -> Callable[[torch.Tensor], None]:
    def note(_parameter: torch.Tensor) -> None:
        if heard:
            heard[-1].append(index)

    return note


def _renew(wrapper: DistributedDataParallel) -> None:
    """A new reducer for a wrapper whose first passes are taken back: what a static graph counted, and how the buckets
    were laid out, can't be.
    """
    ddp: Any = wrapper  # torch does not type these
    ddp._remove_autograd_hooks()
    parameters, expect_sparse_gradient = _for_reducer(ddp)
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse_gradient, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp.static_graph = False
        ddp._set_static_graph()


@contextlib.contextmanager
def _without_comm_hooks(wrapper: DistributedDataParallel) -> Iterator[None]:
    """Inside the block the reducer is one that has none: a hook may keep state (PowerSGD's error, a count of its
    calls), and the zeros of a rehearsal are no gradients of the user's. torch never takes a hook away, so the reducer
    is a new one.
    """
    ddp: Any = wrapper
    # Built-in hooks (fp16 compression in C++) are not listed by DDP; docs/guarantees names that.
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    if hooks:
        _renew(wrapper)
    try:
        yield
    finally:
        for hook, state in hooks:
            ddp.register_comm_hook(state, hook)


@contextlib.contextmanager
def _without_hooks(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Inside the block nobody but DDP, whose hooks lie elsewhere, is told of gradients: an optimizer that runs in the
    backward pass, say, would write.
    """
    held = [
        hooks
        for parameter in parameters
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if hooks
    ]
    kept = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, those in zip(held, kept, strict=True):
            hooks.update(those)


def _rehearse(
    wrapper: DistributedDataParallel,
    parameters: Sequence[torch.nn.Parameter],
    rounds: list[list[int]],
    *,
    counting: bool = False,
) -> None:
    """One pass of the reducer whose gradients become ready in the order of ``rounds``, then the buckets are laid out.

    autograd runs the node created last first, so the chain is built from the last parameter to the first. It lies on
    the parameters' device: those of another are a thread's of their own, which would take them as it comes to them.
    """
    gradients = [parameter.grad for parameter in parameters]
    reducer: Any = wrapper.reducer
    sparse = _sparse(wrapper)
    with torch.enable_grad(), _without_hooks(parameters):
        _share_gradients([each for each in parameters if id(each) not in sparse])
        for each in parameters:
            if id(each) in sparse:
                each.grad = None
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        for order in rounds:
            total = torch.zeros((), device=parameters[0].device)
            for index in reversed(order):
                each = parameters[index]
                total = _Becomes.apply(total, each, id(each) in sparse)  # type: ignore[no-untyped-call] # torch's
            total.backward()  # type: ignore[no-untyped-call] # torch's
        if counting:
            reducer._delay_all_reduce()
        if reducer._rebuild_buckets():
            wrapper._has_rebuilt_buckets = True
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


class _Becomes(torch.autograd.Function):
    """Hands its first argument on; in the backward pass the gradient of its second, a zero, becomes ready."""

    @staticmethod
    def forward(ctx: Any, before: torch.Tensor, parameter: torch.Tensor, sparse: bool) -> torch.Tensor:
        ctx.parameter = parameter.shape, parameter.dtype, parameter.device
        ctx.sparse = sparse
        return before.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        shape, dtype, device = ctx.parameter
        if ctx.sparse:
            nowhere = torch.empty((1, 0), dtype=torch.int64, device=device)
            nothing = torch.empty((0, *shape[1:]), dtype=dtype, device=device)
            return gradient, torch.sparse_coo_tensor(nowhere, nothing, shape, check_invariants=False), None
        return gradient, torch.zeros((), dtype=dtype, device=device).expand(shape), None


def _sparse(wrapper: DistributedDataParallel) -> set[int]:
    """The parameters, by id, whose gradients are sparse (``torch.nn.Embedding(sparse=True)``)."""
    parameters, sparse = _for_reducer(wrapper)
    return {id(each) for each, is_sparse in zip(parameters, sparse, strict=True) if is_sparse}


def _for_reducer(wrapper: Any) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """The parameters, and whether their gradients are sparse. torch lists the buffers that it makes equal there, too:
    one that was registered behind the wrapper is not among them, unless others were.
    """
    listed = wrapper.modules_buffers, wrapper.named_module_buffers
    found: tuple[list[torch.nn.Parameter], list[bool]] = wrapper._build_params_for_reducer()
    wrapper.modules_buffers, wrapper.named_module_buffers = listed
    return found


def _share_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Gives all parameters one piece of memory for their gradients, into which the zeros of a rehearsal are added.

    Memory of their own would have to be had from the kernel first, page by page: 50 ms for 21 M parameters.
    """
    scratch: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for kind in {(parameter.dtype, parameter.device) for parameter in parameters}:
        of_kind = [p for p in parameters if (p.dtype, p.device) == kind]
        scratch[kind] = torch.zeros(max(p.numel() for p in of_kind), dtype=kind[0], device=kind[1])
    for parameter in parameters:
        held = scratch[parameter.dtype, parameter.device]
        parameter.grad = held.as_strided(parameter.shape, parameter.stride())
