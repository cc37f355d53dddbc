"""Models that are divided among ranks: whatever is killed, each rank ends with the memory of a plain run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import memories
import pytest
import torch
import torch.distributed.checkpoint as dcp
from memories import (
    EACH_ALONE,
    IN_MEMORY,
    PLACES,
    RANKS,
    Plain,
    ended_by_the_scheduler,
    ends_as,
    goes_on_divided_anew,
    memory_of,
    plain_net,
    wait_for_step,
    went_back_together,
)
from running import JOBS, LAUNCHER, Run, launch, read_events, start

JOB = "hsdp.py"
TWICE, COMPILED = "HSDP, blocks computed twice", "HSDP, blocks compiled"
KILLS = (
    "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=2 step=7 phase=COMPUTE at=forward; "
    "kill rank=0 step=9 phase=UPDATING at=start"
)
POISONED = "uce rank=2 step=6 phase=COMPUTE at=backward target=param"
TOGETHER = (
    "hcce rank=2 step=1 phase=COMPUTE at=backward; "
    "uce rank=0 step=2 phase=COMPUTE at=forward target=param; "
    "stop rank=3 step=3 phase=COMPUTE at=forward; "
    "kill rank=0 step=4 phase=COMPUTE at=forward; "
    "kill rank=1 step=5 phase=COMPUTE at=backward; "
    "kill rank=2 step=7 phase=UPDATING at=start; "
    "kill rank=3 step=9 phase=APPLIED at=end incarnation=1"
)
TORN = "uce rank=3 step=8 phase=UPDATING at=start target=optimizer"


def train(run_dir: Path, faults: str, *more: str, variant: str = "base", **environ: str) -> Run:
    return memories.train(JOB, run_dir, faults, *more, variant=variant, **environ)


@pytest.mark.shows("HSDP", "killed", "in place")
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_kills_in_each_phase(run_dir: Path, torchrun: Plain, first: int) -> None:
    """In one job: each rank dies once, each time somewhere else. The comparison sees a bit."""
    plan = [f"kill rank={(n + first) % 4} step={2 + 2 * n} phase={PLACES[(first + 3 * n) % 9]}" for n in range(4)]
    run = train(run_dir, "; ".join(plan))
    ends_as(run, torchrun("base"))
    assert run.recoveries() == 4, run.explain()
    out = run.run_dir.parent / "out"
    held = memory_of(out)
    assert held[0] != held[1], "each has a part of its own"
    (out / "rank3.bin").write_bytes(bytes([held[3][0] ^ 1]) + held[3][1:])
    with pytest.raises(AssertionError, match=r"rank 3: first\.weight differs from byte 0 on"):
        ends_as(run, torchrun("base"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("variant", "plain"),
    [
        pytest.param(
            *("async+recompute+evaluate+warm", "base"),
            marks=pytest.mark.shows(TWICE, "killed", "in place"),
        ),
        pytest.param("accumulate+mixed+two", "accumulate+mixed+two", marks=pytest.mark.long),
        pytest.param("undo", "base", marks=pytest.mark.long),
        pytest.param("call", "base", marks=pytest.mark.long),
        pytest.param("accumulate+reduced", "accumulate+reduced", marks=pytest.mark.long),
        pytest.param("kept", "kept", marks=pytest.mark.long),
        pytest.param("accumulate+undo", "accumulate", marks=pytest.mark.long),
        pytest.param("two+kept+call", "two+kept", marks=pytest.mark.long),
    ],
)
def test_loops(run_dir: Path, torchrun: Plain, variant: str, plain: str) -> None:
    """Gradients that wait for their reduction, other dtypes, gathers ahead of time, evaluations, undo, calls.

    What computes twice, gathers ahead, evaluates or can be undone comes to the bits of a plain run that does not.
    """
    run = train(run_dir, KILLS, variant=variant)
    ends_as(run, torchrun(plain))
    assert run.recoveries() == 3, run.explain()


def in_place(layout: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.shows(layout, what, "in place") for what in ("memory damaged", "connections cut", "hangs")]


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("base", marks=in_place("HSDP")),
        pytest.param("recompute", marks=[*in_place(TWICE), pytest.mark.long]),
    ],
)
def test_other_faults(run_dir: Path, torchrun: Plain, variant: str) -> None:
    """One after the other: norms that can't be right, a cut, memory, a torn update, a hang, one of each pair killed."""
    plan = (
        "norm rank=1 step=2 value=nan; hcce rank=1 step=4 phase=COMPUTE at=backward; "
        f"{POISONED}; {TORN}; stop rank=2 step=9 phase=COMPUTE at=forward; "
        "kill rank=1 step=10 phase=COMPUTE at=backward; kill rank=2 step=10 phase=COMPUTE at=backward incarnation=1"
    )
    run = train(run_dir, plan, variant=variant, MS_ENABLE_TFT="{TRE:1,ARF:1,TTP:1,HCCE:1,UCE:1}")
    ends_as(run, torchrun("base"))
    told = [event["detail"]["strategy"] for event in run.of("fault")]
    assert told[:5] == ["TRE", "HCCE", "UCE", "UCE", "ARF"], run.explain()
    assert told[5:] in (["ARF"], ["ARF", "ARF"]), "the second one may die in the recovery of the first"
    assert run.err.count("the state is in 2 parts; the ranks that hold the same: [0, 2], [1, 3]") == 1
    assert len(run.of("anomaly")) == 1, run.explain()
    (hit, part), (torn, whole) = [(event["rank"], event["detail"]["bytes"]) for event in run.of("fetched")[:2]]
    assert (hit, torn) == (2, 3), run.explain()
    assert part < whole / 10, "the part that was hit, and where an update was torn all of them"


@pytest.mark.long
@pytest.mark.parametrize("variant", ["truncated", "truncated+alone"])
def test_weights_that_are_drawn_when_they_are_divided(run_dir: Path, torchrun: Plain, variant: str) -> None:
    """Until all are within bounds: a new process draws alone, and more or less often; its weights come from others.
    torch 2.15 gathers for that what is out of bounds, which is more than is kept of a collective before the loop.
    """
    run = train(run_dir, KILLS.split("; ", 1)[0], *IN_MEMORY, variant=variant)
    ends_as(run, torchrun(variant))


@pytest.mark.long
@pytest.mark.parametrize("variant", ["handed", pytest.param("handed+alone", marks=pytest.mark.long)])
def test_weights_that_rank_0_hands_out_before_the_loop(run_dir: Path, torchrun: Plain, variant: str) -> None:
    """Each rank is given whole tensors, and a new process is not. Rank 0 is one of those that are lost."""
    run = train(run_dir, KILLS, *(IN_MEMORY if "alone" in variant else ()), variant=variant)
    ends_as(run, torchrun(variant))
    assert run.recoveries() or run.of("restart_all"), run.explain()


def test_a_reduction_that_fails_counts_where_the_script_has_caught_its_error(run_dir: Path, torchrun: Plain) -> None:
    """All ranks are in reduce-scatters, or begin one, and no script raises: there is no update on what comes of it."""
    plan = "; ".join(f"hcce rank={rank} step=6 phase=COMPUTE at=backward" for rank in range(RANKS))
    run = train(run_dir, plan, variant="alone+kept+caught")
    ends_as(run, torchrun("alone"))
    assert run.recoveries(), run.explain()


@pytest.mark.long
def test_a_frozen_model_that_nobody_registers(run_dir: Path, torchrun: Plain) -> None:
    """Behind its forward pass torch leaves it whole, and a new process gathers what the others would not."""
    kills = (
        "kill rank=2 step=4 phase=COMPUTE at=start",
        "hcce rank=1 step=6 phase=COMPUTE at=forward",
        "kill rank=1 step=8 phase=UPDATING at=start",
    )
    run = train(run_dir, "; ".join(kills), variant="taught")
    ends_as(run, torchrun("taught"))
    assert run.recoveries() == 3, run.explain()
    assert not run.of("hung"), run.explain()


@pytest.mark.long
@pytest.mark.parametrize("variant", ["gathered", pytest.param("gathered+tp+copied", marks=pytest.mark.long)])
def test_a_model_that_is_put_together_behind_the_update(run_dir: Path, torchrun: Plain, variant: str) -> None:
    """A lost rank has not given its part; who holds the same one has."""
    kills = (
        "kill rank=2 step=3 phase=APPLIED at=start",
        "kill rank=1 step=5 phase=UPDATING at=start",
        "kill rank=0 step=8 phase=APPLIED at=start",
    )
    run = train(run_dir, "; ".join(kills), variant=variant)
    plain = torchrun(variant)
    ends_as(run, plain)
    written = [path for path in plain.glob("whole*-*.bin") if (run_dir.parent / "out" / path.name).exists()]
    assert len(written) == 4 * 12 - 3, run.explain()  # the lost ranks have not come to it
    for path in written:
        assert path.read_bytes() == (run_dir.parent / "out" / path.name).read_bytes(), path.name
    assert {event["detail"]["replica"] for event in run.of("tail_input_missing")} == {True, False}, run.explain()


@pytest.mark.long
def test_what_a_body_switches_for_the_next_one_is_as_it_was(run_dir: Path, torchrun: Plain) -> None:
    """All have switched their reductions on when they are cut; a new process has never switched them off."""
    cuts = [f"hcce rank={rank} step=3 phase=COMPUTE at=backward" for rank in range(RANKS)]
    kills = (
        "kill rank=1 step=5 phase=COMPUTE at=backward",
        "kill rank=2 step=8 phase=COMPUTE at=backward",
        "kill rank=0 step=9 phase=UPDATING at=start",
    )
    run = train(run_dir, "; ".join([*cuts, *kills]), variant="accumulate+mixed+two+switched+undo")
    ends_as(run, torchrun("accumulate+mixed+two"))
    assert run.recoveries() >= 4, run.explain()


@pytest.mark.long
@pytest.mark.shows(COMPILED, "killed", "in place")
@pytest.mark.shows(COMPILED, "connections cut", "in place")
@pytest.mark.shows(COMPILED, "hangs", "in place")
@pytest.mark.shows(COMPILED, "memory damaged", "in place")
def test_compiled_blocks(run_dir: Path, torchrun: Plain) -> None:
    """Hooks of ours are not called in what is compiled: the places are in front of it and behind it."""
    places = (
        "uce rank=3 step=2 phase=UPDATING at=start target=param",
        "kill rank=2 step=4",
        "hcce rank=0 step=6",
        "kill rank=1 step=8 phase=UPDATING",
        "stop rank=3 step=9",
        "kill rank=0 step=10 phase=READY",
    )
    run = train(run_dir, "; ".join(places), variant="compiled")
    ends_as(run, torchrun("compiled"))
    assert run.recoveries() == len(places), run.explain()


@pytest.mark.shows("TP, replicated", "killed", "in place")
@pytest.mark.shows("TP, replicated", "connections cut", "in place")
@pytest.mark.shows("TP, replicated", "memory damaged", "in place")
@pytest.mark.shows("TP, replicated", "hangs", "in place")
@pytest.mark.parametrize(
    "variant", ["tp+copied+recompute", pytest.param("tp+copied+accumulate", marks=pytest.mark.long)]
)
def test_two_ranks_that_compute_a_block_together(run_dir: Path, torchrun: Plain, variant: str) -> None:
    """Tensor parallelism: each rank has half of a block, which one of the other pair holds too."""
    run = train(run_dir, TOGETHER, variant=variant)
    ends_as(run, torchrun(variant.replace("+recompute", "")))
    assert len(run.of("fault")) == 7, run.explain()  # on a busy machine one may come in the middle of another
    assert "the state is in 2 parts; the ranks that hold the same: [0, 2], [1, 3]" in run.err


@pytest.mark.long
@pytest.mark.shows("TP, sharded", "killed", "back")
@pytest.mark.shows("TP, sharded", "connections cut", "in place")
@pytest.mark.shows("TP, sharded", "hangs", "back")
@pytest.mark.shows("TP, sharded", "memory damaged", "back")
@pytest.mark.shows("TP, sharded", "no holder left", "back")
def test_pairs_divide_their_halves_once_more(run_dir: Path, torchrun: Plain) -> None:
    """``parallelize_module``, then ``fully_shard``: no rank holds what another does."""
    run = train(run_dir, EACH_ALONE, *IN_MEMORY, variant="tp", RESILIENT_HANG_TIMEOUT_S="5")
    ends_as(run, torchrun("tp"))
    went_back_together(run)


@pytest.mark.long
@pytest.mark.shows("TP, replicated", "no holder left", "back")
def test_both_who_compute_a_half_are_lost(run_dir: Path, torchrun: Plain) -> None:
    run = train(run_dir, "; ".join(lost()), *IN_MEMORY, variant="tp+copied")
    ends_as(run, torchrun("tp+copied"))
    assert len(run.of("restart_all")) == 1, run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"memory"}, run.explain()


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("base", marks=pytest.mark.shows("HSDP", "no holder left", "back")),
        pytest.param("recompute", marks=[pytest.mark.shows(TWICE, "no holder left", "back"), pytest.mark.long]),
        pytest.param("compiled", marks=[pytest.mark.shows(COMPILED, "no holder left", "back"), pytest.mark.long]),
    ],
)
def test_both_holders_of_a_part_are_lost(run_dir: Path, torchrun: Plain, variant: str) -> None:
    """And before that bits flip in a part, which only who holds the same one can tell."""
    flip = "flip rank=3 step=3 phase=UPDATING at=start target=param mask=0x400000"
    plan = "; ".join([flip, *lost("incarnation=1")])
    run = train(run_dir, plan, *IN_MEMORY, variant=variant, RESILIENT_COMPARE_EVERY="1")
    ends_as(run, torchrun("compiled" if variant == "compiled" else "base"))
    assert [event["detail"]["ranks"] for event in run.of("replicas_differ")] == [[1, 3]], run.explain()
    assert len(run.of("restart_all")) == 2, run.explain()
    assert at_most_one_update_is_made_again(run), run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"memory"}, run.explain()


def test_both_holders_are_lost_and_nothing_is_saved(run_dir: Path) -> None:
    run = train(run_dir, "; ".join(lost()))
    assert run.code == 75, run.explain()
    assert "no living rank holds a replica of its state" in run.err


def lost(more: str = "") -> list[str]:
    """An update is not interrupted: who has begun it comes to the place, whoever has died before."""
    return [f"kill rank={rank} step=7 phase=UPDATING {more}" for rank in (0, 2)]


def at_most_one_update_is_made_again(run: Run) -> bool:
    """The last time that all went back: each update is kept in memory, the newest one perhaps not yet."""
    applied = run.of("restart_all")[-1]["detail"]["commits"]
    kept = run.of("restored")[-1]["detail"]["commits"]
    return applied in (kept, kept + 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "plain"),
    [
        pytest.param(variant, plain, marks=pytest.mark.shows(layout, "started again", "goes on"))
        for variant, plain, layout in (
            ("alone", "alone", "FSDP"),
            ("tp", "tp", "TP, sharded"),
            ("tp+copied", "tp+copied", "TP, replicated"),
            ("recompute", "base", TWICE),
            ("compiled", "compiled", COMPILED),
        )
    ],
)
def test_asked_to_end_it_goes_on_from_storage(run_dir: Path, torchrun: Plain, variant: str, plain: str) -> None:
    ended_by_the_scheduler(JOB, run_dir, variant=variant)
    run = train(run_dir, "", variant=variant)
    ends_as(run, torchrun(plain))
    assert {event["detail"]["source"] for event in run.of("restored")} == {"storage"}, run.explain()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.shows("HSDP", "divided anew", "goes on")
@pytest.mark.shows("FSDP", "divided anew", "goes on")
@pytest.mark.shows("TP, replicated", "divided anew", "goes on")
@pytest.mark.shows("TP, sharded", "divided anew", "goes on")
@pytest.mark.parametrize(
    "ways",
    [
        [("base+counted", 4), ("alone+counted", 3), ("alone+counted", 1)],
        pytest.param([("base", 4), ("alone", 4), ("alone", 2), ("alone", 1)], marks=pytest.mark.long),
        pytest.param([("alone", 4), ("tp+copied", 4), ("base", 4), ("tp", 4)], marks=pytest.mark.long),
        pytest.param([("tp+copied+paired", 4), ("alone", 4), ("tp", 4), ("base", 2)], marks=pytest.mark.long),
        pytest.param(
            [("recompute", 4), ("alone+recompute", 3)],
            marks=[pytest.mark.shows(TWICE, "divided anew", "goes on"), pytest.mark.long],
        ),
        pytest.param(
            [("compiled", 4), ("alone+compiled", 3)],
            marks=[pytest.mark.shows(COMPILED, "divided anew", "goes on"), pytest.mark.long],
        ),
    ],
    ids=lambda ways: " ".join(f"{variant}-{ranks}" for variant, ranks in ways),
)
def test_it_goes_on_divided_in_another_way(run_dir: Path, ways: list[tuple[str, int]]) -> None:
    """Each from what the first one has saved, without a step more: put together by torch it is the same model."""

    expected = goes_on_divided_anew(JOB, run_dir, ways)
    assert read_by_torch(run_dir / "checkpoints" / "step_3") == expected


def read_by_torch(checkpoint: Path) -> bytes:
    """The model and its moments, as they lie in the files, by torch's own reader in a process that has no group."""
    named: dict[str, torch.Tensor] = {}
    for number, (name, parameter) in enumerate(plain_net().named_parameters()):
        named[f"model.0.{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            named[f"optimizer.0.{number}.{moment}"] = torch.zeros_like(parameter)
        named[f"optimizer.0.{number}.step@0"] = torch.zeros(())
    dcp.load(named, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    return b"".join(tensor.numpy().tobytes() for tensor in named.values())


@pytest.mark.long
@pytest.mark.shows("HSDP", "started again", "goes on")
def test_what_is_in_memory_is_of_other_parts(run_dir: Path, torchrun: Plain) -> None:
    """A launcher died; nothing is on storage. Who has changed the script at the next start has one sentence to read,
    and nothing is lost. The one behind it is asked to end, which leaves all on storage.
    """
    told = run_dir.parent / "told"
    saves = ("--save", "100", "--memory", "1")
    job = [str(JOBS / JOB), "--out", str(run_dir.parent / "out"), *saves, "--tell", str(told)]
    with start([*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *job]) as process:
        wait_for_step(told, 2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
    run = train(run_dir, "", *saves, variant="tp+copied")
    assert run.code == 2, run.explain()
    assert "is of other parts of the model, and nothing of it is on storage: start the job as it was" in run.err
    told.unlink()
    ended_by_the_scheduler(JOB, run_dir, *saves, variant="base")
    assert {event["detail"]["source"] for event in read_events(run_dir) if event["kind"] == "restored"} == {"memory"}
    run = train(run_dir, "", variant="base")
    ends_as(run, torchrun("base"))
    assert {event["detail"]["source"] for event in run.of("restored")} == {"storage"}, run.explain()


def test_what_is_not_the_same_in_all_parts_can_not_be_divided_anew(run_dir: Path) -> None:
    out = str(run_dir.parent / "out")
    more = ("--out", out, "--steps", "2", "--save", "1")
    assert launch(run_dir, JOB, *more, "--variant", "base+average", ranks=4).code == 0
    run = launch(run_dir, JOB, *more, "--variant", "alone+average", ranks=4)
    assert run.code == 2, run.explain()
    assert "ranks that held other parts of the model, and 'extra.average.of@0' was not the same on all" in run.err


@pytest.mark.long
@pytest.mark.shows("FSDP", "killed", "back")
@pytest.mark.shows("FSDP", "no holder left", "back")
@pytest.mark.shows("FSDP", "hangs", "back")
def test_parts_that_one_rank_holds_alone(run_dir: Path, torchrun: Plain) -> None:
    """What protects them is told at the start, and all go back to it: when one is killed, and when one hangs. Nobody
    continues that one, and the others' parts are worth nothing without it.
    """
    plan = "kill rank=1 step=6 phase=COMPUTE at=backward; stop rank=2 step=9 phase=COMPUTE at=forward incarnation=1"
    flags = ("--save", "100", "--memory", "1")
    run = train(run_dir, plan, *flags, variant="alone", RESILIENT_HANG_TIMEOUT_S="5")
    ends_as(run, torchrun("alone"))
    assert "held by one rank alone ([0], [1], [2], [3]): when that one is lost, all ranks go back" in run.err
    killed, stopped = run.of("restart_all")
    assert killed["detail"]["commits"] in (5, 6), "each is kept in memory"
    assert stopped["detail"]["commits"] in (8, 9), run.explain()
    assert run.of("spared"), run.explain()
    assert "rank 2 did not join the recovery within" in stopped["detail"]["reason"], run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"memory"}, run.explain()


@pytest.mark.long
@pytest.mark.shows("FSDP", "connections cut", "in place")
@pytest.mark.shows("FSDP", "memory damaged", "back")
def test_a_part_without_a_copy_is_damaged(run_dir: Path, torchrun: Plain) -> None:
    plan = f"hcce rank=1 step=4 phase=COMPUTE at=backward; {TORN}"
    run = train(run_dir, plan, "--save", "100", "--memory", "1", variant="alone")
    ends_as(run, torchrun("alone"))
    assert run.recoveries() == 1, run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"memory"}, run.explain()


def test_groups_that_are_not_the_meshs(run_dir: Path) -> None:
    run = train(run_dir, "", "--replicas", "[[0, 1], [2, 3]]")
    assert run.code == 2, run.explain()
    assert "by the model's meshes the ranks that hold the same are ((0, 2), (1, 3))" in run.err


@pytest.mark.parametrize("variant", ["mixed", "tp+copied"])
def test_gradients_that_are_never_zeroed_are_refused(run_dir: Path, variant: str) -> None:
    """It is FSDP that adds them up, and not autograd."""
    run = train(run_dir, "", variant=f"{variant}+unzeroed")
    assert run.code == 1, run.explain()
    assert "UsageError: clip_grad_norm_ takes the norm of 'first.weight', and there is something from an upd" in run.err


BESIDE = {"RESILIENT_VERIFY_EVERY": "4", "RESILIENT_VERIFY_INPUTS": "neighbour"}


@pytest.mark.long
def test_a_device_that_always_errs_is_found_beside_its_replica(run_dir: Path) -> None:
    """Rank 1, from step 6 on. Its half of the model takes in what is wrong, and so does rank 0's: it is not named."""
    run = train(run_dir, "", variant="loaded+wrong", **BESIDE)
    assert run.code == 75, run.explain()
    verified = [(event["detail"]["step"], event["detail"]["beside"]) for event in run.of("verified")]
    assert verified == [(2, 1), (3, 1), (7, 2)], "until then all agreed"
    assert [event["detail"]["ranks"] for event in run.of("deviates")] == [[1, 3]], "of two, nothing says which"


@pytest.mark.long
@pytest.mark.parametrize("variant", ["loaded+accumulate", "loaded+tp+copied", "loaded+mixed+recompute", "loaded+async"])
def test_replicas_of_parts_come_to_the_same(run_dir: Path, torchrun: Plain, variant: str) -> None:
    run = train(run_dir, "", variant=variant, **BESIDE)
    ends_as(run, torchrun(variant))
    assert {tuple(event["detail"]["ranks"]) for event in run.of("verified")} == {()}
    assert {event["detail"]["beside"] for event in run.of("verified")} == {1}
    assert not run.of("unshared")
