"""Groups that the user holds stay the same objects and keep working: DeviceMesh, new_group, functional collectives."""

from pathlib import Path

from running import launch


def test_groups_of_the_users_survive(tmp_path: Path) -> None:
    undisturbed = launch(tmp_path / "undisturbed", "groups.py", ranks=4)
    assert undisturbed.code == 0, undisturbed.explain()
    plan = "kill rank=3 step=2 phase=COMPUTE at=start; kill rank=0 step=5 phase=READY at=barrier"
    run = launch(tmp_path / "run", "groups.py", ranks=4, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2
    assert {rank: params for rank, (params, _) in run.digests().items()} == {
        rank: params for rank, (params, _) in undisturbed.digests().items()
    }
