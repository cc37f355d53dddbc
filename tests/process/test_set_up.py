"""Collectives before the loop: a process that takes a rank's place is given what the rank's first one was."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from running import JOBS, Run, launch
from shared import Undisturbed

SCRIPT = "setting_up.py"
TWICE = (
    "kill rank=1 step=2 phase=UPDATING; kill rank=1 step=4 phase=COMPUTE at=backward incarnation=1; "
    "kill rank=0 step=6 phase=COMPUTE; kill rank=2 step=6 phase=COMPUTE"
)
ONE = "kill rank=0 step=3 phase=COMPUTE; kill rank=1 step=5 phase=UPDATING"


def given(run: Run) -> dict[tuple[int, int], list[object]]:
    """(rank, attempt) -> what the collectives of each of its processes gave it."""
    found: dict[tuple[int, int], list[object]] = defaultdict(list)
    for line in run.out.splitlines():
        if line.startswith("SETUP "):
            _, rank, attempt, told = line.split(maxsplit=3)
            found[int(rank), int(attempt)].append(json.loads(told))
    return found


def same_for_all_processes(run: Run, *, incarnations: dict[tuple[int, int], int]) -> bool:
    told = given(run)
    counts = {who: len(each) for who, each in told.items()}
    return counts == incarnations and all(each == [each[0]] * len(each) for each in told.values())


def run_of(folder: Path, *arguments: str, plan: str, ranks: int = 2, **environ: str) -> Run:
    return launch(folder / "run", SCRIPT, *arguments, ranks=ranks, flags=("--faults", plan), **environ)


def test_every_verb_and_every_rank(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """One rank twice, then two at once. What they train on comes of it: the number of steps, a factor of the loss."""
    reference = undisturbed_of(SCRIPT, "usual", ranks=3)
    run = run_of(tmp_path, "usual", plan=TWICE, ranks=3)
    assert run.code == 0, run.explain()
    assert len(run.of("fault")) >= 3
    assert run.digests() == reference.digests(), run.explain()
    assert {event["step"] for event in run.of("session_end")} == {12}
    assert same_for_all_processes(run, incarnations={(0, 0): 2, (1, 0): 3, (2, 0): 2}), run.out
    other = given(reference)
    assert all(told != other[who] for who, told in given(run).items()), "pids and the like differ from run to run"


def test_all_start_again_with_a_record_of_their_own(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    others = "; ".join(f"kill rank={rank} phase=STOP" for rank in (1, 2))  # in the recovery that it hears of first
    everybody = f"kill rank=0 step=5 phase=COMPUTE; {others}"
    reference = undisturbed_of(SCRIPT, "usual", ranks=3)
    # Who of them died last was not replaced before all started again: it is the one whose second process is hit.
    again = "; ".join(f"kill rank={rank} step=8 phase=COMPUTE incarnation=1" for rank in (1, 2))
    plan = f"{everybody}; {again}"
    run = run_of(tmp_path, "usual", "--save", "2", plan=plan, ranks=3)
    assert run.code == 0, run.explain()
    assert [event["detail"]["state_lost"] for event in run.of("restart_all")] == [True], run.explain()
    assert run.digests() == reference.digests(), run.explain()
    told = given(run)
    assert sorted(len(told[rank, 1]) for rank in range(3)) == [1, 1, 2], run.out
    for rank in range(3):
        assert told[rank, 1] == [told[rank, 1][0]] * len(told[rank, 1])
        assert told[rank, 1][0] != told[rank, 0][0]


def test_collectives_between_the_session_and_the_loop(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    reference = undisturbed_of(SCRIPT, "between", ranks=2)
    run = run_of(tmp_path, "between", plan=ONE)
    assert run.code == 0, run.explain()
    assert run.digests() == reference.digests()
    assert same_for_all_processes(run, incarnations={(0, 0): 2, (1, 0): 2}), run.out


def test_a_directory_that_rank_0_chooses(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """By what is there already: rank 0's second process would choose another one, and is given the first one's."""
    reference = undisturbed_of(SCRIPT, "logged", ranks=2)
    run = run_of(tmp_path, "logged", plan=ONE)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2, run.explain()
    assert same_for_all_processes(run, incarnations={(0, 0): 2, (1, 0): 2}), run.out
    assert [each.name for each in (run.run_dir / "lightning_logs").iterdir()] == ["version_9"]
    assert run.digests() == reference.digests(), run.explain()


def test_large_results_go_into_what_is_registered(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """By the user's own broadcast, by DDP's constructor, by a reduction of what stands in `state`."""
    reference = undisturbed_of(SCRIPT, "registered", ranks=2)
    run = run_of(tmp_path, "registered", plan=ONE)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2
    assert run.digests() == reference.digests()


@pytest.mark.parametrize("story", ["passing", "drawn", "replicated", "twice"])
def test_what_is_read_of_large_results_is_read_again(tmp_path: Path, story: str, undisturbed_of: Undisturbed) -> None:
    """A script's own, or what DDP's constructor hands out, also where another wrapper has averaged gradients before."""
    reference = undisturbed_of(SCRIPT, story, ranks=2)
    run = run_of(tmp_path, story, plan=ONE)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2
    assert run.digests() == reference.digests()
    assert story == "twice" or same_for_all_processes(run, incarnations={(0, 0): 2, (1, 0): 2})


@pytest.mark.parametrize("story", ["masked", "compared", "trained", "halved"])
def test_what_is_left_of_them_is_given_again(tmp_path: Path, story: str, undisturbed_of: Undisturbed) -> None:
    """If it is small. Of a large result, of weights that DDP's constructor hands out, and of what its passes sum up."""
    reference = undisturbed_of(SCRIPT, story, ranks=2)
    run = run_of(tmp_path, story, plan=ONE)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2
    assert run.digests() == reference.digests()
    mine, at_first = given(run), given(reference)
    assert set(mine) == set(at_first) == {(0, 0), (1, 0)}
    for rank, told in mine.items():
        assert told[-1] == at_first[rank][-1], "at the end"
        if story in ("trained", "halved"):
            assert told == [at_first[rank][0]] * 2 + at_first[rank][1:], "and before the loop"


@pytest.mark.parametrize(
    ("story", "line", "words"),
    [
        ("large", "dist.broadcast(table, src=0)", "calls broadcast(float32[20000], rootRank 0) before the loop"),
        ("unregistered", "teacher = Dist", "wraps a model by DistributedDataParallel that is not registered whole"),
        (
            "weighed",
            "mask = mask.float()",
            "computes something before the loop of what came of broad",
        ),
        (
            "collected",
            "start = start.repeat",
            "computes something before the loop of what came of DistributedDataParallel's broadcast(float32[",
        ),
        ("filled", "set_model_state_dict(teacher", " of what came of broadcast(float32[16, 1250], rootRank 0) at "),
        ("placed", "distribute_tensor(whole", " of what came of "),
        ("handed", "distribute_tensor(torch", "is still there, and does not lie in registered tensors"),
        ("unwaited", "request = dist.irecv(", "calls recv(float32[1], "),
    ],
)
def test_what_a_replacement_could_not_have_is_refused_at_once(
    tmp_path: Path, story: str, line: str, words: str
) -> None:
    run = launch(tmp_path / "run", SCRIPT, story, ranks=2)
    assert run.code == 2, run.explain()
    told = next(each for each in run.err.splitlines() if "resilient-run: the job ends" in each)
    text = (JOBS / SCRIPT).read_text().splitlines()
    function = {"weighed": "masked", "collected": "compared"}.get(story, story)
    start = next(number for number, each in enumerate(text) if each.startswith(f"def {function}("))
    number = next(number for number in range(start, len(text)) if line in text[number])
    assert f"{SCRIPT}:{number + 1} " in told, told
    assert words in told, told
    assert run.of("started") == []


@pytest.mark.parametrize(
    ("how", "line", "words"),
    [
        ("read", "weight.std()", "reads a value of them"),
        ("kept", "weight * 2", "computes of them is still there, and not registered"),
    ],
)
def test_other_weights_than_the_first_rank_has_handed_out(tmp_path: Path, how: str, line: str, words: str) -> None:
    """Its replacement hands out nothing any more, and has drawn others."""
    run = run_of(tmp_path, "unseeded", "--how", how, plan="kill rank=0 step=3 phase=COMPUTE")
    assert run.code == 2, run.explain()
    told = next(each for each in run.err.splitlines() if "resilient-run: the job ends" in each)
    text = (JOBS / SCRIPT).read_text().splitlines()
    start = text.index("def unseeded(asked: argparse.Namespace) -> None:")
    made, used = (
        f"{SCRIPT}:{next(number for number in range(start, len(text)) if what in text[number]) + 1}"
        for what in ("DistributedDataParallel", line)
    )
    assert f"{made} than its predecessor had there (drawn without a seed?)" in told, told
    assert f"{used} {words}" in told, told
    assert run.of("saved"), run.explain()


def test_other_weights_of_which_nothing_is_computed(tmp_path: Path) -> None:
    run = run_of(tmp_path, "unseeded", plan=ONE)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2


def test_it_is_taken_where_nobody_is_ever_replaced(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", SCRIPT, "large", ranks=2, MS_ENABLE_TFT="{TTP:1}")
    assert run.code == 0, run.explain()


DIFFERENCES = {
    "order": "calls broadcast(float32[2], rootRank 0) where its predecessor called allreduce(float32[1], reduceOp SUM)",
    "shape": "calls allreduce(float32[2], reduceOp SUM) where its predecessor called allreduce(float32[1]",
    "dtype": "calls allreduce(float64[1], reduceOp SUM) where its predecessor called allreduce(float32[1]",
    "operation": "calls allreduce(float32[1], reduceOp MAX) where its predecessor called allreduce(float32[1], ",
    "fewer": "it comes to the loop without broadcast(float32[2], rootRank 0), call 2 of process group",
    "more": "and its predecessor made no such call there",
    "caught": "calls barrier(",
}


OF_EVERY_DAY = ("order", "fewer", "more", "caught")
"""Of the others each is another word of the same comparison. What comes after the refusal is seen once a day."""


@pytest.mark.parametrize(
    "how", [pytest.param(each, marks=() if each in OF_EVERY_DAY else pytest.mark.long) for each in DIFFERENCES]
)
def test_a_replacement_that_does_something_else_is_refused(tmp_path: Path, how: str) -> None:
    """The survivor's state is saved, and the job ends; nothing was guessed."""
    arguments = ("differing", "--how", how)
    run = run_of(tmp_path, *arguments, plan="kill rank=1 step=3 phase=COMPUTE")
    assert run.code == 2, run.explain()
    told = [each for each in run.err.splitlines() if "resilient-run: the job ends" in each]
    assert len(told) == 1
    assert "rank 1 can't be replaced, since its script does not do again what it did at first" in told[0]
    assert DIFFERENCES[how] in told[0], told
    assert told[0].count(f"{SCRIPT}:") == (1 if how in ("fewer", "more") else 2), told
    assert [each["detail"]["commits"] for each in run.of("saved")] == [3], run.explain()
    if how in OF_EVERY_DAY[1:]:
        return
    again = launch(tmp_path / "run", SCRIPT, *arguments, ranks=2, flags=("--faults", ""))
    assert again.code == 0, again.explain()
    assert {each["detail"]["commits"] for each in again.of("restored")} == {3}, "it goes on from there"


def built(folder: Path, story: str, *, standbys: tuple[str, ...]) -> Run:
    arguments = (story, "--standby-at", *standbys)
    return run_of(folder, *arguments, plan=ONE, RESILIENT_STANDBY_DEPTH="built")


def test_a_standby_waits_in_front_of_the_collectives(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """What stands above: DDP's constructor, passes that warm up, a barrier. Nobody answers those."""
    reference = undisturbed_of(SCRIPT, "warmed", ranks=2)
    run = built(tmp_path, "warmed", standbys=("1", "4"))
    assert run.code == 0, run.explain()
    assert [each["detail"]["start"] for each in run.of("spawned")] == ["forked"] * 2 + ["built"] * 2, run.explain()
    assert run.digests() == reference.digests()
    assert same_for_all_processes(run, incarnations={(0, 0): 2, (1, 0): 2}), run.out


def test_a_standby_that_comes_to_a_collective_is_given_up(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """It is no rank yet, so nobody could say what it is given."""
    reference = undisturbed_of(SCRIPT, "before", ranks=2)
    run = built(tmp_path, "before", standbys=("1", "4"))
    assert run.code == 0, run.explain()
    assert [each["detail"]["start"] for each in run.of("spawned")] == ["forked"] * 4, run.explain()
    (shallow,) = run.of("standby_shallow")
    assert "calls allreduce before rt.standby_point(): move it behind" in shallow["detail"]["reason"]
    assert f"{SCRIPT}:" in shallow["detail"]["reason"]
    assert run.digests() == reference.digests()
    assert same_for_all_processes(run, incarnations={(0, 0): 2, (1, 0): 2}), run.out


def test_a_script_that_communicates_before_the_import(tmp_path: Path) -> None:
    """A script that resilient-run starts has the import behind it."""
    plan = ("--faults", "kill rank=1 step=3 phase=COMPUTE")
    run = launch(tmp_path / "run", "late_import.py", ranks=2, flags=plan)
    assert run.code == 0, run.explain()
    assert sorted(each for each in run.out.splitlines() if each.startswith("COUNT")) == [
        "COUNT 0 3.0",
        "COUNT 1 3.0",
        "COUNT 1 3.0",
    ]


@pytest.mark.parametrize("by", ["a switch", pytest.param("a command", marks=pytest.mark.long)])
def test_whose_group_is_older_than_the_import_is_told(tmp_path: Path, by: str) -> None:
    """A command that runs a script has no import behind it. With a switch of ours it is in a fork as it is there."""
    script = str(JOBS / "late_import.py")
    if by == "a switch":
        late = launch(tmp_path / "run", script, ranks=2, RESILIENT_WRAP_BACKEND="0")
    else:
        late = launch(tmp_path / "run", sys.executable, script, ranks=2, flags=("--no-python",))
    assert late.code == 2, late.explain()
    assert "import resilient_train before init_process_group" in late.err
