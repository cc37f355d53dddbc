"""Every interleaving of small jobs under the controller of ``mindio_ttp``."""

from collections import deque

import pytest
from mindio_world import Faults, ViolationError, World

from resilient_train.integrations.mindio.controller import Recoveries

FAULTS = ("kill", "uce", "hcce", "error", "expires", "leaves", "pauses", "stalls")


def explore(world: World, limit: int = 3_000_000) -> tuple[int, int]:
    """Returns how many states and ends there are. Raises ViolationError with a shortest way to it."""
    parents: dict[int, tuple[int, tuple[str, int]] | None] = {world.key(): None}
    before: dict[int, list[int]] = {}
    ends = []
    queue = deque([(world.key(), world)])

    def path(key: int, *more: tuple[str, int]) -> str:
        found = list(more)
        while (step := parents[key]) is not None:
            key = step[0]
            found.insert(0, step[1])
        return "\n".join(f"  rank {rank} {name}" for name, rank in found)

    while queue:
        key, world = queue.popleft()
        moves = world.moves()
        if world.final:
            ends.append(key)
        elif all(name in FAULTS for name, _ in moves):
            raise ViolationError(f"deadlock in {world.controller.stage.name}\n{path(key)}")
        for move in moves:
            new = world.copy()
            try:
                new.step(move)
            except AssertionError as error:
                raise ViolationError(f"{error}\n{path(key, move)}") from error
            following = new.key()
            if move[0] not in FAULTS:
                before.setdefault(following, []).append(key)
            if following not in parents:
                parents[following] = (key, move)
                queue.append((following, new))
        assert len(parents) < limit
    reached, back = set(ends), list(ends)
    while back:
        for key in before.get(back.pop(), ()):
            if key not in reached:
                reached.add(key)
                back.append(key)
    for key in parents:
        if key not in reached:
            raise ViolationError(f"livelock\n{path(key)}")
    return len(parents), len(ends)


@pytest.mark.parametrize(
    ("ranks", "updates", "faults"),
    [
        (2, 2, Faults(kills=1)),
        (2, 2, Faults(uces=1)),
        (2, 2, Faults(hcces=1)),
        (2, 2, Faults(hcces=1, uces=1)),
        (2, 2, Faults(kills=2)),
        (2, 2, Faults(kills=1, uces=1)),
        (2, 2, Faults(errors=1, kills=1)),
        pytest.param(3, 1, Faults(kills=1), marks=pytest.mark.long),
        (2, 2, Faults(kills=1, lates=1)),
        (2, 2, Faults(uces=1, lates=1)),
        (2, 2, Faults(stalls=1)),
        (2, 1, Faults(stalls=1, kills=1)),
        pytest.param(2, 1, Faults(stalls=1, pauses=1), marks=pytest.mark.long),
        pytest.param(2, 2, Faults(leaves=1), marks=pytest.mark.long),
        (2, 1, Faults(leaves=1, kills=1)),
        pytest.param(2, 2, Faults(leaves=1, kills=1), marks=pytest.mark.long),
        pytest.param(2, 2, Faults(leaves=1, hcces=1), marks=pytest.mark.long),
        pytest.param(2, 1, Faults(leaves=1, kills=2), marks=pytest.mark.long),
        pytest.param(2, 1, Faults(leaves=1, uces=1), marks=pytest.mark.long),
        pytest.param(2, 1, Faults(leaves=1, kills=1, lates=1), marks=pytest.mark.long),
        pytest.param(2, 2, Faults(pauses=1), marks=pytest.mark.long),
        (2, 1, Faults(pauses=1, kills=1)),
        (2, 1, Faults(pauses=1, uces=1)),
        (2, 1, Faults(pauses=1, leaves=1)),
    ],
    ids=str,
)
def test_every_interleaving_is_safe_and_ends(ranks: int, updates: int, faults: Faults) -> None:
    states, ends = explore(World(ranks, updates, faults))
    print(f"{states} states, {ends} ends")
    assert states > 300


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("faults", [Faults(kills=1, uces=1), Faults(kills=2), Faults(kills=1, hcces=1)], ids=str)
def test_every_interleaving_of_three_ranks_and_two_faults(faults: Faults) -> None:
    explore(World(3, 1, faults), 10_000_000)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(kills=1),
        Faults(uces=1),
        Faults(hcces=1),
        Faults(leaves=1),
        pytest.param(Faults(hcces=1, leaves=1), marks=pytest.mark.long),
        pytest.param(Faults(stalls=1), marks=pytest.mark.long),
        Faults(errors=1),
    ],
    ids=str,
)
def test_ranks_that_heed_no_refusal(faults: Faults) -> None:
    explore(World(2, 2, faults, heedless=True))


@pytest.mark.parametrize(
    ("ranks", "updates", "faults"),
    [
        (2, 2, Faults(kills=1)),
        (2, 1, Faults(uces=1, hcces=1)),
        (2, 1, Faults(kills=1, uces=1)),
        (2, 1, Faults(kills=1, lates=1)),
        pytest.param(2, 1, Faults(errors=1, kills=1), marks=pytest.mark.long),
        pytest.param(2, 1, Faults(leaves=1, uces=1), marks=pytest.mark.long),
        pytest.param(2, 2, Faults(uces=2), marks=pytest.mark.long),
        pytest.param(2, 2, Faults(kills=2), marks=pytest.mark.long),
        pytest.param(3, 1, Faults(kills=1), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_every_interleaving_with_mindx(ranks: int, updates: int, faults: Faults) -> None:
    """It chooses whatever is offered, the end among others."""
    states, ends = explore(World(ranks, updates, faults, mindx=True))
    print(f"{states} states, {ends} ends")
    assert states > 300


@pytest.mark.parametrize("faults", [Faults(kills=1), Faults(kills=1, hcces=1)], ids=str)
def test_ranks_that_come_back_to_their_first_step_by_themselves(faults: Faults) -> None:
    explore(World(2, 2, faults, by_itself=True))


def test_what_moves_while_it_is_saved_is_saved_again() -> None:
    """The only one that is left is saved in the middle of a step, and updates all the same."""
    explore(World(2, 2, Faults(kills=1), Recoveries(arf=False), heedless=True))


def test_without_arf_a_loss_is_the_end_behind_a_checkpoint() -> None:
    explore(World(2, 2, Faults(kills=1), Recoveries(arf=False)))
