"""What a script keeps from step to step beside the Session is told, also where its text does not show it."""

from pathlib import Path

from running import launch

PLAN = "kill rank=1 step=4; kill rank=0 step=8"
HIDDEN = [
    "trainer.net.weight.residual",
    "trainer.callbacks.each[0].average",
    "trainer.callbacks.each[0].last",
    "trainer.callbacks.each[1].average",
    "trainer.callbacks.each[1].last",
    "trainer.histories",
    "trainer.average_of_0",
    "trainer.sums",
]
"""The last without need: it begins anew in each step, but behind code that may have read it by another name."""
BY_TEXT = "self.ring in Trainer.train"


def test_what_the_text_does_not_show_is_told(tmp_path: Path) -> None:
    """Once by each process of rank 0; a new one has seen nothing of it behind its first step."""
    run = launch(tmp_path / "run", "hidden_ways.py", ranks=2, flags=("--faults", PLAN))
    assert run.code == 0, run.explain()
    first, by_text, behind = run.of("loop_carried")
    assert first["detail"]["place"].endswith("hidden_ways.py:75"), run.explain()
    assert sorted(first["detail"]["names"]) == sorted([*HIDDEN, BY_TEXT]), run.explain()
    assert (by_text["detail"]["names"], sorted(behind["detail"]["names"])) == ([BY_TEXT], sorted(HIDDEN)), run.explain()
    assert behind["step"] == by_text["step"] + 1, run.explain()
