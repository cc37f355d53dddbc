"""What "survived, bit for bit" means, as one check."""

from running import Run


def assert_identical(disturbed: Run, reference: Run, *, ranks: int, recoveries: int, once: bool = True) -> None:
    """Same parameters, optimizer state and per-rank state on every rank; every sample once per commit; nothing lost."""
    assert disturbed.code == 0, disturbed.explain()
    assert not disturbed.of("state_differs"), "objects that all ranks share were taken for different ones"
    assert disturbed.recoveries() == recoveries, disturbed.explain()
    assert disturbed.digests() == reference.digests(), disturbed.explain()
    assert disturbed.ends() == reference.ends(), disturbed.explain()
    for rank in range(ranks):
        expected, found = reference.samples(rank), disturbed.samples(rank, once=once)
        # A rank that died between its update and its record has no line; what it does have must be right.
        assert found.items() <= expected.items(), f"rank {rank} trained on other samples"
    for end in disturbed.of("session_end"):
        assert end["detail"]["commits"] == reference.of("session_end")[0]["detail"]["commits"]
        assert end["detail"]["redone"] <= recoveries, "more than one step redone per fault"
    assert no_commit_lost(disturbed), disturbed.explain()


def no_commit_lost(run: Run) -> bool:
    """No recovery goes back behind an update that any rank had applied when it joined."""
    furthest: dict[int, int] = {}
    for event in run.of("joined"):
        generation = event["generation"]
        furthest[generation] = max(furthest.get(generation, 0), event["detail"]["commits"])
    return all(plan["detail"]["commits"] >= furthest[plan["generation"]] for plan in run.of("plan"))
