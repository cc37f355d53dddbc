"""What a Session refuses to take: it would come back from a fault as something else, and nothing would say so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from resilient_train.errors import ConfigError, StateError  # noqa: E402
from resilient_train.frameworks.accelerator import Host  # noqa: E402
from resilient_train.frameworks.roles import Engine, Objects  # noqa: E402
from resilient_train.frameworks.torch.checks.admission import without_optimizer  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402
from resilient_train.frameworks.torch.rank_state import TorchRankState  # noqa: E402
from resilient_train.frameworks.torch.state import TorchState  # noqa: E402
from resilient_train.frameworks.torch.tensors.leaves import span_of  # noqa: E402

pytestmark = pytest.mark.torch


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def take(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Engine:
    return engine_for(Objects((model,), optimizers))


class Lookahead(torch.optim.Optimizer):
    """As such wrappers are written: the groups are the inner one's, the state is not."""

    def __init__(self, inner: torch.optim.Optimizer, *, in_list: bool = False, shares: bool = False) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = [inner] if in_list else inner
        self.param_groups = inner.param_groups
        self.state = inner.state if shares else defaultdict(dict)

    def step(self, closure=None):
        return None


class Unhooked(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)

    @property
    def state(self):
        return self.inner.state

    @property
    def param_groups(self):
        return self.inner.param_groups


class Counting(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "count": 3}


class Plain(torch.optim.AdamW):
    """A subclass like many: it wraps nothing."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=1e-3)
        self.note = {"words": ["of", "my", "own"]}


TAKEN = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "lbfgs": torch.optim.LBFGS,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]),
    "plain": Plain,
    "shares": lambda p: Lookahead(torch.optim.SGD(p, lr=0.1), shares=True),
}


@pytest.mark.parametrize("name", TAKEN)
def test_optimizers_that_show_their_state_are_taken(name: str) -> None:
    model = net()
    take(model, TAKEN[name](list(model.parameters())))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Lookahead(torch.optim.SGD(p, lr=0.1)), r"Lookahead wraps an optimizer \(SGD\)"),
        (lambda p: Lookahead(torch.optim.SGD(p, lr=0.1), in_list=True), r"Lookahead wraps an optimizer \(SGD\)"),
        (lambda p: Unhooked(torch.optim.SGD(p, lr=0.1)), "does not run the hooks"),
        (lambda p: Counting(p, lr=0.1), "keeps 'count' beside"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(3))], lr=0.1), r"shape \(3,\) \(group 0\)"),
    ],
)
def test_optimizers_that_keep_something_elsewhere_are_refused(make, words: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=words):
        take(model, make(list(model.parameters())))


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class MyZero(ZeroRedundancyOptimizer):
    pass


@pytest.mark.parametrize("kind", [ZeroRedundancyOptimizer, MyZero])
def test_optimizers_that_divide_their_state_are_taken_where_each_rank_has_a_part(fake_world: None, kind: type) -> None:
    model = net()
    take(model, kind(model.parameters(), torch.optim.Adam))
    with pytest.raises(ConfigError, match="over a process group of some of the ranks"):
        take(model, kind(model.parameters(), torch.optim.Adam, process_group=dist.new_group([0, 1])))
    with pytest.raises(ConfigError, match="overlap_with_ddp=True"):
        take(model, kind(model.parameters(), torch.optim.Adam, overlap_with_ddp=True))


def test_what_an_optimizer_within_one_that_divides_keeps_elsewhere_is_refused(fake_world: None) -> None:
    class Beside(torch.optim.Adam):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"beside": 1}

    model = net()
    with pytest.raises(ConfigError, match="Beside keeps 'beside' beside `state`"):
        take(model, ZeroRedundancyOptimizer(model.parameters(), Beside))


def sharded(fill: float) -> DTensor:
    mesh = init_device_mesh("cpu", (4,))
    return DTensor.from_local(torch.full((8, 3), fill), mesh, (Shard(0),), run_check=False)


def test_sparse_buffers_are_refused(fake_world: None) -> None:
    """A graph's matrix, say. Until now they ended the Session with a word of torch's about data pointers."""
    model = net()
    model[0].register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"buffer '0.graph' is a sparse tensor, and nobody would see"):
        take(model)


def test_autocast_around_the_loop_is_refused(fake_world: None) -> None:
    """It keeps the first casts of the weights until it is left. Around a body that is called it is left each time."""
    state = take(net()).state
    with torch.autocast("cpu"):
        with pytest.raises(StateError, match=r"torch.autocast is around the loop: .* put it around the forward pass"):
            state.check()
        state.check(around=False)
        take(net().bfloat16()).state.check()
    with torch.autocast("cpu", cache_enabled=False):
        state.check()
    state.check()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:`torch.jit.script`")
def test_what_can_not_be_put_back_bit_by_bit_is_refused(fake_world: None) -> None:
    """A quantized buffer ended the rank by SIGSEGV, a scripted module the Session with a word of pybind's."""
    model = net()
    model[0].register_buffer("table", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with pytest.raises(ConfigError, match=r"buffer '0.table' is a quantized tensor.* int_repr\(\), scale"):
        take(model)
    model = net()
    model.append(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=f"'{len(model) - 1}' is a module of torch.jit.*: use torch.compile"):
        take(model)


@pytest.mark.parametrize(("kind", "lazy"), [("parameter", nn.LazyLinear), ("buffer", nn.LazyBatchNorm1d)])
def test_lazy_modules_are_run_once_before(fake_world: None, kind: str, lazy: type[nn.Module]) -> None:
    """They ended the Session with a word of torch's about `load_state_dict`."""
    model = net()
    model.append(lazy(3) if kind == "parameter" else lazy(affine=False))
    with pytest.raises(ConfigError, match=f"{kind} '{len(model) - 1}.*' has no shape yet"):
        take(model)
    model.eval()(torch.zeros(2, 4))
    take(model)


def test_extra_state_that_nobody_can_put_back_is_refused(fake_world: None) -> None:
    class Told(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    model = net()
    model[0] = Told(4, 4)
    with pytest.raises(ConfigError, match=r"'0' has get_extra_state\(\) and no set_extra_state"):
        take(model)


@pytest.mark.shows("TP within DDP", "all", "refused")
def test_what_is_sharded_in_other_ways_is_refused(fake_world: None) -> None:
    with_buffer, wrapped, localized = net(), net(), net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(localized, mesh["tp"], {"0": ColwiseParallel()})
    _pre_dp_module_transform(localized)  # as DistributedDataParallel does
    with pytest.raises(ConfigError, match=r"'0.weight' is this rank's part of a DTensor, which Distri.* use fully_sh"):
        take(localized)
    with_buffer[0].register_buffer("table", sharded(1.0))
    with pytest.raises(ConfigError, match=r"buffer '0.table' is a DTensor"):
        take(with_buffer)
    fully_shard(wrapped[0], mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ConfigError, match=r"parameter '1.weight' is not sharded, and others"):
        take(wrapped).state.replicas(())


@pytest.mark.shows("FSDP1", "all", "refused")
def test_the_older_wrapper_is_refused(fake_world: None) -> None:
    wrapper = type("FullyShardedDataParallel", (nn.Linear,), {"__module__": "torch.distributed.fsdp"})
    with pytest.raises(ConfigError, match=r"is wrapped by FullyShardedDataParallel.*use fully_shard"):
        take(wrapper(2, 2))


@pytest.mark.parametrize("kind", ["PowerSGDState", "PostLocalSGDState", "Other"])
def test_a_communication_hook_whose_state_goes_on_is_refused(fake_world: None, kind: str) -> None:
    wrapper = nn.Linear(2, 2)
    state = type(kind, (), {"__module__": "torch.distributed.algorithms.ddp_comm_hooks.some_hook"})()
    wrapper._comm_hooks = [(print, None), (print, state)]
    refused = pytest.raises(ConfigError, match=f"has a communication hook with a {kind}")
    with nullcontext() if kind == "Other" else refused:
        take(wrapper)


@pytest.mark.parametrize("within", ["its own", "in an attribute", "in a closure", "in a partial", "its method"])
def test_a_late_hook_is_refused_when_the_loop_begins(fake_world: None, within: str) -> None:
    wrapper = nn.Linear(2, 2)
    state = TorchState(Objects((wrapper,), ()), TorchRankState((wrapper,), {}), Host())
    state.check()
    kind = type("PowerSGDState", (), {"run": lambda *_: None, "__module__": "torch.distributed.algorithms.some_hook"})
    power: Any = kind()
    wrapper._comm_hooks = [
        {
            "its own": (print, power),
            "in an attribute": (print, SimpleNamespace(inner=power)),
            "in a closure": (lambda _, bucket: (power, bucket), None),
            "in a partial": (partial(print, power), None),
            "its method": (power.run, None),
        }[within]
    ]
    with pytest.raises(StateError, match="has a communication hook with a "):
        state.check()


def test_torchs_hook_in_cpp_is_refused_when_the_loop_begins(fake_world: None) -> None:
    for kind, refused in (
        ("ALLREDUCE", nullcontext()),
        ("FP16_COMPRESS", pytest.raises(StateError, match="built-in FP")),
    ):
        wrapper: Any = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        wrapper._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        with refused:
            TorchState(Objects((wrapper,), ()), TorchRankState((wrapper,), {}), Host()).check()


def test_a_hook_that_names_what_is_not_there_yet_is_taken(fake_world: None) -> None:
    def hook(_: object, bucket: object) -> object:
        return later, bucket

    wrapper = nn.Linear(2, 2)
    wrapper._comm_hooks = [(hook, None)]
    take(wrapper)
    later = None


def test_a_model_with_nothing_in_it_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match="buffer 'table' is on the meta device"):
        take(model)


def test_a_digest_is_of_the_memory_behind_a_sharded_tensor(fake_world: None) -> None:
    """``data_ptr()`` of a DTensor is 0: digests of models that held any were all the same."""

    def build(fill: float) -> nn.Module:
        torch.manual_seed(0)
        model = net()
        model[1].weight = nn.Parameter(sharded(fill))
        return model

    first, other, same = build(1.0), build(2.0), build(1.0)
    assert first[1].weight.data_ptr() == 0
    states = [TorchState(Objects((each,), ()), TorchRankState((), {}), Host()) for each in (first, other, same)]
    digests = [state.fingerprint().digest() for state in states]
    assert digests[0] == digests[2] != digests[1]
    assert states[0].sources().digest == states[2].sources().digest != states[1].sources().digest


def test_a_tensor_without_memory_is_an_error_wherever_it_is_looked_at(fake_world: None) -> None:
    with pytest.raises(StateError, match=r"DTensor of shape \(32, 3\) has no memory of its own"):
        span_of(sharded(1.0))
    assert span_of(torch.empty(0)).size == 0


def test_an_average_needs_no_optimizer() -> None:
    """torch's own says of its parameters that they are trained."""
    model = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    assert without_optimizer(Objects((model, average), (optimizer,))) == ["bias"]
