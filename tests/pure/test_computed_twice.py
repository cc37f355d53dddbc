"""Windows that are computed twice: what a rank finds, and what the controller makes of it.

Whole jobs are in ``tests/process/test_flips.py``, all interleavings in ``tests/sim``.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pure.test_controller import of, running
from resilient_train.frameworks.roles import Given
from resilient_train.frameworks.torch.collectives import _digest
from resilient_train.frameworks.torch.tensors import fingerprint
from resilient_train.frameworks.torch.tensors.fingerprint import tensor_digest
from resilient_train.launch.agent.console_text import told
from resilient_train.protocol import rank_effects as do
from resilient_train.protocol.commands import Command, EndJob, Kill, Note, RaiseStop, Send, Spawn
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import EXIT_UNRECOVERABLE, Stage
from resilient_train.protocol.messages import Computed, Joined, Resume, Started
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.session.comparisons.computed_twice import Compared, Verification
from resilient_train.session.driver import Driver
from resilient_train.strategies import rsc
from resilient_train.strategies.base import Fault, Kind


class Computer:
    """The collectives, gradients and state of a rank: they say what they are told to."""

    def __init__(self, every: int, *, undo: bool = False) -> None:
        self.given: Given | None = None
        self.gradients, self.state = "g", "s"
        gradients: Any = SimpleNamespace(digest=lambda: self.gradients)
        state: Any = SimpleNamespace(fingerprint=lambda: SimpleNamespace(digest=lambda: self.state))
        collectives: Any = self
        self.verification = Verification(collectives, gradients, state, every=every, undo=undo)

    def note_into(self, given: Given | None) -> None:
        self.given = given

    def run(self, commits: int, given: str, gradients: str = "g") -> tuple[int, int] | None:
        self.gradients = gradients
        self.verification.begin(commits)
        if self.given is not None:
            self.given.digests += given
        self.compared = self.verification.end()
        return self.compared and self.compared[:2]


def test_every_so_many_updates() -> None:
    rank = Computer(4)
    found = [commits for commits in range(12) if rank.run(commits, "abc") is not None]
    assert found == [3, 7, 11]
    assert [Computer(0).run(commits, "abc") for commits in range(3)] == [None] * 3
    assert Computer(1).run(0, "abc") == (-1, 4)


@pytest.mark.parametrize(
    ("given", "gradients", "found"),
    [
        ("abc", "g", -1),
        ("xbc", "g", 0),
        ("abx", "x", 2),
        ("abc", "x", 3),
        ("ab", "g", 2),
        ("abcd", "g", 3),
    ],
)
def test_where_a_run_is_not_what_it_was(given: str, gradients: str, found: int) -> None:
    rank = Computer(4)
    assert rank.run(3, "abc") == (-1, 4)
    assert rank.run(3, given, gradients) == (found, len(given) + 1)


def test_what_was_there_and_what_is_there_now() -> None:
    rank = Computer(4)
    rank.run(3, "abc")
    assert rank.compared is not None
    none = rank.compared.calls
    assert rank.compared == Compared(-1, 4, calls=none)
    rank.run(3, "axx")
    assert rank.compared == Compared(1, 4, "b", "x", none)
    rank.run(3, "axy")
    assert rank.compared == Compared(2, 4, "x", "y", none), "beside the run that is most like it"
    rank.run(3, "ab")
    assert rank.compared == Compared(2, 3, "c", "g", none)


def test_two_runs_that_are_the_same_are_enough() -> None:
    """A rank that took over another's wrong value in the second run comes to the first one's in the third."""
    rank = Computer(4)
    rank.run(3, "abc")
    assert rank.run(3, "abx") == (2, 4)
    assert rank.run(3, "abc") == (-1, 4)
    assert rank.run(3, "axx") == (1, 4), "the run most like it was the second"
    assert rank.run(7, "xyz") == (-1, 4), "another window"


def test_a_run_that_was_cut_is_none() -> None:
    rank = Computer(4)
    rank.verification.begin(3)
    assert rank.given is not None
    rank.given.digests += "x"
    assert rank.run(3, "abc") == (-1, 4)
    assert rank.run(3, "abc") == (-1, 4)


def test_where_the_update_is_looked_at_behind_it_the_state_shows_it() -> None:
    rank = Computer(1, undo=True)
    rank.run(0, "a")
    rank.state = "other"
    assert rank.run(0, "a", gradients="none left") == (1, 2)


def test_a_comparison_begins_anew_behind_a_recovery_and_not_behind_a_verified_window() -> None:
    for verifies, begun in ((False, [7]), (True, [])):
        found: list[int] = []
        comparison = SimpleNamespace(begin_at=found.append, look=lambda: None)
        order, rank = Resume(1, verifies=verifies), SimpleNamespace(commits=7)
        driver: Any = SimpleNamespace(_comparison=comparison, _order=order, _rank=rank)
        Driver._compare(driver, do.Compare(resumed=True))
        assert found == begun


def test_what_is_given_counts_and_what_is_overwritten_does_not() -> None:
    group: Any = SimpleNamespace(rank=lambda: 1)
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    root = dist.BroadcastOptions()
    root.rootRank = 0
    assert _digest(group, "broadcast", ([ones], root)) == [""], "the root has a place for it as well"
    root.rootRank = 1
    (given,) = _digest(group, "broadcast", ([ones], root))
    assert given == _digest(group, "allreduce", ([ones], None))[0] != _digest(group, "allreduce", ([twos], None))[0]
    assert _digest(group, "_allgather_base", (ones, twos, None)) == _digest(
        group, "_allgather_base", (twos, twos, None)
    )
    assert _digest(group, "allreduce", ([ones.int()], None)) == [], "DDP says so how it has laid out its buckets"
    assert _digest(group, "barrier", (None,)) == []


def test_a_sparse_gradient_has_a_digest() -> None:
    layer = torch.nn.Embedding(9, 2, sparse=True)
    digests = []
    for rows in ([1, 2], [1, 2], [1, 3]):
        layer.weight.grad = None
        layer(torch.tensor(rows)).sum().backward()
        digests.append(tensor_digest(layer.weight.grad))
    assert digests[0] == digests[1] != digests[2]


# -- the controller


def recover(controller: Controller, commits: int = 3) -> list[Resume]:
    job = controller.job
    for rank in range(job.world_size):
        joined = Joined(job.generation, commits, int(Phase.COMPUTE), rank not in job.evidence, 0, ("world",))
        controller.joined(rank, job.incarnations[rank], joined)
    commands: list[Command] = []
    for rank in range(job.world_size):
        commands = controller.done(rank, job.incarnations[rank], job.generation)
    return [each.message for each in commands if isinstance(each, Send) and isinstance(each.message, Resume)]


def compute(
    controller: Controller,
    *differs_at: int,
    commits: int = 3,
    devices: Sequence[str] = ("here 0", "here 1", "here 2", "here 3", "here 4", "here 5"),
    calls: Sequence[str] = ("",) * 6,
    unshared: str = "",
) -> list[Command]:
    """All ranks tell where this run is not what it was."""
    job, commands = controller.job, []
    for rank, at in enumerate(differs_at):
        found: dict[str, Any] = (
            {"digests": ("a", "b"), "batch": f"ba{rank}", "device": devices[rank]} if at >= 0 else {}
        )
        message = Computed(job.generation, commits, commits * 2, at, 4, calls=calls[rank], unshared=unshared, **found)
        commands += controller.computed(rank, job.incarnations[rank], message)
    return commands


def notes(commands: list[Command]) -> dict[str, dict[str, Any]]:
    return {note.kind: note.detail for note in of(commands, Note)}


def test_when_all_have_computed_it_once_they_compute_it_again() -> None:
    controller = running()
    assert compute(controller, -1, -1) == []
    commands = compute(controller, -1, -1, -1)
    assert of(commands, RaiseStop) == [RaiseStop(1)]
    assert notes(commands)["verifying"]["reason"] == "step 6 is computed again, to verify it"
    assert {resume.verified for resume in recover(controller)} == {3}
    assert notes(compute(controller, -1, -1, -1)) == {"verified": {"step": 6, "ranks": []}}
    assert controller.job.computed == {}


def test_one_rank_may_be_a_window_ahead_of_what_is_heard_of_another() -> None:
    controller = running(2)
    compute(controller, -1, -1)
    recover(controller)
    job = controller.job
    for commits in (3, 4):
        assert controller.computed(0, 0, Computed(job.generation, commits, commits, -1, 1)) == []
    commands = controller.computed(1, 0, Computed(job.generation, 3, 3, -1, 1))
    assert notes(commands)["verified"]["ranks"] == []
    commands = controller.computed(1, 0, Computed(job.generation, 4, 4, -1, 1))
    assert "verifying" in notes(commands)


def test_who_came_first_to_something_else_is_given_up() -> None:
    controller = running()
    compute(controller, -1, -1, -1)
    recover(controller)
    commands = compute(controller, 3, 1, 2)
    told = notes(commands)["deviates"]
    assert (told["ranks"], told["digests"]) == ([1], {"1": ["a", "b"]})
    assert (told["batches"], told["devices"]) == ({"1": "ba1"}, {"1": "here 1"})
    assert [kill.rank for kill in of(commands, Kill)] == [1]
    assert (
        "step 6 twice and came to different bits, first in what it gives to collective 2 of 3"
        in of(commands, Kill)[0].reason
    )
    assert not controller.computed(1, 5, Computed(1, 3, 6)), "of nobody who is there"


def test_what_nobody_comes_to_again_is_told_once() -> None:
    """The script hangs a hook on once. What it trained on with was other bits, and nobody said so."""
    controller = running(2)
    for commits in (3, 5):
        compute(controller, -1, -1, commits=commits)
        recover(controller)
        assert "deviates" in notes(compute(controller, 2, 2, commits=commits))
        recover(controller)
        detail = notes(compute(controller, -1, -1, commits=commits))["verified"]
        assert detail == {"step": commits * 2, "ranks": [], **({"everywhere": True} if commits == 3 else {})}
        lines = [*told("verified", 0, 0, detail)]
        assert ["came to other bits on every rank when it was computed again" in each for each in lines] == (
            [True] if commits == 3 else []
        )


def test_ranks_that_make_other_calls_have_no_places_in_common() -> None:
    """Two stages of a pipeline. What the second one has made of a wrong value may stand at an earlier place."""
    controller = running(4, replicas=((0, 1), (2, 3)))
    compute(controller, -1, -1, -1, -1)
    recover(controller)
    calls = ["first", "first", "second", "second"]
    commands = compute(controller, 2, 3, 1, 4, calls=calls)
    (told,) = [note for note in of(commands, Note) if note.kind == "deviates"]
    assert (told.rank, told.detail["ranks"]) == (-1, [0, 2])
    assert "(it, or one of ranks 2, was the first)" in str(told.detail["reason"])
    assert not of(commands, Kill)
    recover(controller)
    assert notes(compute(controller, -1, -1, -1, -1, calls=calls)) == {"verified": {"step": 6, "ranks": []}}


def test_a_stage_that_deviates_alone_is_given_up() -> None:
    controller = running(4, replicas=((0, 1), (2, 3)))
    compute(controller, -1, -1, -1, -1)
    recover(controller)
    commands = compute(controller, -1, -1, 3, 2, calls=["first", "first", "second", "second"])
    assert [kill.rank for kill in of(commands, Kill)] == [3]


def beside(
    *rounds: Sequence[int],
    own: Sequence[int] = (-1, -1, -1),
    agreed: int = 9,
    replicas: tuple[tuple[int, ...], ...] = (),
    calls: Sequence[str] = ("",) * 6,
) -> list[Command]:
    """All compute; then from replicas' inputs, where these are the places at which they differ; then once more."""
    controller = running(len(own), policy=Policy(neighbours=True), replicas=replicas)
    controller.job.neighbours_agreed = agreed
    compute(controller, *(-1 for _ in own), calls=calls)
    for number, differ in enumerate(rounds, start=1):
        assert {(resume.verified, resume.distance) for resume in recover(controller)} == {(3, number)}
        assert not of(compute(controller, *differ, calls=calls), (Kill, EndJob))
    assert {(resume.verified, resume.distance, resume.verifies) for resume in recover(controller)} == {(3, 0, True)}
    commands = compute(controller, *own, calls=calls)
    assert controller.job.neighbours_agreed == (3 if "deviates" not in notes(commands) else agreed)
    return commands


def test_what_replicas_come_to_from_the_same_inputs() -> None:
    assert notes(beside((-1, -1, -1))) == {
        "verified": {"step": 6, "ranks": [], "beside": 1, "agreed": True, "commits": 3}
    }
    commands = beside((-1, 2, -1), (-1, -1, -1))
    assert [kill.rank for kill in of(commands, Kill)] == [1]
    assert notes(commands)["deviates"]["devices"] == {"1": "here 1"}
    commands = beside((0, 0, -1), (-1, 0, 0))
    (end,) = of(commands, EndJob)
    assert end.code == EXIT_UNRECOVERABLE
    assert "rank 1 comes to other bits in step 6 than two of its replicas" in end.reason
    assert end.reason.endswith("since update 9 is in doubt, and not saved: go on from a checkpoint of before")


def test_who_has_a_wrong_value_from_another_part_of_the_model_is_not_named() -> None:
    """Parts 0, 2, 4 and 1, 3, 5, divided between 0 and 1, 2 and 3, 4 and 5: rank 1 gives rank 0 what is wrong."""
    first, second = (2, 1, -1, -1, 2, 1), (2, 1, 2, 1, -1, -1)
    commands = beside(first, second, own=(-1,) * 6, replicas=((0, 2, 4), (1, 3, 5)))
    assert [note.detail["ranks"] for note in of(commands, Note) if note.kind == "deviates"] == [[1]]
    assert [end.code for end in of(commands, EndJob)] == [EXIT_UNRECOVERABLE]


def test_where_stages_differ_from_replicas_nothing_says_which() -> None:
    calls = ("first", "second") * 3
    first, second = (2, 1, -1, -1, 2, 1), (2, 1, 2, 1, -1, -1)
    commands = beside(first, second, own=(-1,) * 6, replicas=((0, 2, 4), (1, 3, 5)), calls=calls)
    assert [note.detail["ranks"] for note in of(commands, Note) if note.kind == "deviates"] == [[0, 1, 2, 3, 4, 5]]
    assert [note.rank for note in of(commands, Note) if note.kind == "deviates"] == [-1]


def test_where_nothing_says_which_replica_is_wrong() -> None:
    for agreed, code in ((-1, 2), (9, EXIT_UNRECOVERABLE)):
        commands = beside((0, 0, 0), (0, 0, 0), agreed=agreed)
        assert [end.code for end in of(commands, EndJob)] == [code]
        assert [note.rank for note in of(commands, Note) if note.kind == "deviates"] == [-1]


def test_what_a_rank_does_not_come_to_twice_is_not_asked_of_others() -> None:
    """Whose first run was wrong differs from all that replicas make of the same."""
    commands = beside((0, -1, -1), (-1, -1, 0), own=(-1, 1, -1))
    assert [kill.rank for kill in of(commands, Kill)] == [1]
    assert [note.detail["ranks"] for note in of(commands, Note) if note.kind == "deviates"] == [[1]]


def test_a_fault_ends_the_rounds() -> None:
    controller = running(policy=Policy(neighbours=True))
    compute(controller, -1, -1, -1)
    recover(controller)
    compute(controller, 0, 0, 0)
    recover(controller)
    controller.failed_collective(controller.job.generation, "a link")
    assert {(resume.verified, resume.distance) for resume in recover(controller)} == {(3, 0)}
    assert notes(compute(controller, -1, -1, -1)) == {"verified": {"step": 6, "ranks": []}}


@pytest.mark.parametrize("rounds", [0, 1])
def test_where_all_start_again_nothing_is_verified_any_more(rounds: int) -> None:
    """New processes have the limits of a start, compare anew, and compute from their own inputs. What replicas had
    agreed on says nothing of what is trained once more.
    """
    controller = running(2, policy=Policy(neighbours=rounds > 0))
    job = controller.job
    job.can_go_back, job.neighbours_agreed = lambda: True, 3
    compute(controller, -1, -1)
    recover(controller)
    assert (job.verifying, job.distance) == (True, rounds)
    controller.lost(0, 0, "died", [Standing(3, Phase.COMPUTE)] * 2)
    controller.lost(1, 0, "died", [Standing(3, Phase.COMPUTE)] * 2)
    assert job.attempt == 1
    for rank in range(2):
        commands = controller.started(rank, job.incarnations[rank], Started("all", ("world",)))
    resumes = [each.message for each in of(commands, Send) if isinstance(each.message, Resume)]
    assert {(each.verified, each.distance, each.verifies) for each in resumes} == {(-1, 0, False)}
    assert (job.verifying, job.rounds, job.neighbours_agreed) == (False, (), 0)


@pytest.mark.parametrize("kind", [Kind.DIFFERS, Kind.LATE_ANOMALY])
def test_a_window_that_was_verified_last_is_forgotten_where_all_go_back(kind: Kind) -> None:
    """Nothing else has begun a recovery since."""
    controller = running(2)
    compute(controller, -1, -1)
    recover(controller)
    assert controller.job.verifying
    rsc.begin(Fault(kind, "it is wrong"), controller.job)
    assert not controller.job.verifying


def test_inputs_that_nobody_else_can_compute_from_are_told_once() -> None:
    controller = running(policy=Policy(neighbours=True))
    for commits in (3, 7):
        commands = compute(controller, -1, -1, -1, commits=commits, unshared="no loader")
        assert ("unshared" in notes(commands)) == (commits == 3)
        assert {resume.distance for resume in recover(controller, commits)} == {0}
        compute(controller, -1, -1, -1, commits=commits)


def test_the_only_one_with_its_state_computes_once_more() -> None:
    controller = running(2, replicas=((0,), (1,)))
    compute(controller, -1, -1)
    recover(controller)
    commands = compute(controller, -1, 3)
    assert not of(commands, Kill)
    assert {"spared", "fault"} <= notes(commands).keys()
    assert "first in the gradients before the update" in notes(commands)["spared"]["reason"]


def deviating(rank: int, times: int, *, limit: int, **options: Any) -> tuple[Controller, list[Command]]:
    """Rank ``rank`` does so in as many steps; nobody else does."""
    controller = running(2, policy=Policy(max_deviations=limit), **options)
    job = controller.job
    for commits in range(times):
        compute(controller, -1, -1, commits=commits)
        recover(controller, commits)
        job.retries.reached(commits + 1)
        commands = compute(controller, *(0 if each == rank else -1 for each in (0, 1)), commits=commits)
        if commits < times - 1:
            controller.lost(rank, job.incarnations[rank], "killed", [Standing(commits, Phase.COMPUTE)] * 2)
            recover(controller, commits)
            compute(controller, -1, -1, commits=commits)
    return controller, commands


def test_a_device_that_does_so_too_often_ends_the_job() -> None:
    controller, commands = deviating(1, 2, limit=2)
    assert [kill.rank for kill in of(commands, Kill)] == [1]
    commands = controller.lost(1, controller.job.incarnations[1], "computed", [Standing(1, Phase.COMPUTE)] * 2)
    assert not of(commands, Spawn)
    assert controller.job.stage is Stage.LEAVING, "the other saves"
    reason = notes(commands)["leaving"]["reason"]
    assert "here 1 has computed other bits for it 2 times (RESILIENT_DEVIATIONS=2)" in reason


@pytest.mark.parametrize("limit", [0, 3])
def test_a_device_that_does_so_seldom_is_given_a_new_process(limit: int) -> None:
    controller, _ = deviating(1, 2, limit=limit)
    commands = controller.lost(1, controller.job.incarnations[1], "computed", [Standing(1, Phase.COMPUTE)] * 2)
    assert [spawn.rank for spawn in of(commands, Spawn)] == [1]


def test_another_device_begins_anew() -> None:
    controller = running(2, policy=Policy(max_deviations=2))
    job = controller.job
    job.deviations.update({(1, "there 1"): 9, (0, "here 1"): 9})
    job.count_deviation(1, "here 1")
    assert not job.condemned
    job.count_deviation(1, "here 1")
    assert [*job.condemned] == [1]


def test_who_alone_has_the_state_saves_it_before_the_end() -> None:
    controller, commands = deviating(1, 1, limit=1, replicas=((0,), (1,)))
    assert not of(commands, Kill)
    assert controller.job.leaving is not None
    assert controller.job.leaving.code == EXIT_UNRECOVERABLE
    assert "here 1 has computed other bits for it 1 times" in notes(commands)["leaving"]["reason"]


def test_where_all_come_to_something_else_the_script_is_suspected() -> None:
    controller = running()
    compute(controller, -1, -1, -1)
    recover(controller)
    commands = compute(controller, 0, 0, 0)
    assert not of(commands, (Kill, EndJob)), "it may have been a machine: the third run decides"
    assert {"deviates", "verifying"} <= notes(commands).keys()
    recover(controller)
    commands = compute(controller, 0, 0, 0)
    (end,) = of(commands, EndJob)
    assert (end.code, notes(commands)["deviates"]["ranks"]) == (2, [0, 1, 2])
    assert "`resilient-train drill` tells" in end.reason


def test_where_one_after_the_other_comes_to_something_else_the_script_is_suspected() -> None:
    """Who has been replaced has computed the window once, and can't be found to differ: the others would be, in turns,
    until one has died too often.
    """
    controller = running()
    compute(controller, -1, -1, -1)
    recover(controller)
    for _ in range(2):
        commands = compute(controller, 0, -1, -1)
        assert [kill.rank for kill in of(commands, Kill)] == [0], "one machine, also twice"
        controller.lost(0, controller.job.incarnations[0], "killed", [Standing(3, Phase.COMPUTE)] * 2)
        recover(controller)
    commands = compute(controller, -1, 0, -1)
    assert not of(commands, (Kill, EndJob)), "it may be a second machine: the next run decides"
    assert "verifying" in notes(commands)
    recover(controller)
    (end,) = of(compute(controller, -1, 0, -1), EndJob)
    assert end.code == 2
    assert "`resilient-train drill` tells" in end.reason


def test_what_is_redone_after_a_fault_is_verified_by_who_was_there() -> None:
    controller = running()
    compute(controller, -1, -1, -1)
    recover(controller)
    compute(controller, -1)
    controller.failed_collective(1, "a link")
    assert controller.job.computed == {}
    assert {resume.verified for resume in recover(controller)} == {3}, "it was computed once"
    assert notes(compute(controller, -1, -1, -1)) == {"verified": {"step": 6, "ranks": []}}


def test_people_hear_of_what_goes_wrong_alone() -> None:
    controller = running()
    commands = compute(controller, -1, -1, -1)
    assert [*told("verifying", 1, 0.0, notes(commands)["verifying"])] == []
    assert [*told("resumed", 1, 5.0, {"commits": 3, "verifies": True})] == []
    assert [*told("verified", 1, 5.0, {"step": 6, "ranks": []})] == []


def test_the_digest_of_a_tensor_that_is_no_one_piece_is_that_of_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy of them, which must live as long as it is read: else two runs differ, and a rank is accused for it."""
    whole = torch.randn(64, 64)
    wanted = tensor_digest(whole.t().contiguous())
    read = fingerprint.digest

    def read_later(*arguments: Any) -> str:
        others = [torch.full((64, 64), float(number)) for number in range(8)]
        found = read(*arguments)
        del others
        return found

    monkeypatch.setattr(fingerprint, "digest", read_later)
    assert tensor_digest(whole.t()) == wanted
