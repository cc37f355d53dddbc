"""AGREE: from where does everybody go on? The commit rule of the design, section 4.

Given how far each living rank has come and what the step records of the dead say, choose the number of updates,
``commits``, from whose end all ranks go on:

* somebody entered UPDATING(c): then, by the barrier, every rank had reached READY(c), and all roll forward to c+1;
* nobody did, but all the living are READY(c) and the dead had published READY(c) too: roll forward, nothing is redone;
* else update c is redone by everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from resilient_train.protocol.standing import Phase, Standing


class Account(NamedTuple):
    """What a rank says of itself when it joins a recovery; see ``messages.Joined``."""

    standing: Standing
    holds: bool


class Verdict(NamedTuple):
    """``forward``/``redone``: the ranks that apply their own gradients, or run update ``commits`` again. ``finishers``:
    those that run the tail before that update, or what is left of it.
    """

    commits: int
    holders: list[int]
    empty: list[int]
    forward: list[int]
    redone: list[int]
    finishers: list[int]


def decide(accounts: Mapping[int, Account], evidence: Mapping[int, Standing]) -> Verdict:
    """The verdict for one recovery. ``evidence`` are the step records of ranks that were lost, by rank.

    A rank that joins without usable state (its update was cut, its memory is damaged) counts by its own standing too,
    unless it has only just started.
    With no holder at all the verdict names none, and ``commits`` is only a number.
    """
    holders = sorted(rank for rank, account in accounts.items() if account.holds)
    empty = sorted(set(accounts) - set(holders))
    if not holders:
        return Verdict(0, [], empty, [], [], [])
    base = min(accounts[rank].standing.commits for rank in holders)
    ready, updating = Standing(base, Phase.READY), Standing(base, Phase.UPDATING)
    known = [accounts[rank].standing for rank in holders]
    known += [account.standing for account in accounts.values() if not account.holds and _has_trained(account)]
    known += evidence.values()
    applied = any(standing >= updating for standing in known)
    commits = base + 1 if applied or all(standing >= ready for standing in known) else base
    forward = [rank for rank in holders if accounts[rank].standing.commits == commits - 1]
    assert all(accounts[rank].standing.phase is Phase.READY for rank in forward), (
        "somebody applied before all were ready"
    )
    redone = [
        rank
        for rank in holders
        if accounts[rank].standing in (Standing(commits, Phase.COMPUTE), Standing(commits, Phase.READY))
    ]
    finishers = sorted({*forward, *(r for r in holders if accounts[r].standing == Standing(commits, Phase.APPLIED))})
    return Verdict(commits, holders, empty, forward, redone, finishers)


def _has_trained(account: Account) -> bool:
    return account.standing > Standing(0, Phase.APPLIED)
