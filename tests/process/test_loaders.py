"""Passes over the data that begin and end around a kill: a replacement draws what its predecessor would have drawn."""

from pathlib import Path

import pytest
from identity import assert_identical
from running import Reference, launch

AT_A_BOUNDARY = (
    "kill rank=1 step=5 phase=APPLIED at=end; kill rank=2 step=8 phase=COMPUTE at=backward; "
    "kill rank=0 step=12 phase=COMPUTE; kill rank=1 step=13 phase=UPDATING incarnation=1"
)
"""A pass has 6 steps where each rank shuffles for itself, and 2 where a sampler divides the data: so these come behind
the last step of a pass, in the middle of one, and in the first two steps of one.
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "variant",
    [
        "short+workers+persistent+stateful+shuffle",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (
                "short+workers+persistent+shuffle",
                "short+shuffle",
                "short+workers+shuffle",
                "short+workers+persistent",
                "short+stateful+shuffle",
                "short+stateful+workers+shuffle",
                "short+stateful+workers+persistent",
            )
        ),
    ],
)
def test_kills_around_the_end_of_a_pass(tmp_path: Path, undisturbed: Reference, variant: str) -> None:
    arguments = ("--steps", "15", "--variant", variant)
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=3, flags=("--faults", AT_A_BOUNDARY), timeout_s=170)
    assert len(run.of("injected")) == 4, run.explain()
    assert_identical(run, undisturbed(ranks=3, variant=variant, steps=15), ranks=3, recoveries=4)
