"""Bits that are changed without a sign: what finds them, and what the job ends with."""

import socket
from pathlib import Path
from typing import Any

import pytest
from identity import assert_identical
from running import Reference, Run, launch
from shared import Undisturbed

from resilient_train.observe.report import lines
from resilient_train.observe.sinks import read_events
from resilient_train.observe.timeline import read_run

STEPS, FEW = 12, 8
"""What hits one step needs few."""
EXPONENT, TWICE = 0x40000000, 0x00800000
"""Of a float32: from near 1 to near 1e38; twice or half as large."""


def verified(
    run_dir: Path, plan: str = "", *, variant: str = "base", ranks: int = 2, every: int = 4, steps: int = STEPS
) -> Run:
    flags = ("--faults", plan) if plan else ()
    arguments = ("--steps", str(steps), "--variant", variant)
    return launch(run_dir, "train.py", *arguments, ranks=ranks, flags=flags, RESILIENT_VERIFY_EVERY=str(every))


def details(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event["detail"] for event in run.of(kind)]


def seldom(*values: Any) -> Any:
    """Parameters of the long tests."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "variant",
    [
        *("gan+undo", "scaler+clipped", "two+before+unused"),
        *map(seldom, ("base", "accumulate", "two+before", "unused", "workers+persistent")),
    ],
)
def test_a_script_that_computes_the_same_each_time_is_not_suspected(
    tmp_path: Path, variant: str, undisturbed: Reference
) -> None:
    """Dropout, BatchNorm, noise of three generators: a window that runs again is the same window."""
    run = verified(tmp_path / "run", variant=variant, every=2, steps=FEW)
    updates = run.of("session_end")[0]["detail"]["commits"]
    # Where the update is looked at behind the whole body, that writes its line twice.
    reference, once = undisturbed(ranks=2, variant=variant, steps=FEW), variant not in ("gan+undo", "scaler+clipped")
    assert_identical(run, reference, ranks=2, recoveries=updates // 2, once=once)
    assert [each["ranks"] for each in details(run, "verified")] == [[]] * (updates // 2)
    assert len(run.of("verifying")) == updates // 2
    assert not run.of("fault")
    assert "recovery" not in run.err.split("resilient-run: done after")[0], "it is nothing that people need to see"


@pytest.mark.parametrize("target", ["gradient", seldom("activation")])
def test_a_rank_that_computes_otherwise_once_is_replaced(tmp_path: Path, target: str, undisturbed: Reference) -> None:
    """All replicas take the wrong gradient over, and agree: nothing else would see it."""
    run = verified(tmp_path / "run", f"flip rank=1 step=7 index=701 mask={EXPONENT:#x} target={target}", steps=FEW)
    assert_identical(run, undisturbed(ranks=2, steps=FEW), ranks=2, recoveries=3)
    assert len(run.of("flipped")) == 1
    (told,) = run.of("deviates")
    assert (told["rank"], told["detail"]["step"], told["detail"]["ranks"]) == (1, 7, [1])
    assert "came to different bits, first in what it gives to collective" in told["detail"]["reason"]
    assert_evidence(told["detail"], 1)
    assert [each["ranks"] for each in details(run, "verified")] == [[], [1], []]
    assert [event["detail"]["lost"] for event in run.of("fault")] == [[1]]
    assert len(run.of("spawned")) == 3
    story = read_run(read_events(run.run_dir / "events.jsonl"))
    named = f"rank 1 ({socket.gethostname()} cpu) had other bits than it should once: computed in step 7"
    assert named in [line.text for line in lines(story)]


def assert_evidence(told: dict[str, Any], rank: int) -> None:
    was, now = told["digests"][str(rank)]
    assert len(was) == len(now)
    assert was != now
    assert told["batches"][str(rank)]
    assert told["devices"] == {str(rank): f"{socket.gethostname()} cpu"}


def test_a_device_that_does_so_again_ends_the_job(tmp_path: Path) -> None:
    """The job is started again in its directory in between."""
    wrong = "flip rank=1 step={} index=701 mask={:#x} target=gradient"
    environ = {"RESILIENT_VERIFY_EVERY": "4", "RESILIENT_DEVIATIONS": "2"}
    for step in (7, 11):
        flags = ("--faults", wrong.format(step, EXPONENT))
        run = launch(tmp_path / "run", "train.py", "--steps", str(STEPS), ranks=2, flags=flags, **environ)
        assert run.code == (75 if step == 11 else 0), run.explain()
        assert len(run.of("deviates")) == 1
    assert f"{socket.gethostname()} cpu has computed other bits for it 2 times (RESILIENT_DEVIATIONS=2)" in run.err
    assert "its state from after 11 updates is saved" in run.err


def test_a_flip_in_the_second_run_is_seen_as_well(tmp_path: Path, undisturbed: Reference) -> None:
    plan = f"flip rank=0 step=7 generation=2 index=700 mask={EXPONENT:#x} target=gradient"
    run = verified(tmp_path / "run", plan, ranks=3, steps=FEW)
    assert_identical(run, undisturbed(ranks=3, steps=FEW), ranks=3, recoveries=3)
    assert [event["rank"] for event in run.of("deviates")] == [0]


def test_an_anomaly_of_one_rank_in_a_step_that_is_computed_twice(tmp_path: Path, undisturbed: Reference) -> None:
    """Each time that it is looked for, on that rank alone: the others do not wait for a run that it does not make."""
    plan = "loss rank=1 step=7 value=nan generation=2; loss rank=1 step=7 value=nan generation=3; "
    plan += "kill rank=0 step=11 generation=4"
    environ = {"MS_ENABLE_TFT": "{TRE:1,ARF:1}", "RESILIENT_VERIFY_EVERY": "4"}
    arguments = ("--steps", str(STEPS), "--variant", "check")
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=("--faults", plan), **environ)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=2, steps=STEPS).digests()
    assert [(each["step"], each["again"]) for each in details(run, "anomaly")] == [(7, False), (7, True)]
    assert {each["step"] for each in details(run, "verified")} == {3, 7, 11}
    assert not run.of("deviates")


def test_a_fault_in_either_run(tmp_path: Path, undisturbed: Reference) -> None:
    plan = "kill rank=1 step=2 at=backward; kill rank=0 step=5 generation=3 at=backward; "
    plan += "kill rank=1 step=8 generation=5 phase=READY at=barrier incarnation=1; hcce rank=1 step=11 incarnation=2"
    run = verified(tmp_path / "run", plan, every=3)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=2, steps=STEPS).digests()
    assert len(run.of("fault")) == 4
    assert {tuple(each["ranks"]) for each in details(run, "verified")} == {()}
    # At step 8 rank 1 dies just behind its last word, and the agent may see its death first. Rank 0 has compared too.
    assert {each["step"] for each in details(run, "verified")} | {8} == {2, 5, 8, 11}


def beside_replicas(
    run_dir: Path, plan: str = "", *more: str, ranks: int = 3, variant: str = "base", steps: int = STEPS, keep: int = 9
) -> Run:
    """Updates 2, 3, 7 and 11 are verified: each rank computes also what a replica of it has computed."""
    flags = ("--faults", plan) if plan else ()
    arguments = ("--steps", str(steps), "--variant", variant, *more)
    environ = {"RESILIENT_VERIFY_EVERY": "4", "RESILIENT_VERIFY_INPUTS": "neighbour"}
    environ["RESILIENT_KEEP_CHECKPOINTS"] = str(keep)
    return launch(run_dir, "train.py", *arguments, ranks=ranks, flags=flags, **environ)


@pytest.mark.parametrize(
    ("variant", "ranks"),
    [
        *(("base", 3), ("accumulate", 2), ("gan+undo", 2)),
        *(seldom("two+before", 2), seldom("workers+persistent", 2), seldom("unused", 3)),
    ],
)
def test_replicas_come_to_the_same_from_each_others_inputs(
    tmp_path: Path, variant: str, ranks: int, undisturbed: Reference
) -> None:
    """Batches, three generators, buffers: all that a body computes from. What it leaves behind is the rank's own."""
    run = beside_replicas(tmp_path / "run", variant=variant, ranks=ranks, steps=FEW)
    verified = details(run, "verified")
    assert [(each["ranks"], each["beside"]) for each in verified] == [([], 1)] * len(verified)
    assert len(verified) == (2 if variant == "accumulate" else 3), run.explain()
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=ranks, variant=variant, steps=FEW).digests()
    assert not run.of("fault") + run.of("deviates") + run.of("unshared")
    assert not list(run.run_dir.glob("inputs-*"))


def test_a_device_that_always_errs_is_named_by_two_replicas(tmp_path: Path) -> None:
    run = beside_replicas(tmp_path / "run", "", "--wrong", "1", "6")
    assert run.code == 75, run.explain()
    (told,) = run.of("deviates")
    assert (told["rank"], told["detail"]["step"], told["detail"]["ranks"]) == (1, 7, [1])
    assert_evidence(told["detail"], 1)
    assert "rank 1 comes to other bits in step 7 than two of its replicas from the same inputs" in run.err
    assert "What was trained since update 3 is in doubt, and not saved" in run.err


def saved_in(run: Run) -> list[str]:
    return sorted(each.name for each in (run.run_dir / "checkpoints").iterdir())


def test_where_all_that_is_saved_is_in_doubt(tmp_path: Path) -> None:
    """Replicas agree at update 3, and not at 7. Nothing older than that is saved: no scheduler is to start it again."""
    run = beside_replicas(tmp_path / "run", "", "--wrong", "1", "4", "--save", "5", "--await-saves")
    assert run.code == 2, run.explain()
    assert saved_in(run) == ["step_5"]
    assert "All that this job has saved is from behind that" in run.err
    assert "checkpoints/step_5), which is in doubt" in run.err


@pytest.mark.parametrize("runs", [pytest.param(1, marks=pytest.mark.long), 2])
def test_what_was_saved_since_is_not_gone_on_from(tmp_path: Path, undisturbed: Reference, runs: int) -> None:
    """The newest checkpoint from before update 3 stays, beside the one that is to stay, also in a later run."""
    wrong = ("--wrong", "1", "4", "--save", "2", "--await-saves")
    if runs == 2:
        first = beside_replicas(tmp_path / "run", "", *wrong, steps=6, keep=1)
        assert first.code == 0, first.explain()
        assert saved_in(first) == ["step_2", "step_4"]
    run = beside_replicas(tmp_path / "run", "", *wrong, keep=1)
    assert run.code == 75, run.explain()
    assert "What was trained since update 3 is in doubt" in run.err
    assert saved_in(run)[0] == "step_2"
    assert {each.split("_")[0] for each in saved_in(run)[1:]} == {"wrong"}
    again = beside_replicas(tmp_path / "run", "", "--save", "2")
    assert again.code == 0, again.explain()
    assert "all ranks go on from update 2 " in again.err
    assert again.digests() == undisturbed(ranks=3, variant="base", steps=STEPS).digests()


def test_of_two_replicas_nothing_says_which_always_errs(tmp_path: Path) -> None:
    run = beside_replicas(tmp_path / "run", "", "--wrong", "1", "6", ranks=2)
    assert run.code == 75, run.explain()
    assert "ranks 0, 1 come to different bits from the same inputs (step 7)" in run.err
    assert "rank" not in run.of("deviates")[0], "it counts against no device"


def test_a_script_that_looks_at_its_rank_is_told_at_once(tmp_path: Path) -> None:
    run = beside_replicas(tmp_path / "run", "", "--wrong", "1", "0", ranks=2)
    assert run.code == 2, run.explain()
    assert [event["detail"]["step"] for event in run.of("deviates")] == [2]
    assert "RESILIENT_VERIFY_INPUTS=neighbour is not for it" in run.err


def test_faults_where_ranks_compute_from_each_others_inputs(tmp_path: Path, undisturbed: Reference) -> None:
    """A kill ends the comparison, not the window's own verification; a flip is outvoted, and its rank replaced.

    The flip comes last: whoever is given up for one trains on until its death is seen, and may have begun to compare
    the next window by then.
    """
    plan = "kill rank=2 step=3 generation=4 phase=COMPUTE at=backward; hcce rank=0 step=7 generation=7; "
    plan += f"flip rank=1 step=11 generation=9 index=701 mask={EXPONENT:#x} target=gradient"
    run = beside_replicas(tmp_path / "run", plan)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=3, steps=STEPS).digests()
    assert [event["detail"]["kind"] for event in run.of("injected")] == ["kill", "hcce", "flip"]
    (told,) = run.of("deviates")
    assert told["detail"]["ranks"] == [1]
    assert {event["rank"] for event in run.of("spawned") if event["detail"].get("joining", True)} >= {1, 2}


def test_what_no_other_rank_can_compute_from_is_told(tmp_path: Path) -> None:
    environ = {"RESILIENT_VERIFY_EVERY": "2", "RESILIENT_VERIFY_INPUTS": "neighbour"}
    run = launch(tmp_path / "run", "called.py", "--steps", "8", ranks=2, **environ)
    assert run.code == 0, run.explain()
    assert [event["detail"]["reason"] for event in run.of("unshared")] == [
        "the arguments of session.call() come from the loop"
    ]
    assert "RESILIENT_VERIFY_INPUTS=neighbour has no effect: the arguments of session.call()" in run.err
    assert {tuple(each["ranks"]) for each in details(run, "verified")} == {()}


def test_a_fault_of_each_kind_in_a_window_that_is_computed_twice(tmp_path: Path, undisturbed: Reference) -> None:
    """In the first run of it or in the second one."""
    plan = "hcce rank=0 step=1 generation=0; hcce rank=1 step=3 generation=3 phase=COMPUTE at=backward; "
    plan += "uce rank=1 step=5 generation=5 phase=COMPUTE at=forward; stop rank=0 step=7 generation=7; "
    plan += "uce rank=0 step=9 generation=8 phase=COMPUTE at=backward target=param incarnation=1; "
    plan += "stop rank=1 step=11 generation=11 phase=READY at=barrier"
    run = verified(tmp_path / "run", plan, every=2)
    assert run.code == 0, run.explain()
    assert [event["detail"]["kind"] for event in run.of("injected")] == [
        clause.split()[0] for clause in plan.split("; ")
    ]
    assert run.digests() == undisturbed(ranks=2, steps=STEPS).digests()
    assert {tuple(each["ranks"]) for each in details(run, "verified")} == {()}


def test_a_loop_that_calls_its_bodies(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    plain = undisturbed_of("called.py", "--steps", "8", ranks=2)
    flags = ("--faults", f"flip rank=0 step=5 index=701 mask={EXPONENT:#x} target=gradient")
    run = launch(tmp_path / "run", "called.py", "--steps", "8", ranks=2, flags=flags, RESILIENT_VERIFY_EVERY="2")
    assert run.code == 0, run.explain()
    assert run.digests() == plain.digests()
    assert [event["rank"] for event in run.of("deviates")] == [0]
    assert len(run.of("verifying")) == 4


def test_a_script_that_computes_something_else_each_time_is_told(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "mistaken.py", "unsteady", "9", ranks=2, RESILIENT_VERIFY_EVERY="4")
    assert run.code == 2, run.explain()
    assert [told["detail"]["ranks"] for told in run.of("deviates")] == [[0, 1]] * 2, "the third run decides"
    assert "computed step 3 twice and came to different bits, first in what it gives to collective 1 of 1" in run.err
    assert "`resilient-train drill` tells" in run.err


@pytest.mark.parametrize(
    ("target", "place", "switches"),
    [
        ("param", "", {}),
        ("optimizer", "", {"MS_ENABLE_TFT": "{TTP:1}"}),
        seldom("param", "phase=UPDATING at=start", {}),
        seldom("gradient", "phase=UPDATING at=start", {}),
    ],
)
def test_what_one_replica_alone_holds_otherwise_sends_all_back(
    tmp_path: Path, target: str, place: str, switches: dict[str, str], undisturbed: Reference
) -> None:
    """To the newest snapshot that was equal in all of them; with one of each step, that is a step or two. (A lower bit
    of a moment is rounded away.) No switch is needed for it.
    """
    plan = f"flip rank=1 step=5 index=701 mask={TWICE:#x} target={target} {place}"
    arguments = ("--steps", str(FEW), "--save-mode", '{"steps": 1000, "memory_steps": 1}')
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=("--faults", plan), **switches)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=2, steps=FEW).digests()
    assert len(run.of("flipped")) == len(run.of("replicas_differ")) == len(run.of("restart_all")) == 1
    assert {each["commits"] for each in details(run, "restored")} <= {4, 5}
    # Behind a forward pass with a wrong parameter both have wrong gradients; before one, the other rank was right.
    named = copied_with_its_flip(run, 5) or (target, place) != ("param", "")
    assert [event["rank"] for event in run.of("held_wrong")] == [1] * named
    (told,) = details(run, "replicas_differ")
    assert (len(set(told["digests"].values())), len(set(told["batches"].values()))) == (2, 2), told
    assert all(told["batches"].values())


def copied_with_its_flip(run: Run, step: int) -> bool:
    """What a rank copies as the flip hits may have it or not. If so, the snapshots of that step disagree already."""
    return min(detail["step"] for detail in details(run, "save_skipped")) == step


def test_the_only_rank_of_a_job_computes_once_more(tmp_path: Path, undisturbed: Reference) -> None:
    run = verified(
        tmp_path / "run", f"flip rank=0 step=7 index=701 mask={EXPONENT:#x} target=gradient", ranks=1, steps=FEW
    )
    assert_identical(run, undisturbed(ranks=1, steps=FEW), ranks=1, recoveries=3)
    assert len(run.of("deviates")) == 1
    assert len(run.of("spawned")) == 1


def test_nobody_copies_a_replica_that_is_in_doubt(tmp_path: Path, undisturbed: Reference) -> None:
    """The snapshots of before update 6 were not the same, and before they compare the good one of the two dies."""
    plan = f"flip rank=0 step=5 index=701 mask={TWICE:#x} target=param; kill rank=1 step=7 phase=COMPUTE at=backward"
    arguments = ("--steps", str(FEW), "--save-mode", '{"steps": 1000, "memory_steps": 1}')
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=2, steps=FEW).digests()
    (told,) = run.of("replicas_differ")
    # On a busy machine they compare before the kill: a slot is still being read, or the next snapshot waits for that.
    early = ("still being read", "they compare first")
    busy = [each for each in details(run, "save_skipped") if any(text in each["reason"] for text in early)]
    assert busy or "did not seem to hold the same bits" in told["detail"]["reason"], run.explain()
    assert {each["commits"] for each in details(run, "restored")} <= {4, 5}


def test_a_flip_that_makes_all_replicas_nan_is_found_by_its_norm(tmp_path: Path, undisturbed: Reference) -> None:
    """Rank 1's gradients are not numbers, so nobody's are, and after the update all replicas would hold the same. The
    step runs again for its norm (TRE), and before that replicas compare.
    """
    plan = f"flip rank=1 step=5 index=701 mask={EXPONENT:#x} target=param"
    arguments = ("--steps", str(FEW), "--save-mode", '{"steps": 1000, "memory_steps": 1}')
    environ = {"MS_ENABLE_TFT": "{TRE:1,ARF:1}"}
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=("--faults", plan), **environ)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=2, steps=FEW).digests()
    assert len(run.of("replicas_differ")) == len(run.of("restart_all")) == 1
    early = copied_with_its_flip(run, 5)  # then all compare before step 7, whose norm is the first that is no number
    assert [detail["values"] for detail in details(run, "anomaly")] == ([] if early else [["nan"]])
    assert {each["commits"] for each in details(run, "restored")} <= {4, 5}


def test_a_flip_that_finds_nothing_to_hit_is_a_mistake_in_the_plan(tmp_path: Path) -> None:
    plan = "flip rank=1 step=2 mask=1 target=gradient phase=UPDATING"
    flags = ("--faults", plan.replace("phase=UPDATING", "phase=READY"))
    run = launch(tmp_path / "run", "train.py", "--steps", "4", ranks=2, flags=flags)
    assert run.code == 2
    assert "where flip finds a gradient: phase=COMPUTE at=backward, phase=UPDATING at=start" in run.err


def test_bits_that_an_element_does_not_have_are_not_told_as_flipped(tmp_path: Path) -> None:
    flags = ("--faults", f"flip rank=1 step=2 mask={1 << 40 | 1:#x} target=gradient")
    run = launch(tmp_path / "run", "train.py", "--steps", "4", ranks=2, flags=flags)
    assert run.code != 0
    assert "fault plan: flip mask=0x10000000001: an element of torch.float32 has 32 bits only" in run.err
    assert not run.of("flipped")
