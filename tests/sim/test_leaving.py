"""A job that gives up, in any order of what can happen: it always ends, and what it saves is one whole state.

Ranks are models: each stands where one may stand when others have died, answers stops by joining, and orders by
capturing. Messages of different ranks overtake one another; ranks die at any moment. The seed replays a failure.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from resilient_train.protocol.commands import Command, EndJob, Send
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import Stage
from resilient_train.protocol.messages import Joined, SaveLast, Started, Stop
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.strategies import ttp

SEEDS = 3000
LAYOUTS = {2: ((0, 1),), 3: ((0, 1, 2),), 4: ((0, 2), (1, 3)), 6: ((0, 2, 4), (1, 3, 5))}


def standings(chance: random.Random, size: int) -> list[Standing]:
    """Where ranks may be at one time: nobody has begun an update that somebody is not READY for."""
    commits = chance.randrange(1, 5)
    begun = chance.random() < 0.5
    early = [Standing(commits, Phase.READY)]
    places = [*early, Standing(commits, Phase.UPDATING), Standing(commits + 1, Phase.APPLIED)]
    places = places if begun else [Standing(commits, Phase.APPLIED), Standing(commits, Phase.COMPUTE), *early]
    return [chance.choice(places) for _ in range(size)]


class Job:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        size = self.chance.choice(sorted(LAYOUTS))
        self.controller = Controller(size, Policy(replace=False))
        for rank in range(size):
            group = next(group for group in LAYOUTS[size] if rank in group)
            self.controller.started(rank, 0, Started(str(group), (), LAYOUTS[size]))
        assert self.controller.job.stage is Stage.RUNNING
        self.standings = standings(self.chance, size)
        self.living = set(range(size))
        self.inbox: dict[int, deque[Stop | SaveLast]] = {rank: deque() for rank in range(size)}
        self.outbox: dict[int, deque[Joined | int]] = {rank: deque() for rank in range(size)}
        self.orders: dict[int, SaveLast] = {}
        """What a rank has captured last."""
        self.told: list[EndJob] = []

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, EndJob):
                self.told.append(command)
            elif isinstance(command, Send) and isinstance(command.message, (Stop, SaveLast)):
                self.inbox[command.rank].append(command.message)

    def kill(self, rank: int) -> None:
        self.living.discard(rank)
        how = self.controller.lost if self.chance.random() < 0.5 else self.exited
        self.carry_out(how(rank, 0, "died", self.standings))

    def exited(self, rank: int, incarnation: int, _reason: str, standings: list[Standing]) -> list[Command]:
        return self.controller.exited(rank, incarnation, self.chance.choice([-9, 1]), standings)

    def receive(self, rank: int) -> None:
        frame = self.inbox[rank].popleft()
        if isinstance(frame, SaveLast):
            if frame.part >= 0:
                self.orders[rank] = frame
                self.outbox[rank].append(frame.generation)
            return
        commits, phase = self.standings[rank]
        holds = phase is not Phase.UPDATING
        self.outbox[rank].append(Joined(frame.generation, commits, int(phase), holds, 0, ()))

    def send(self, rank: int, captured: dict[int, set[int]]) -> None:
        frame = self.outbox[rank].popleft()
        if isinstance(frame, Joined):
            self.carry_out(self.controller.joined(rank, 0, frame))
            return
        savers = ttp.savers(self.controller.job, frame)
        if not savers:
            return
        captured.setdefault(frame, set()).add(rank)
        if captured[frame] == {each for group in savers for each in group}:
            self.check(frame, savers)
            self.carry_out(self.controller.saved_last("saved"))

    def check(self, generation: int, savers: tuple[tuple[int, ...], ...]) -> None:
        """One state, all of it, every part once, and every rank's own state from somebody."""
        orders = {rank: self.orders[rank] for group in savers for rank in group}
        assert {order.generation for order in orders.values()} == {generation}
        assert len({order.commits for order in orders.values()}) == 1
        assert sorted(order.shard for order in orders.values()) == list(range(len(orders)))
        assert {order.shards for order in orders.values()} == {len(orders)}
        for group, members in zip(savers, self.controller.job.replicas.groups, strict=True):
            assert set(group) <= set(members)
            assert [orders[rank].part for rank in group] == list(range(len(group)))
            assert {orders[rank].parts for rank in group} == {len(group)}
        owned = [*orders, *(other for order in orders.values() for other in order.others)]
        assert sorted(owned) == list(range(self.controller.job.world_size))
        for rank, order in orders.items():
            commits, phase = self.standings[rank]
            assert commits == order.commits
            assert phase is not Phase.UPDATING, "its update was cut: what it has is half one state, half another"

    def run(self) -> None:
        size = self.controller.job.world_size
        self.kill(self.chance.randrange(size))
        deaths = self.chance.choice([0, 0, 1, 2])
        captured: dict[int, set[int]] = {}
        while not self.told:
            moves = [(self.receive, rank) for rank in sorted(self.living) if self.inbox[rank]]
            moves += [(lambda r: self.send(r, captured), rank) for rank in range(size) if self.outbox[rank]]
            if deaths and self.living and self.chance.random() < 0.15:
                deaths -= 1
                self.kill(self.chance.choice(sorted(self.living)))
                continue
            assert moves, "nothing can happen any more, and the job has not ended"
            move, rank = self.chance.choice(moves)
            move(rank)
        assert len(self.told) == 1


@pytest.mark.parametrize("block", range(6))
def test_whatever_happens_it_ends_and_saves_one_whole_state(block: int) -> None:
    for seed in range(block * SEEDS // 6, (block + 1) * SEEDS // 6):
        try:
            Job(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
