"""What a rank holds of a model that ``fully_shard`` has divided, and what a cut pass leaves of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch import nn  # noqa: E402
from torch.distributed._composable.replicate_with_fsdp import replicate  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from resilient_train.errors import ConfigError, LayoutError, StateError  # noqa: E402
from resilient_train.frameworks.accelerator import Host  # noqa: E402
from resilient_train.frameworks.roles import Damage, Objects, SavedTree, SaveShare  # noqa: E402
from resilient_train.frameworks.torch.gradients import TorchGradients  # noqa: E402
from resilient_train.frameworks.torch.rank_state import TorchRankState  # noqa: E402
from resilient_train.frameworks.torch.sharding.sharded import Sharding, placed_like  # noqa: E402
from resilient_train.frameworks.torch.state import TorchState  # noqa: E402
from resilient_train.frameworks.torch.tensors.leaves import TENSORS, local, pack, version_of  # noqa: E402
from resilient_train.state.checkpoint.restore_from_memory import _lacking  # noqa: E402
from resilient_train.state.sharding import Piece  # noqa: E402
from resilient_train.state.transfer import Span, view  # noqa: E402
from resilient_train.state.tree import Slot, flatten, unflatten  # noqa: E402

pytestmark = pytest.mark.torch
NAMES = ("replicate", "shard")
KINDS = ("weight", "bias")


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """As if this were the first of four; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def net(mesh: DeviceMesh, *, parts: bool = True) -> Any:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    for part in model if parts else ():
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def clipping(model: Any, norm_type: float) -> tuple[int, float]:
    """How many collectives it takes, and a gradient behind it."""
    for number, parameter in enumerate(model.parameters()):
        whole = torch.full(parameter.shape, 3.0 + number)
        parameter.grad = DTensor.from_local(
            torch.zeros_like(local(parameter)), parameter.device_mesh, parameter.placements
        )
        local(parameter.grad).copy_(whole.flatten()[: local(parameter).numel()].view_as(local(parameter)))
    with CommDebugMode() as counted:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type)
    return counted.get_total_counts(), float(local(next(model.parameters()).grad).flatten()[0])


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_norm_that_is_looked_at_costs_no_collective(norm_type: float) -> None:
    """Clipping makes it whole, if it is not yet; what is seen is that value."""
    model, seen = net(hsdp()), []
    plain = clipping(model, norm_type)
    assert plain[0] > 0
    watched = TorchGradients(Objects((model,), ()))
    watched.watch(seen.append)
    try:
        with CommDebugMode() as counted:
            assert clipping(model, norm_type) == plain
            assert float(seen[0]) > 1.0
        assert counted.get_total_counts() == plain[0], "nor does the look itself"
    finally:
        watched.close()


def are(found: Iterable[Any], expected: Iterable[Any]) -> bool:
    """Whether these are the same objects."""
    return [*map(id, found)] == [*map(id, expected)]


def hsdp() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)


@pytest.mark.parametrize(
    ("ranks", "names", "expected"),
    [
        ([[0, 1], [2, 3]], NAMES, ((0, 2), (1, 3))),
        ([[0, 2], [1, 3]], NAMES, ((0, 1), (2, 3))),
        ([[2, 3], [0, 1]], NAMES, ((0, 2), (1, 3))),
        ([[0, 1, 2, 3]], NAMES, ((0,), (1,), (2,), (3,))),
        ([0, 1, 2, 3], NAMES[1:], ((0,), (1,), (2,), (3,))),
        ([[0], [1], [2], [3]], NAMES, ((0, 1, 2, 3),)),
    ],
)
def test_the_mesh_says_who_holds_the_same(four_ranks: None, ranks: list[Any], names: Any, expected: Any) -> None:
    model = net(DeviceMesh("cpu", ranks, mesh_dim_names=names))
    assert Sharding((model,)).replicas() == expected


def test_plain_models_have_none(four_ranks: None) -> None:
    sharding = Sharding((nn.Linear(2, 2),))
    assert not sharding
    assert sharding.replicas() == ()
    sharding.reset()


def test_what_can_not_be_told_is_refused(four_ranks: None) -> None:
    half = net(DeviceMesh("cpu", [0, 1], mesh_dim_names=NAMES[1:]))
    with pytest.raises(ConfigError, match="a mesh that is not made for all ranks"):
        Sharding((half,)).replicas()
    crossed = net(DeviceMesh("cpu", [[3, 0], [1, 2]], mesh_dim_names=NAMES))  # its copies differ, without us as well
    with pytest.raises(ConfigError, match=r"a mesh whose ranks do not ascend \(\[\[3, 0\], \[1, 2\]\]\)"):
        Sharding((crossed,)).replicas()
    with pytest.raises(ConfigError, match=r"'0\.weight' is not sharded, and others"):
        Sharding((net(hsdp()), nn.Sequential(nn.Linear(2, 2)))).replicas()


def test_who_holds_the_same_of_everything(four_ranks: None) -> None:
    """Of tensors that are divided in different ways; a dimension that is not in a mesh is no reason to be alike."""
    whole = hsdp()
    names = whole.mesh_dim_names
    assert names is not None
    across, along = whole[names[0]], whole[names[1]]
    assert Sharding((net(whole), net(init_device_mesh("cpu", (4,))))).replicas() == ((0,), (1,), (2,), (3,))
    assert Sharding((net(across),)).replicas() == ((0,), (1,), (2,), (3,))
    assert Sharding((replicate(nn.Linear(6, 4), mesh=across),)).replicas() == ((0, 2), (1, 3))
    blocks = parallelize_module(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), along, {"0": ColwiseParallel()})
    assert Sharding((blocks,)).replicas() == ((0,), (1,), (2,), (3,)), "nobody says who averages their gradients"
    assert Sharding((replicate(blocks, mesh=across),)).replicas() == ((0, 2), (1, 3))


def test_a_part_is_saved_once_under_its_own_name(four_ranks: None) -> None:
    """What other groups hold too they save beside it."""
    whole = hsdp()
    names = whole.mesh_dim_names
    assert names is not None
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = replicate(parallelize_module(model, whole[names[1]], plan), mesh=whole[names[0]])
    state = TorchState(Objects((model,), ()), TorchRankState((model,), {}), Host())
    assert state.replicas(()) == ((0, 2), (1, 3))
    with pytest.raises(ConfigError, match=r"replicas=\(\(0, 1\), \(2, 3\)\), but by the model's meshes"):
        state.replicas(((0, 1), (2, 3)))
    share = SaveShare(0, 1, 0, 4)
    assert state.image(0, share).names[:4] == tuple(f"model.0.{at}.{what}" for at in (0, 1) for what in KINDS)
    plain = nn.Linear(2, 2)
    beside = TorchState(Objects((plain,), ()), TorchRankState((plain,), {}), Host())
    assert beside.replicas(((1, 2), (0, 3))) == ((1, 2), (0, 3))
    assert beside.image(0, share).names == ("model.0.weight@1", "model.0.bias@1")
    assert beside.replicas(()) == ()
    assert beside.image(0, share).names == ("model.0.weight", "model.0.bias")


def test_what_is_beside_a_parameter_of_one_number_stays_what_it_was(four_ranks: None) -> None:
    """A count of steps has its shape."""
    names = hsdp().mesh_dim_names
    assert names is not None
    mesh = hsdp()[names[1]]
    model = nn.Module()
    model.scale = nn.Parameter(DTensor.from_local(torch.tensor(2.0), mesh, (Replicate(),), run_check=False))
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, (Shard(0),), run_check=False))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TorchState(Objects((model,), (optimizer,)), TorchRankState((model,), {}), Host())
    image = state.image(1, SaveShare(0, 1, 0, 4))
    state.load(lambda _: [SavedTree(image.tree, image.names)], lambda *_: None)
    for parameter in model.parameters():
        held = optimizer.state[parameter]
        assert {name: isinstance(each, DTensor) for name, each in held.items()} == {
            "step": False,
            "exp_avg": True,
            "exp_avg_sq": True,
        }


def test_how_it_is_divided_is_one_word_for_all_ranks(four_ranks: None) -> None:
    """Replicas more or less change nothing of it."""
    names = hsdp().mesh_dim_names
    assert names is not None

    def of(*models: Any) -> str:
        return Sharding(models).division

    shard = hsdp()[names[1]]
    tp = parallelize_module(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), shard, {"1": RowwiseParallel()})
    assert of(nn.Linear(2, 2)) == of(replicate(nn.Linear(2, 2), mesh=hsdp()[names[0]])) == ""
    divided = of(net(hsdp()))
    assert divided == of(net(shard)) != ""
    turned = of(net(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NAMES)))
    assert len({divided, of(net(init_device_mesh("cpu", (4,)))), of(tp), turned}) == 4


def test_a_backward_pass_that_is_cut_leaves_nothing(four_ranks: None) -> None:
    """``reset_iter_state`` leaves the gradients of whole tensors, to which the next pass would add."""
    model = net(hsdp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(Objects((model,), (optimizer,)), TorchRankState((model,), {}), Host())
    parameters = [*model.parameters()]

    def cut(*_: object) -> None:
        raise KeyError("cut")

    hook = model[1].register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(cut) and None)
    with pytest.raises(KeyError):
        model(torch.ones(3, 6)).sum().backward()
    hook.remove()
    whole = [each._unsharded_param for group in state.sharding._groups for each in group.fsdp_params]
    whole[0].grad = torch.ones_like(whole[0])
    assert are(state.tree()["model"][0].values(), parameters), "told as held, whatever lies in their places"
    state.cut()
    assert are(model.parameters(), parameters)
    assert all(each.grad is None for each in whole)
    model(torch.ones(3, 6)).sum().backward()
    assert all(isinstance(each.grad, DTensor) for each in parameters)


def test_only_the_parts_that_were_hit_come_from_a_replica(four_ranks: None) -> None:
    """Into new memory, of which ``fully_shard`` must know: it gathers out of it. This rank has 8 of 12 numbers."""

    def trained() -> TorchState:
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(6, 3)), mesh=hsdp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return TorchState(Objects((model,), (optimizer,)), TorchRankState((model,), {}), Host())

    def fetch(spans: list[Span]) -> None:
        for span, source in zip(spans, sources.spans, strict=True):
            if span.size:
                view(span)[:] = view(source)

    mine, theirs = trained(), trained()
    sources, before = theirs.sources(), mine.tensors()
    hit: list[Any] = [("model", 0, "0.weight"), ("optimizer", 0, 0, "exp_avg")]
    addresses = {path: local(tensor).data_ptr() for path, tensor in before.items()}
    for path in hit:
        local(before[path]).fill_(float("nan"))
    size = mine.mend(sources.manifest, fetch, sources.digest, Damage(frozenset(hit), (), 0))
    assert size == sum(local(before[path]).nbytes for path in hit)
    assert mine.sources().digest == sources.digest
    after = mine.tensors()
    assert are(after.values(), before.values())
    moved = {path for path, tensor in after.items() if local(tensor).data_ptr() != addresses[path]}
    assert moved == {*hit}
    for group in mine.sharding._groups:
        for parameter in group.fsdp_params:
            assert parameter._sharded_param_data.data_ptr() == local(parameter.sharded_param).data_ptr()
            assert not parameter._sharded_param_data.isnan().any()


def test_a_gather_that_was_cut_is_not_waited_for(four_ranks: None) -> None:
    """With ``set_unshard_async_op`` one may be under way; ``reset_iter_state`` waits for it."""

    class Cut(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            raise RuntimeError("a peer of process group '1' has hung up")

    model = net(hsdp())
    model._set_unshard_async_op(True)
    model(torch.ones(3, 6)).sum().backward()
    model[0].unshard(async_op=True)
    (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
    group._all_gather_result = group._all_gather_result._replace(all_gather_work=Cut())
    with pytest.raises(RuntimeError, match="hung up"):
        model.reset_iter_state()
    Sharding((model,)).reset()
    assert group._all_gather_result is None
    assert isinstance(next(iter(model[0].parameters())), DTensor)
    model(torch.ones(3, 6)).sum().backward()


def test_a_gather_that_was_cut_in_front_of_the_first_pass_is_made_again(four_ranks: None) -> None:
    """The module does not know yet whose it is, and does not come to know it where its forward never runs."""
    model = net(hsdp())
    model[0].unshard(async_op=True)
    (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
    assert group._all_gather_result is not None
    Sharding((model,)).reset()
    assert group._all_gather_result is None
    with CommDebugMode() as calls:
        model[0].unshard(async_op=True).wait()
    assert calls.get_total_counts() == 1
    assert not isinstance(next(iter(model[0].parameters())), DTensor)


def test_whole_parameters_that_an_update_has_passed_by_are_told(
    four_ranks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch alone computes the next step with them; here they are gathered anew, and that is not torch's result."""
    model = net(hsdp(), parts=False)
    sharding = Sharding((model,))
    cases = [("", True, 0), ("evaluates, reshards", True, 0), ("evaluates", False, 0), ("evaluates behind", True, 0)]
    for what, trains, told in [*cases, ("evaluates", True, 1), ("evaluates", True, 0)]:
        model(torch.ones(3, 6)).sum().backward()
        if what.startswith("evaluates") and "behind" not in what:
            with torch.no_grad():
                model(torch.ones(3, 6))
        if "reshards" in what:
            model.reshard()
        written = {id(each.sharded_param) for each in sharding._groups[0].fsdp_params} if trains else set()
        sharding.optimizer_wrote()
        if "behind" in what:  # with undo=True the update is over where the body is
            with torch.no_grad():
                model(torch.ones(3, 6))
        sharding.updated(lambda: written)  # noqa: B023 - called at once
        sharding.reshard()
        assert capsys.readouterr().err.count("parameters of fully_shard were whole when the optimizer wrote") == told
    with torch.no_grad():
        model(torch.ones(3, 6))
    Sharding((model,)).reshard()
    assert not capsys.readouterr().err, "an evaluation behind the update"


def test_what_an_optimizer_has_placed_in_its_own_way_is_refused(four_ranks: None) -> None:
    """A new process would make it like the parameter."""
    model = net(hsdp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(Objects((model,), (optimizer,)), TorchRankState((model,), {}), Host())
    weight = next(iter(model.parameters()))
    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    state.check()
    assert not state.outgrown()
    mesh: Any = weight.device_mesh
    # Not by redistribute(): torch keeps what it knows of an equal mesh of another test, whose groups are gone.
    other = DTensor.from_local(torch.zeros(weight.shape), mesh, [Replicate()] * 2, run_check=False)
    optimizer.state[weight]["momentum_buffer"] = other
    with pytest.raises(StateError, match="'momentum_buffer' as a DTensor that is not placed as its parameter"):
        state.check()
    assert "'momentum_buffer'" in state.outgrown()
    with pytest.raises(StateError, match="'momentum_buffer'"):
        state.sources()
    with pytest.raises(LayoutError, match="'momentum_buffer'"):
        state.image(1, SaveShare(0, 1, 0, 4))


def test_behind_an_evaluation_the_parts_are_in_their_places(four_ranks: None) -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(6, 2)), mesh=hsdp())
    sharding, parameters = Sharding((model,)), [*model.parameters()]
    with torch.no_grad():
        model(torch.ones(3, 6))
    assert not are(model.parameters(), parameters)
    assert are(sharding.divided(dict(model.named_parameters())).values(), parameters)
    sharding.reshard()
    assert are(model.parameters(), parameters)


def test_a_tensor_beside_a_parameter(four_ranks: None) -> None:
    weight = next(iter(net(hsdp()).parameters()))
    memory = torch.full_like(local(weight), 7.0)
    made = placed_like(weight, memory)
    assert (tuple(made.shape), made.placements) == (tuple(weight.shape), weight.placements)
    assert local(made).data_ptr() == memory.data_ptr()
    before = version_of(made)
    memory.add_(1)
    assert version_of(made) > before


def test_a_tree_tells_what_is_divided(four_ranks: None) -> None:
    weight = next(iter(net(hsdp()).parameters()))
    payload, _ = flatten({"w": weight, "step": torch.tensor(3)}, TENSORS)
    slots: list[Slot] = []
    unflatten(payload, TENSORS, lambda _, slot: slots.append(slot))
    assert [(slot.shape, slot.divided) for slot in slots] == [((8, 6), True), ((), False)]
    with pytest.raises(StateError, match="is a DTensor, which is no rank's own"):
        pack({"w": weight})


def test_divided_state_of_the_users_is_refused(four_ranks: None) -> None:
    class Average:
        def __init__(self, model: nn.Module) -> None:
            self.held = [each.detach().clone() for each in model.parameters()]

        def state_dict(self) -> dict[str, Any]:
            return dict(enumerate(self.held))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.held = [*state.values()]

    model = net(hsdp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(
        Objects((model,), (optimizer,), extra={"ema": Average(model)}), TorchRankState((model,), {}), Host()
    )
    with pytest.raises(StateError, match=r"'extra.ema.0' is a DTensor: .* only parameters"):
        state.check()


def test_images_need_hold_only_what_is_wanted() -> None:
    """Of a divided tensor the images of a replica group hold its part."""
    wanted = Piece("w", "F32", (3, 2), (9, 2), (3, 0))
    parts = [Piece("w", "F32", (2, 2), (9, 2), (3, 0)), Piece("w", "F32", (1, 2), (9, 2), (5, 0))]
    assert _lacking(wanted, parts) == ""
    assert "cover" in _lacking(wanted, parts[:1]) or _lacking(wanted, parts[:1])
    assert _lacking(wanted, [*parts, parts[1]])
