"""TRE: a norm or a loss that can't be right costs one redone step, and then the bits are those of the undisturbed run.

A bit-exact redo computes the same norm twice; so where the second one is to be another, both are put in by the plan.
"""

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from identity import assert_identical
from running import Reference, Run, launch
from shared import Undisturbed

STEPS = 8
ALL_ON = "{TRE:1,ARF:1,HCCE:1,UCE:1}"


def anomalous(run_dir: Path, plan: str = "", *, variant: str = "base", ranks: int = 2, **environ: str) -> Run:
    flags = ("--faults", plan) if plan else ()
    environ = {"MS_ENABLE_TFT": ALL_ON, **environ}
    arguments = ("--steps", str(STEPS), "--variant", variant)
    return launch(run_dir, "train.py", *arguments, ranks=ranks, flags=flags, **environ)


def written(run: Run, what: str = "global_norm") -> dict[str, list[float]]:
    return json.loads((run.run_dir / f"abnormal_{what}.json").read_text())


def told(run: Run) -> list[tuple[int, Any, bool]]:
    details = [event["detail"] for event in run.of("anomaly")]
    return [(detail["step"], detail["values"][-1], detail["again"]) for detail in details]


def test_the_example_of_mindspore(tmp_path: Path, undisturbed: Reference) -> None:
    """Threshold 44, and step 2 has the norms 45.70 and, after the recovery, 45.706."""
    plan = "norm rank=0 step=2 value=45.70; norm rank=0 step=2 value=45.706"
    run = anomalous(tmp_path / "run", plan, MS_ENABLE_TFT="{TRE:1}", RESILIENT_NORM_THRESHOLD="44")
    assert_identical(run, undisturbed(ranks=2, steps=STEPS), ranks=2, recoveries=1)
    assert (run.run_dir / "abnormal_global_norm.json").read_text() == '{"2": [45.7, 45.706]}\n'
    assert told(run) == [(2, 45.7, False), (2, 45.706, True)]
    assert [event["detail"]["strategy"] for event in run.of("fault")] == ["TRE"]
    assert [event["detail"]["redone"] for event in run.of("session_end")] == [1, 1], "one step, on each rank"
    assert len(run.of("spawned")) == 2, "nobody was to be replaced"
    (again,) = run.of("redone")
    batch, device = (again["detail"].pop(key) for key in ("batch", "device"))
    assert (again["rank"], again["detail"]) == (0, {"what": "norm", "values": [45.7, 45.706], "same": False})
    assert batch
    assert device == f"{socket.gethostname()} cpu"
    assert run.err.count("run again from the same inputs, is 45.706, and was 45.7: a device has computed wrongly") == 1
    for value, what in (("45.7", "all run the step again"), ("45.706", "it is written down, and the step counts")):
        assert run.err.count(f"the gradient norm of step 2 is {value} on rank 0 (threshold 44)") == 1, run.err
        assert run.err.count(what) == 1, run.err


def test_a_spike_without_a_threshold(tmp_path: Path, undisturbed: Reference) -> None:
    """After sixteen updates a rank knows what is usual; one that was replaced does not yet."""
    plan = "norm rank=1 step=3 value=1000; norm rank=1 step=20 value=1000; kill rank=0 step=20 generation=1; "
    plan += "norm rank=0 step=22 value=1000 incarnation=1; loss rank=1 step=23 value=1000"
    flags, arguments = ("--faults", plan), ("--steps", "26", "--variant", "check")
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=flags, MS_ENABLE_TFT=ALL_ON)
    assert_identical(run, undisturbed(ranks=2, steps=26), ranks=2, recoveries=3)
    assert told(run) == [(20, 1000, False), (23, 1000, False)]
    assert "(usual before it: " in run.err
    values = {event["rank"]: event["detail"] for event in run.of("values")}
    lengths = {
        rank: {what: len(each) for what, each in found.items() if what != "first"} for rank, found in values.items()
    }
    assert lengths == {0: {"norm": 6, "loss": 6}, 1: {"loss": 26}}, "norms are the same on all ranks"
    assert [values[rank]["first"] for rank in (0, 1)] == [21, 1], "of rank 0's process that came to the end"
    assert values[0]["norm"].count(1000) == 1, "step 22 counts"
    assert values[0]["loss"] != values[1]["loss"][20:]


def test_a_spike_is_no_reason_to_leave_an_update_out(tmp_path: Path, undisturbed: Reference) -> None:
    """A replaced rank would not see what the lost one has seen, and the update would be there or not by chance."""
    flags, arguments = ("--faults", "norm rank=1 step=20 value=1000"), ("--steps", "26", "--variant", "leaves")
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=flags, MS_ENABLE_TFT=ALL_ON)
    assert_identical(run, undisturbed(ranks=2, steps=26), ranks=2, recoveries=0)
    assert not told(run)


def test_what_was_seen_is_kept_across_restarts(tmp_path: Path, undisturbed: Reference) -> None:
    limit = {"RESILIENT_NORM_THRESHOLD": "44"}
    first = anomalous(tmp_path / "run", "norm rank=0 step=2 value=45.70", **limit)
    assert_identical(first, undisturbed(ranks=2, steps=STEPS), ranks=2, recoveries=1)
    assert written(first) == {"2": [45.7]}, "the redo had another norm"
    (tmp_path / "run" / "samples_rank0.jsonl").unlink()
    (tmp_path / "run" / "samples_rank1.jsonl").unlink()
    plan = "norm rank=1 step=2 value=45.706; norm rank=1 step=5 value=44; kill rank=0 step=7"
    second = anomalous(tmp_path / "run", plan, **limit)
    assert_identical(second, undisturbed(ranks=2, steps=STEPS), ranks=2, recoveries=2)
    assert told(second) == [(2, 45.706, True), (5, 44, False)], "step 2 is known; and 44 is at the threshold"
    assert written(second) == {"2": [45.7, 45.706], "5": [44]}


def test_storage_that_does_not_answer_holds_nobody_up(tmp_path: Path, undisturbed: Reference) -> None:
    """The new file can't be opened: a pipe that nobody reads from. No recovery waits for it, and the end not long."""
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / ".abnormal_global_norm.json.new")
    flags = ("--shutdown-timeout", "1", "--faults", "norm rank=0 step=2 value=nan; kill rank=1 step=5")
    run = launch(tmp_path / "run", "train.py", "--steps", str(STEPS), ranks=2, flags=flags, MS_ENABLE_TFT=ALL_ON)
    assert_identical(run, undisturbed(ranks=2, steps=STEPS), ranks=2, recoveries=2)
    assert told(run) == [(2, "nan", False)]
    assert run.err.count("abnormal_global_norm.json: storage has not taken what is new in 1 s") == 1, run.err


def test_a_file_that_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "abnormal_global_norm.json").write_text('{"two": 45}')
    run = anomalous(tmp_path / "run")
    assert run.code == 2, run.explain()
    assert "abnormal_global_norm.json does not map steps to lists of numbers" in run.err


def test_a_loss_of_one_rank(tmp_path: Path, undisturbed: Reference) -> None:
    """By a plan: nothing else than that one value is wrong, so that nobody but rank 1 can see it."""
    plan = "loss rank=1 step=3 value=nan; loss rank=1 step=6 value=9.5"
    run = anomalous(tmp_path / "run", plan, variant="check", RESILIENT_LOSS_THRESHOLD="9")
    assert_identical(run, undisturbed(ranks=2, steps=STEPS), ranks=2, recoveries=2)
    assert told(run) == [(3, "nan", False), (6, 9.5, False)]
    assert {event["rank"] for event in run.of("anomaly")} == {1}
    found = written(run, "loss")
    assert [*found] == ["3", "6"]
    assert math.isnan(found["3"][0])


SUMMED_UP = 5
"""The step before is half a window, which is redone."""
EVERY_DAY = ("accumulate+check", "gan", "static", "unclipped")
BESIDES = [pytest.param(variant, marks=pytest.mark.long) for variant in ("base", "check", "undo+check", "two+view")]


@pytest.mark.parametrize("variant", [*EVERY_DAY, *BESIDES])
def test_a_nan_that_passes(tmp_path: Path, undisturbed: Reference, variant: str) -> None:
    """Really computed, once, by rank 1: the reduction gives it to all ranks' gradients and norms."""
    run = anomalous(tmp_path / "run", variant=f"nan+{variant}")
    ways = {*variant.split("+")}
    # Who looks at a loss trains no other model.
    reference = undisturbed(ranks=2, variant="+".join(sorted(ways - {"check"})) or "base", steps=STEPS)
    assert_identical(run, reference, ranks=2, recoveries=1, once=not ways & {"undo", "gan"})
    named = {detail["step"] for event in run.of("anomaly") if (detail := event["detail"])}
    assert named == {SUMMED_UP if "accumulate" in ways else 4}
    verdicts = [event["detail"] for event in run.of("redone")]
    assert verdicts
    assert not any(verdict["same"] for verdict in verdicts), "it passed"
    assert len(run.of("anomaly")) <= 2, "of ranks that see the same, one is told; of norm and loss, each rank's worst"


KILLS = [
    "phase=STOP generation={g}",
    "phase=REBUILD at=end generation={g}",
    "phase=RESTORE at=end generation={g}",
    "phase=COMPUTE at=backward step={s} generation={g}",
    "phase=READY at=before step={s} generation={g}",
    "phase=READY at=barrier step={s} generation={g}",
    "phase=UPDATING at=start step={s} generation={g}",
    "phase=APPLIED at=start step={s} generation={g}",
]
RUN_THRICE = 5
"""So many of these are before all ranks are READY in the redo: then there is another one."""


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_in_the_redo(tmp_path: Path, undisturbed: Reference, killed: int) -> None:
    """Rank 0 has seen it. The step is not run again for that a second time, also not by a new process."""
    plan = []
    for number, kill in enumerate(KILLS):
        step, generation, before = 2 + 2 * number, 2 * number + 1, number * (killed == 0)
        plan.append(f"norm rank=0 step={step} value=50 incarnation={before}")
        plan.append(f"kill rank={killed} {kill.format(s=step, g=generation)} incarnation={number}")
        if number < RUN_THRICE:
            for rank in (0, 1):
                process = number + 1 if rank == killed else 0
                plan.append(f"norm rank={rank} step={step} value=51 generation={generation + 1} incarnation={process}")
    steps = 2 * len(KILLS) + 3
    run = launch(
        tmp_path / "run", "train.py", "--steps", str(steps), ranks=2, flags=("--faults", "; ".join(plan)),
        MS_ENABLE_TFT=ALL_ON, RESILIENT_NORM_THRESHOLD="44",
    )  # fmt: skip
    assert [event["detail"]["strategy"] for event in run.of("fault")] == ["TRE", "ARF"] * len(KILLS), run.explain()
    in_recovery = sum("step=" not in kill for kill in KILLS)
    assert_identical(run, undisturbed(ranks=2, steps=steps), ranks=2, recoveries=2 * len(KILLS) - in_recovery)
    expected = {str(2 + 2 * n): [50, 51] if n < RUN_THRICE else [50] for n in range(len(KILLS))}
    assert written(run) == expected
    assert [again for _, _, again in told(run)].count(False) == len(KILLS)


def test_a_fault_of_each_kind_in_the_redo(tmp_path: Path, undisturbed: Reference) -> None:
    """Each of these steps is run again for its norm, and what hits the second run makes a third one."""
    faults = (
        "hcce rank=0",
        "uce rank=1 at=forward",
        "stop rank=2",
        "uce rank=0 phase=COMPUTE at=backward target=param",
    )
    plan = []
    for number, fault in enumerate(faults):
        step, generation = 1 + 2 * number, 2 * number + 1
        plan += [f"norm rank=1 step={step} value=nan generation={generation - 1}"]
        plan += [f"{fault} step={step} generation={generation}"]
    run = anomalous(tmp_path / "run", "; ".join(plan), ranks=3)
    assert run.code == 0, run.explain()
    assert [event["detail"]["kind"] for event in run.of("injected")] == [each.split()[0] for each in plan]
    assert run.digests() == undisturbed(ranks=3, steps=STEPS).digests()
    assert [event["detail"]["strategy"] for event in run.of("fault")] == [
        name for taken in ("HCCE", "UCE", "ARF", "UCE") for name in ("TRE", taken)
    ]


def test_a_scaler_that_overflows(tmp_path: Path, undisturbed: Reference) -> None:
    """Its gradients are not finite in step 3, as it wants to find out; in step 5 the norm is finite, and too large."""
    plan = "norm rank=0 step=5 value=45"
    run = anomalous(tmp_path / "run", plan, variant="scaler+clipped+check", RESILIENT_NORM_THRESHOLD="44")
    assert_identical(run, undisturbed(ranks=2, variant="scaler+clipped", steps=STEPS), ranks=2, recoveries=1)
    assert told(run) == [(5, 45, False)]


def test_a_checkpoint_is_under_way(tmp_path: Path, undisturbed: Reference) -> None:
    plan = "norm rank=0 step=3 value=nan; norm rank=1 step=4 value=nan"
    run = launch(
        tmp_path / "run", "train.py", "--steps", str(STEPS), "--save", "1", ranks=2,
        flags=("--faults", plan), MS_ENABLE_TFT=ALL_ON,
    )  # fmt: skip
    assert_identical(run, undisturbed(ranks=2, steps=STEPS), ranks=2, recoveries=2)
    assert run.of("saved"), run.explain()


def test_a_loop_that_calls_its_bodies(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    reference = undisturbed_of("called.py", "--steps", "8", ranks=2)
    plan = "norm rank=1 step=3 value=inf; kill rank=0 step=5"
    flags = ("--faults", plan)
    run = launch(tmp_path / "run", "called.py", "--steps", "8", ranks=2, flags=flags, MS_ENABLE_TFT=ALL_ON)
    assert (run.code, run.digests()) == (0, reference.digests()), run.explain()
    assert run.recoveries() == 2, run.explain()


@pytest.fixture
def left_out(undisturbed: Reference) -> Run:
    """Without us: a loop that leaves out the update of step 3 by itself."""
    return undisturbed(ranks=2, variant="leave-out", steps=STEPS)


def test_two_optimizers_leave_it_out(tmp_path: Path, undisturbed: Reference) -> None:
    left = undisturbed(ranks=2, variant="leave-out+two", steps=STEPS)
    run = anomalous(tmp_path / "run", "norm rank=0 step=3 value=inf", variant="leaves+two")
    assert_identical(run, left, ranks=2, recoveries=1)
    assert [event["step"] for event in run.of("update_left_out")] == [3, 3], "once on each rank"


@pytest.mark.parametrize(
    "kill",
    [
        "kill rank=0 phase=STOP generation=1",
        "kill rank=1 step=3 phase=UPDATING at=start generation=1",
        pytest.param("", marks=pytest.mark.long),
        pytest.param("kill rank=1 step=3 phase=READY at=barrier generation=1", marks=pytest.mark.long),
        pytest.param("kill rank=0 step=3 phase=UPDATING at=end generation=1", marks=pytest.mark.long),
    ],
)
def test_an_update_is_left_out(tmp_path: Path, left_out: Run, kill: str) -> None:
    plan = f"loss rank=1 step=3 value=nan; {kill}"
    run = anomalous(tmp_path / "run", plan, variant="leaves+check")
    recoveries = 1 + ("step=3" in kill)
    assert_identical(run, left_out, ranks=2, recoveries=recoveries)
    assert {event["step"] for event in run.of("update_left_out")} == {3}
    assert "it counts, without its update" in run.err


def test_what_was_left_out_is_left_out_by_a_later_run(tmp_path: Path, left_out: Run) -> None:
    anomalous(tmp_path / "run", "norm rank=1 step=3 value=nan", variant="leaves")
    for rank in (0, 1):
        (tmp_path / "run" / f"samples_rank{rank}.jsonl").unlink()
    run = anomalous(tmp_path / "run", variant="leaves")
    assert_identical(run, left_out, ranks=2, recoveries=0)


def test_without_the_switch_nothing_is_looked_at(tmp_path: Path) -> None:
    run = anomalous(tmp_path / "run", variant="nan+check", MS_ENABLE_TFT="{ARF:1}", RESILIENT_NORM_THRESHOLD="44")
    assert run.code == 0, run.explain()
    assert run.recoveries() == 0
    assert run.err.count("a threshold for the norm or the loss has no effect: MS_ENABLE_TFT has no TRE:1") == 1
    refused = anomalous(tmp_path / "other", "norm rank=0 step=2 value=45", MS_ENABLE_TFT="{ARF:1}")
    assert refused.code == 2, refused.explain()
    assert "MS_ENABLE_TFT has no TRE:1" in refused.err


def test_who_looks_at_nothing_is_told(tmp_path: Path) -> None:
    run = anomalous(tmp_path / "run", variant="scaler")
    assert run.code == 0, run.explain()
    assert run.err.count("two steps had neither a gradient norm nor a loss to look at") == 1, run.err
