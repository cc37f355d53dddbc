"""Which threshold is proposed from the values of a run, and with what rate of false alarms."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from resilient_train.events import Event, now, to_line
from resilient_train.launch.cli import tool
from resilient_train.observe.thresholds import propose, values_of
from resilient_train.observe.usual import Usual


def norms(count: int, seed: int = 0) -> list[float]:
    drawn = random.Random(seed)
    return [drawn.lognormvariate(0, 0.3) for _ in range(count)]


def of_updates(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values, 1))


def test_it_is_above_all_that_was_no_spike() -> None:
    values = norms(5000)
    values[700] = values[4000] = 500.0
    found = propose([[of_updates(values)]])
    assert found is not None
    assert (found.values, found.spikes, found.alarms) == (5000, 2, 2)
    assert 2 * found.highest <= found.limit <= 2.2 * found.highest
    assert found.highest == max(value for value in values if value < 500)
    assert found.alarms_at_most == pytest.approx((2 + 2 + 2 * 3**0.5) / 5000)


def test_few_values_say_nothing() -> None:
    assert propose([[of_updates(norms(63))]]) is None
    assert propose([[of_updates([0.0] * 100)]]) is None


def test_of_an_update_the_largest_of_all_ranks_counts() -> None:
    """Any of them would have had all run it again; where several would have, it is one alarm. A rank may lack some."""
    drawn = random.Random(3)
    ranks = [{update: drawn.lognormvariate(0, 0.1) for update in range(1000)} for _ in range(4)]
    highest = max(value for values in ranks for value in values.values())
    for rank, update in ((1, 500), (2, 500), (3, 700)):
        ranks[rank][update] = 90.0
    del ranks[0][500], ranks[0][501]
    found = propose([ranks])
    assert found is not None
    assert (found.values, found.spikes, found.alarms) == (1000, 2, 2)
    assert found.highest == highest
    alone = propose([ranks[:1]])
    assert alone is not None
    assert found.median > 1.05 * alone.median


def test_what_was_usual_in_one_run_is_not_in_the_next() -> None:
    low, high = of_updates([1.0] * 50), of_updates([50.0] * 50)
    found = propose([[low], [high]])
    assert found is not None
    assert (found.values, found.spikes, found.highest) == (100, 0, 50.0)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5])
def test_spikes_are_rare_where_there_are_none(sigma: float) -> None:
    """In 20,000 good values of a skewed kind: what a false alarm costs is one step that runs twice."""
    drawn, usual, alarms = random.Random(1), Usual(), 0
    for number in range(20_000):
        value = 2.0 ** (-number / 2000) * drawn.lognormvariate(0, sigma)
        alarms += usual.spike(value) is not None
        usual.add(value)
    assert alarms <= 6


def written(folder: Path, **values: Any) -> None:
    lines = [
        to_line(now("values", rank=0, detail={"first": 1, **values})),
        to_line(now("fault", detail={"norm": [1e9]})),
    ]
    (folder / "events.jsonl").write_bytes(b"".join(lines))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, norm=norms(200), loss=[2.0] * 64)
    (tmp_path / "events-1.jsonl").write_bytes(
        to_line(now("values", rank=0, detail={"first": 9, "norm": norms(100, 1)}))
    )
    assert tool.main(["advise", "--norm", "--run-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "no spike in 300 updates" in shown
    assert "RESILIENT_LOSS_THRESHOLD=4: 0 false alarms in them, so at most 1 in 16" in shown
    assert tool.main(["advise", "--norm", "--run-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"]["limit"] == 4.0


def test_a_run_without_values_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, norm=norms(20))
    for arguments, line in (
        (["--run-dir", str(tmp_path)], "no norms or losses of 64 updates or more"),
        (["--run-dir", str(tmp_path / "none")], "no norms or losses"),
        ([], "give --run-dir"),
    ):
        assert tool.main(["advise", "--norm", *arguments]) == 2
        said = capsys.readouterr().err
        assert line in said
        assert said.count("\n") == 1


def test_what_is_no_number_is_left_out() -> None:
    event = now("values", rank=0, detail={"first": 64, "norm": [1.0, "nan", None, 2]})
    assert list(values_of([event], "norm")) == [{64: 1.0, 67: 2.0}]
    wrong = [now("values", detail=each) for each in ({"first": 1, "norm": 5}, {"norm": [5]})]
    assert list(values_of(wrong, "norm")) == [{}]


def test_of_an_update_that_was_made_twice_the_second_counts() -> None:
    def told(rank: int, first: int, *losses: float) -> Event:
        return now("values", rank=rank, detail={"first": first, "loss": list(losses)})

    events = [told(1, 3, 3.5, 4.5), told(0, 1, 1.0, 2.0, 300.0), told(0, 3, 3.0, 4.0)]
    assert list(values_of(events, "loss")) == [{1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, {3: 3.5, 4: 4.5}]
