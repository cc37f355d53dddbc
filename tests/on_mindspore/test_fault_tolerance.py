"""Our own callback for ``Model.train``: saved, resumed, and at the end the bits of the run that nothing has disturbed.

Where a story needs a process that dies or hangs, it is ``saved_job.py``; the others run here, which spares the import.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import saved_job
from mindspore import nn
from saved_job import BATCHES, EPOCHS, Plan, dataset, model, train

from documented import ROOT, blocks
from resilient_train.errors import CheckpointError, ConfigError, LayoutError, StateError, StorageError, UsageError
from resilient_train.integrations.mindspore import ExceptionCheckpoint, FaultTolerance, ttp_directory

HERE = Path(__file__).parent
MODES = ("PYNATIVE", "GRAPH")
LAST = EPOCHS * BATCHES


class Job:
    """All ranks of one life of a job."""

    def __init__(self, folder: Path, world_size: int = 1, **plan: Any) -> None:
        self.folder, self.processes = folder, []
        for rank in range(world_size):
            given = json.dumps({"folder": str(folder), "rank": rank, "world_size": world_size, **plan})
            with self.log(rank).open("ab") as log:
                command = [sys.executable, str(HERE / "saved_job.py"), given]
                started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GLOG_v": "3"})
                self.processes.append(started)

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def wait(self) -> list[int]:
        return [process.wait(timeout=100) for process in self.processes]

    def wait_for(self, text: str, rank: int = 0) -> None:
        deadline = time.monotonic() + 60
        while text not in self.log(rank).read_text():
            assert time.monotonic() < deadline, self.explain()
            assert self.processes[rank].poll() is None, self.explain()
            time.sleep(0.01)

    def explain(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def ends(self) -> list[str]:
        return [(self.folder / f"end{rank}").read_text() for rank in range(len(self.processes))]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(*args: Any, **plan: Any) -> Job:
        made.append(Job(*args, **plan))
        return made[-1]

    yield start
    for process in (process for each in made for process in each.processes):
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    ms.dataset.config.set_fast_recovery(True)


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(mode: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    ms.dataset.config.set_fast_recovery(True)
    return train(Plan(str(tmp_path_factory.mktemp("undisturbed")), mode))


@pytest.fixture(scope="module")
def undisturbed_two(mode: str, run: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    job = run(tmp_path_factory.mktemp("undisturbed"), 2, mode=mode)
    assert job.wait() == [0, 0], job.explain()
    assert len(set(job.ends())) == 1
    return job.ends()


def saved(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("ttp*/**/*") if path.is_file())


def begin_again(folder: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Where the next life begins, and its end."""
    capsys.readouterr()
    ms.dataset.config.set_fast_recovery(True)
    end = train(Plan(str(folder), mode))
    return int(capsys.readouterr().out.split("start ")[1].split()[0]), end


def test_sigterm_in_the_middle_of_an_epoch(
    tmp_path: Path, run: Callable[..., Job], mode: str, undisturbed: str
) -> None:
    """From outside; and a second one while it saves."""
    job = run(tmp_path, mode=mode, faults={"term: read": [0, 0], "term behind": [0, 8]})
    assert job.wait() == [128 + signal.SIGTERM], job.explain()
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_9/rank_0/ttp_rank_0-2_3.ckpt"]
    job = run(tmp_path, mode=mode, life=1)
    assert job.wait() == [0], job.explain()
    assert "start 9\n" in job.log(0).read_text()
    assert job.ends() == [undisturbed]


def test_two_ranks_of_which_one_is_told(
    tmp_path: Path, run: Callable[..., Job], mode: str, undisturbed_two: list[str]
) -> None:
    """They stop behind the same step, and nobody is left alone in a collective."""
    groups = [[0, 1]] if mode == "GRAPH" else None  # one of two replicas saves, or each rank
    job = run(tmp_path, 2, mode=mode, groups=groups, faults={"term before": [1, 8]})
    assert job.wait() == [75, 128 + signal.SIGTERM], job.explain()
    files = [f"ttp_saved_checkpoints-step_9/rank_{each}/ttp_rank_{each}-2_3.ckpt" for each in range(2)]
    assert saved(tmp_path) == (files[:1] if groups else files)
    job = run(tmp_path, 2, mode=mode, groups=groups, life=1)
    assert job.wait() == [0, 0], job.explain()
    assert job.ends() == undisturbed_two


def test_two_ranks_of_which_one_fails(tmp_path: Path, run: Callable[..., Job]) -> None:
    """It is not the one that saves when all stop; but its replica may be gone, so it saves by itself."""
    job = run(tmp_path, 2, groups=[[0, 1]], faults={"raise before": [1, 8]})
    assert job.processes[1].wait(timeout=60) == 1
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_8/rank_1/ttp_rank_1-2_2.ckpt"], job.explain()
    job.processes[0].kill()
    job = run(tmp_path, 2, groups=[[0, 1]], life=1)
    assert job.wait() == [0, 0], job.explain()
    assert all("start 8\n" in job.log(rank).read_text() for rank in range(2))


@pytest.mark.parametrize("mode", ["PYNATIVE"], indirect=True)
@pytest.mark.parametrize("point", ["half", "read", "publish"])
def test_killed_while_it_saves(
    tmp_path: Path, run: Callable[..., Job], capsys: pytest.CaptureFixture[str], point: str, undisturbed: str, mode: str
) -> None:
    """What is half done is not taken, does not stand in the way, and is not mixed with what comes later."""
    job = run(tmp_path, mode=mode, faults={f"kill: {point}": [0, 0], "term before": [0, 8]})
    assert job.wait() == [-signal.SIGKILL], job.explain()
    assert not ttp_directory.complete(tmp_path)
    with pytest.raises(SystemExit):
        train(Plan(str(tmp_path), mode, faults={"usr1 before": [0, 8]}))
    assert "start 0" in capsys.readouterr().out
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_8/rank_0/ttp_rank_0-2_2.ckpt"]
    assert begin_again(tmp_path, mode, capsys) == (8, undisturbed)


def test_one_of_two_is_killed_while_it_saves(tmp_path: Path, run: Callable[..., Job]) -> None:
    """Half of the state is no checkpoint, whoever has written it."""
    job = run(tmp_path, 2, faults={"kill: read": [0, 0], "term before": [0, 8]})
    assert job.processes[0].wait(timeout=60) == -signal.SIGKILL
    job.wait_for("part of step 9 is saved", rank=1)
    job.processes[1].kill()
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_9_tmp/rank_1/ttp_rank_1-2_3.ckpt"]
    job = run(tmp_path, 2, life=1)
    assert job.wait() == [0, 0], job.explain()
    assert all("start 0\n" in job.log(rank).read_text() for rank in range(2))
    assert not saved(tmp_path)


def test_a_step_that_never_ends(
    tmp_path: Path, run: Callable[..., Job], capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """It hangs in native code, where no handler of Python's can run: a copy in host memory is saved."""
    options = {"snapshot_every": 3, "step_grace_s": 0.2}
    os.environ["RESILIENT_EXIT_GRACE_S"] = "1.5"
    try:
        job = run(tmp_path, mode=mode, faults={"hang": [0, 8]}, options=options)
    finally:
        del os.environ["RESILIENT_EXIT_GRACE_S"]
    job.wait_for("hangs")
    job.processes[0].send_signal(signal.SIGTERM)
    assert job.wait() == [75], job.explain()
    assert saved(tmp_path)[-1] == "ttp_saved_checkpoints-step_6/rank_0/ttp_rank_0-1_6.ckpt"
    assert begin_again(tmp_path, mode, capsys)[0] == 6


@pytest.mark.parametrize(
    ("fault", "step"),
    [("begin", 7), ("raise before", 8), ("raise behind", 8), ("raise behind", LAST), ("in the step", 9)],
)
def test_an_error_of_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, step: int, undisturbed: str, mode: str
) -> None:
    """Of callbacks before and behind ours, and in a step whose optimizer has not begun to write."""
    with pytest.raises((ValueError, RuntimeError), match=r"step|callback"):
        train(Plan(str(tmp_path), mode, faults={fault: [0, step]}))
    behind = step - 1 if fault in ("begin", "in the step") else step
    assert [each for each, _ in ttp_directory.complete(tmp_path)] == [behind]
    start, end = begin_again(tmp_path, mode, capsys)
    assert start == behind
    assert end == undisturbed


def stopped_at(folder: Path, step: int, **plan: Any) -> Path:
    with pytest.raises(SystemExit) as left:
        train(Plan(str(folder), faults={"usr1 before": [0, step]}, **plan))
    assert left.value.code == 75
    return next(iter(ttp_directory.parts(ttp_directory.directory(folder, step)).values()))


def damage(file: Path, kind: str) -> None:
    data = bytearray(file.read_bytes())
    file.chmod(0o600)
    if kind == "a byte":
        data[len(data) // 2] ^= 1
    elif kind == "the mark of the CRC":
        data[-12] ^= 1
    elif kind == "the CRC":
        data[-1] ^= 1
    elif kind == "cut":
        data = data[: len(data) // 3]
    elif kind == "empty":
        data.clear()
    elif kind == "longer":
        data += b"more"
    file.write_bytes(data)
    if kind == "gone":
        file.unlink()


@pytest.mark.parametrize("kind", ["a byte", "the mark of the CRC", "the CRC", "cut", "empty", "longer", "gone"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Its step can be saved again. If none is left, nobody starts from nothing."""
    first = stopped_at(tmp_path, 4)
    damage(stopped_at(tmp_path, 8), kind)
    damage(stopped_at(tmp_path, 8), kind)
    assert "start 4" in capsys.readouterr().out
    damage(first, kind)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"all are damaged .*step_4"):
            train(Plan(str(tmp_path)))
    assert caplog.text.count("the checkpoint before it is taken") == 3


def test_a_stranger_among_the_files(tmp_path: Path) -> None:
    """A file that is another step's, or rank's, or none of ours is not taken for what its name says."""
    file = stopped_at(tmp_path, 4)
    file.parent.parent.rename(ttp_directory.directory(tmp_path, 5))
    with pytest.raises(CheckpointError, match="all are damaged"):
        train(Plan(str(tmp_path)))


def test_after_steps_a_resume_is_in_place(tmp_path: Path, undisturbed: str, mode: str) -> None:
    """MindSpore's own ways of loading would leave a compiled optimizer on old buffers."""
    stopped_at(tmp_path, 8, mode=mode)
    plan = Plan(str(tmp_path), mode)
    trained = model(plan, ms.train.Callback())
    trained.train(1, dataset(0, 1), dataset_sink_mode=False)
    own, data = FaultTolerance(tmp_path), dataset(0, 1)
    start = own.resume(trained, data)
    trained.train(EPOCHS, data, callbacks=[own], dataset_sink_mode=False, initial_epoch=start.epoch)
    assert saved_job.digest(trained) == undisturbed


def other_model() -> nn.Cell:
    network = nn.Dense(48, 1)
    return nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params()))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    stopped_at(tmp_path, 8)
    plan = Plan(str(tmp_path))
    trained, data = model(plan, ms.train.Callback()), dataset(0, 1)
    before = saved_job.digest(trained)
    with pytest.raises(LayoutError, match="another model"):
        FaultTolerance(tmp_path).resume(other_model(), data)
    with pytest.raises(UsageError, match="6 batches an epoch and seed 7, and this one has 3 and 7"):
        FaultTolerance(tmp_path).resume(trained, data.batch(2))
    with pytest.raises(UsageError, match="of 1 ranks, and this job has 2"):
        FaultTolerance(tmp_path, rank=0, world_size=2).resume(trained, data)
    ms.set_seed(8)
    with pytest.raises(UsageError, match="and seed 7, and this one has 6 and 8"):
        FaultTolerance(tmp_path).resume(trained, data)
    assert saved_job.digest(trained) == before
    assert data.get_init_step() == 0


def test_a_training_begins_where_its_data_does(tmp_path: Path) -> None:
    stopped_at(tmp_path, 8)
    trained = model(Plan(str(tmp_path)), ms.train.Callback())

    def fit(own: FaultTolerance, data: Any, **options: Any) -> None:
        trained.train(EPOCHS, data, callbacks=[own], **options)

    with pytest.raises(UsageError, match=r"has a checkpoint of step 8, .* call resume\(\) first"):
        fit(FaultTolerance(tmp_path), dataset(0, 1))
    own, data = FaultTolerance(tmp_path), dataset(0, 1)
    assert own.resume(trained, data) == (8, 1)
    with pytest.raises(UsageError, match=r"data begins in epoch 1, and training in 0 .*initial_epoch"):
        fit(own, data)
    with pytest.raises(UsageError, match=r"one Model.train"):
        fit(own, data)
    own = FaultTolerance(tmp_path)
    own.resume(trained, dataset(0, 1))
    with pytest.raises(UsageError, match="another dataset"):
        fit(own, dataset(0, 1), initial_epoch=1)
    ms.dataset.config.set_seed(5489)
    with pytest.raises(ConfigError, match="shuffled without a seed"):
        fit(FaultTolerance(tmp_path / "other"), dataset(0, 1))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not list((tmp_path / "other").glob("ttp*"))


def test_other_callbacks_see_absolute_steps_and_iterators_begin_anew(tmp_path: Path) -> None:
    stopped_at(tmp_path, 8)
    seen: list[int] = []
    other = ms.train.Callback()
    other.on_train_step_end = lambda context: seen.append(context.original_args().cur_step_num)
    trained, data = model(Plan(str(tmp_path)), ms.train.Callback()), dataset(0, 1)
    own = FaultTolerance(tmp_path)
    start = own.resume(trained, data)
    trained.train(EPOCHS, data, callbacks=[own, other], initial_epoch=start.epoch)
    assert seen == list(range(9, LAST + 1))
    assert len(list(data.create_tuple_iterator(num_epochs=1))) == BATCHES


class Half(nn.Optimizer):
    """Fails when it has written one of its parameters."""

    def construct(self, gradients: Any) -> None:
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        self.parameters[0].copy_(self.parameters[0] + 1)
        if int(self.global_step.asnumpy()[0]) == 5:
            raise ValueError("half of an update")


@pytest.mark.parametrize("snapshot_every", [0, 2])
def test_half_an_update_is_not_saved(tmp_path: Path, snapshot_every: int, caplog: pytest.LogCaptureFixture) -> None:
    """But a copy of an earlier step is, if there is one."""
    ms.set_seed(7)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = nn.Dense(48, 1)
    trained = ms.train.Model(network, nn.MSELoss(), Half(0.1, network.trainable_params()))
    own = FaultTolerance(tmp_path, snapshot_every=snapshot_every)
    with pytest.raises(ValueError, match="half of an update"):
        trained.train(1, dataset(0, 1), callbacks=[own])
    assert "the optimizer has begun to write" in caplog.text
    assert [step for step, _ in ttp_directory.complete(tmp_path)] == ([4] if snapshot_every else [])


def test_running_means_are_in_doubt_after_a_failed_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ms.set_seed(7)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = nn.SequentialCell(nn.Dense(48, 4), nn.BatchNorm1d(4), nn.Dense(4, 1))

    steps = iter([True, True, False])

    class Fails(nn.MSELoss):
        def construct(self, *given: Any) -> Any:
            if not next(steps):
                raise ValueError("a loss")
            return super().construct(*given)

    trained = ms.train.Model(network, Fails(), nn.SGD(network.trainable_params()))
    with pytest.raises(ValueError, match="a loss"):
        trained.train(1, dataset(0, 1), callbacks=[FaultTolerance(tmp_path)])
    assert "the step may have written 1.moving_mean" in caplog.text
    assert not saved(tmp_path)


def test_which_ranks_hold_the_same(tmp_path: Path) -> None:
    from resilient_train.integrations.mindspore.replica_groups import check_groups, found_groups

    plain, means = nn.Dense(2, 2), nn.SequentialCell(nn.Dense(2, 2), nn.BatchNorm1d(2))
    assert found_groups(plain, 1)[0] == ((0,),)
    groups, why = found_groups(plain, 2)
    assert groups == ((0,), (1,))
    assert why == "parallel_mode is stand_alone: give replica_groups if ranks hold the same"
    try:
        ms.set_auto_parallel_context(parallel_mode="data_parallel")
        assert found_groups(plain, 2)[0] == ((0, 1),)
        assert found_groups(means, 2)[0] == ((0,), (1,))
        ms.set_auto_parallel_context(enable_parallel_optimizer=True)
        assert found_groups(plain, 2)[0] == ((0,), (1,))
    finally:
        ms.reset_auto_parallel_context()
    with pytest.raises(ConfigError, match="each of the ranks 0 to 2 must be in one group"):
        check_groups([[0, 1]], 3)


def test_a_worker_of_the_data_dies_of_its_own_sigterm(tmp_path: Path) -> None:
    """It is a fork: its signals are not the job's, nor written where the job's are."""
    from resilient_train.integrations.mindspore.preemption import Preemption

    late: list[str] = []
    preemption = Preemption(lambda: late.append("late"), 0.01, lambda: late.append("over"), 0.02)
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    time.sleep(0.1)
    preemption.close()
    assert not late
    assert preemption.got is None


TRE = {"MS_ENABLE_TFT": "{TTP:1,TRE:2}", "RESILIENT_LOSS_THRESHOLD": "44"}


@pytest.mark.parametrize("snapshot_every", [1, 4])
@pytest.mark.parametrize("fault", ["nan loss", "spike"])
def test_an_abnormal_loss_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, snapshot_every: int, mode: str, undisturbed: str
) -> None:
    for name, value in TRE.items():
        monkeypatch.setenv(name, value)
    options = {"snapshot_every": snapshot_every}
    assert train(Plan(str(tmp_path), mode, faults={fault: [0, 8]}, options=options)) == undisturbed
    ((step, values),) = json.loads((tmp_path / "abnormal_loss.json").read_text()).items()
    assert step == "8"
    assert len(values) == 2
    assert not values[0] < 44
    assert values[1] < 44


def test_an_update_with_a_gradient_that_is_no_number_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str, mode: str
) -> None:
    """It is noticed one step later, by the loss; the copy is from before it."""
    for name, value in TRE.items():
        monkeypatch.setenv(name, value)
    assert (
        train(Plan(str(tmp_path), mode, faults={"nan gradient": [0, 8]}, options={"snapshot_every": 7})) == undisturbed
    )


def test_what_is_abnormal_again_is_the_datas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    for name, value in TRE.items():
        monkeypatch.setenv(name, value)
    plan = Plan(str(tmp_path), mode, faults={"spike": [0, 8]}, options={"snapshot_every": 1}, always=True)
    assert train(plan) == undisturbed
    assert capsys.readouterr().out.count("ended 8\n") == 2
    ((step, values),) = json.loads((tmp_path / "abnormal_loss.json").read_text()).items()
    assert (step, len(values), len(set(values))) == ("8", 2, 1)


@pytest.mark.parametrize("mode", ["PYNATIVE"], indirect=True)
def test_two_ranks_go_back_together(
    tmp_path: Path, run: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, undisturbed_two: list[str], mode: str
) -> None:
    """Only one of them has seen it; and is told to stop at the same time."""
    for name, value in TRE.items():
        monkeypatch.setenv(name, value)
    options = {"snapshot_every": 1}
    faults = {"nan loss": [1, 8], "term before": [0, 8]}
    job = run(tmp_path, 2, mode=mode, faults=faults, options=options)
    assert job.wait() == [143, 75], job.explain()
    assert "back from step 9 to step 7" in job.log(0).read_text(), job.explain()
    job = run(tmp_path, 2, mode=mode, life=1, options=options)
    assert job.wait() == [0, 0], job.explain()
    assert job.ends() == undisturbed_two


def beside_another(folder: Path, **options: Any) -> FaultTolerance:
    """Rank 0 of two; all that there is of the other is its sign in the folder."""
    (folder / ".ttp_asked").mkdir()
    (folder / ".ttp_asked/here_1").touch()
    return FaultTolerance(folder, rank=0, world_size=2, **options)


@pytest.mark.parametrize("stops", [False, True], ids=["the last step", "the step at whose end all stop"])
def test_too_late_to_go_back_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stops: bool
) -> None:
    """Then it is an error, and what is saved is from before it."""
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1,TRE:1}")
    own = beside_another(tmp_path, replica_groups=[[0, 1]], snapshot_every=1)
    at, seen = (5 if stops else 6), ms.train.Callback()

    def step_end(context: Any) -> None:
        params = context.original_args()
        if params.cur_step_num == at:
            params.net_outputs = ms.Tensor(np.nan)
            if stops:
                (tmp_path / f".ttp_asked/turn_0_{at}_-1_1").touch()

    seen.on_train_step_end = step_end
    trained = model(Plan(str(tmp_path)), ms.train.Callback())
    with pytest.raises(StateError, match=rf"loss of step {at} is nan, .* too late for all ranks"):
        own.train(trained, 1, dataset(0, 1), callbacks=seen)
    assert [step for step, _ in ttp_directory.complete(tmp_path)] == [at - 1]


def test_a_rank_that_is_not_waited_for_is_told(tmp_path: Path) -> None:
    """What is agreed upon needs collectives in each step."""
    own = beside_another(tmp_path, replica_groups=[[0, 1]])
    other = ms.train.Callback()
    other.on_train_step_end = lambda context: (
        context.original_args().cur_step_num == 4 and (tmp_path / ".ttp_asked/turn_0_3_-1_1").touch()
    )
    trained = model(Plan(str(tmp_path)), ms.train.Callback())
    with pytest.raises(UsageError, match="ranks don't wait for each other in each step"):
        trained.train(1, dataset(0, 1), callbacks=[other, own])


def test_a_part_that_others_do_not_join_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_EXIT_GRACE_S", "0.3")
    own = beside_another(tmp_path, step_grace_s=0.2)
    other = saved_job.Faults(Plan(str(tmp_path), faults={"usr1 before": [0, 3]}), "before")
    trained = model(Plan(str(tmp_path)), ms.train.Callback())
    with pytest.raises(StorageError, match=r"has waited 0.3 s for .*step_4: other ranks have not written"):
        trained.train(1, dataset(0, 1), callbacks=[other, own])
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_4_tmp/rank_0/ttp_rank_0-1_4.ckpt"]


def test_storage_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ms, "save_checkpoint", full)
    with pytest.raises(StorageError, match="No space left"):
        train(Plan(str(tmp_path), faults={"usr1 before": [0, 3]}))
    with pytest.raises(ValueError, match="of a callback") as failed:
        train(Plan(str(tmp_path), faults={"raise before": [0, 3]}))
    assert "nothing was saved" in failed.value.__notes__[0]
    assert not saved(tmp_path)


def test_what_is_written_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = ms.save_checkpoint

    def other_bits(entries: list[dict[str, Any]], *rest: Any, **options: Any) -> None:
        entries[0]["data"] = entries[0]["data"] + 1
        stock(entries, *rest, **options)

    monkeypatch.setattr(ms, "save_checkpoint", other_bits)
    with pytest.raises(StorageError, match=r"reads back another state: 0.weight: other bits"):
        train(Plan(str(tmp_path), faults={"usr1 before": [0, 3]}))
    assert not saved(tmp_path)


def test_tre_wants_copies_and_a_train_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1,TRE:1}")
    with pytest.raises(ConfigError, match=r"give FaultTolerance\(snapshot_every"):
        FaultTolerance(tmp_path)
    trained = model(Plan(str(tmp_path)), ms.train.Callback())
    with pytest.raises(UsageError, match=r"call FaultTolerance.train\(model"):
        trained.train(1, dataset(0, 1), callbacks=[FaultTolerance(tmp_path, snapshot_every=1)])
    monkeypatch.setenv("MS_ENABLE_TFT", "{TRE:1}")
    with pytest.raises(ConfigError, match="TTP is off"):
        FaultTolerance(tmp_path)


def test_the_lines_of_the_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str, mode: str) -> None:
    """The first start is told to end, the second goes on to the end."""
    (lines,) = (each.text for each in blocks(ROOT / "docs/how-to/mindspore.md") if "FaultTolerance(" in each.text)
    monkeypatch.chdir(tmp_path)
    trained, data = model(Plan("."), ms.train.Callback()), dataset(0, 1)

    def tells(*columns: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return columns

    with pytest.raises(SystemExit, match="143"):
        exec(lines, {"model": trained, "dataset": data.map(tells, ["data", "label"])})
    trained, data = model(Plan("."), ms.train.Callback()), dataset(0, 1)
    exec(lines, {"model": trained, "dataset": data})
    assert saved(tmp_path / "checkpoints")
    assert saved_job.digest(trained) == undisturbed


INTERRUPTED = 128 + signal.SIGTERM
"""MindSpore makes SIGTERM of a SIGINT, once it has compiled something."""


def test_an_exception_checkpoint(tmp_path: Path, run: Callable[..., Job], mode: str, undisturbed: str) -> None:
    """SIGINT in the middle of an epoch: the step is finished, and then it is saved; a SIGTERM comes while it saves."""
    job = run(tmp_path, mode=mode, prefix="Exception", faults={"term: read": [0, 0], "int before": [0, 8]})
    assert job.wait() == [INTERRUPTED], job.explain()
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_8/rank_0/Exception-2_2_breakpoint.ckpt"]
    job = run(tmp_path, mode=mode, prefix="Exception", life=1)
    assert job.wait() == [0], job.explain()
    assert "start 8\n" in job.log(0).read_text()
    assert job.ends() == [undisturbed]


def test_exception_checkpoints_of_two_ranks_of_which_one_is_told(
    tmp_path: Path, run: Callable[..., Job], mode: str, undisturbed_two: list[str]
) -> None:
    job = run(tmp_path, 2, mode=mode, prefix="CKP", faults={"int before": [1, 8]})
    assert job.wait() == [75, INTERRUPTED], job.explain()
    files = [f"ttp_saved_checkpoints-step_9/rank_{each}/CKP-2_3_breakpoint.ckpt" for each in range(2)]
    assert saved(tmp_path) == files
    job = run(tmp_path, 2, mode=mode, prefix="CKP", life=1)
    assert job.wait() == [0, 0], job.explain()
    assert job.ends() == undisturbed_two


def test_a_directory_for_each_rank_is_refused(tmp_path: Path, run: Callable[..., Job]) -> None:
    """They would stop behind different steps, and begin again from different ones."""
    job = run(tmp_path, 2, prefix="Exception", apart=True)
    assert job.wait() == [1, 1], job.explain()
    for rank in range(2):
        assert f"rank {1 - rank} has left no sign in" in job.log(rank).read_text()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"prefix": "a/b"}, ValueError, "prefix must be a name"),
        ({"prefix": ""}, ValueError, "prefix must be a name"),
        ({"partial_save": True}, ConfigError, "replica_groups"),
        ({"replicas": 2}, ConfigError, "replica_groups"),
        ({"config": 5}, TypeError, "must be a CheckpointConfig, not int"),
        ({"config": {"async_save": True}}, ConfigError, "leave async_save out"),
        ({"config": {"saved_network": nn.Dense(1, 1)}}, ConfigError, "leave saved_network out"),
        ({"config": {"enc_key": b"0" * 16}}, ConfigError, "leave enc_key out"),
        (
            {"config": {"append_info": [{"rate": 1}]}},
            ConfigError,
            "leave append_info out .*: rate would not be resumed",
        ),
    ],
)
def test_what_an_exception_checkpoint_does_not_do(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], says: str
) -> None:
    if isinstance(given.get("config"), dict):
        given = {"config": ms.train.CheckpointConfig(**given["config"])}
    with pytest.raises(error, match=says):
        ExceptionCheckpoint(directory=tmp_path, **given)


def test_an_exception_checkpoint_as_scripts_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, into the working directory, and with counts that are written in any case."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)  # what a shell starts behind `&` ignores it
    config = ms.train.CheckpointConfig(append_info=["epoch_num", "step_num"], integrated_save=False)
    trained, stops = (
        model(Plan("."), ms.train.Callback()),
        saved_job.Faults(Plan(".", faults={"int before": [0, 3]}), "before"),
    )
    with pytest.raises(SystemExit, match=str(INTERRUPTED)):
        trained.train(1, dataset(0, 1), callbacks=[stops, ExceptionCheckpoint("Exception", None, config)])
    assert saved(tmp_path) == ["ttp_saved_checkpoints-step_3/rank_0/Exception-1_3_breakpoint.ckpt"]
    assert signal.getsignal(signal.SIGINT) == before
