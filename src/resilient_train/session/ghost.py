"""What a dead rank put into the collectives of the tail it died in: its replacement takes part in them with that."""

from __future__ import annotations

import time
from collections.abc import Iterator

from resilient_train.protocol.messages import Plan
from resilient_train.protocol.standing import Phase, Standing, standing_of
from resilient_train.session.link import Link

_POLL_S = 0.0002


def tail_entries(link: Link, plan: Plan) -> Iterator[tuple[bytes, bytes | None]]:
    """The tail's collectives as its leader runs them, with the inputs that the dead rank had published."""
    own = _dead_entries(link, plan)
    board, leader = link.board, plan.leader
    arena = link.borrow(leader)
    index = 0
    tail = Standing(plan.commits, Phase.APPLIED)
    try:
        while not link.stop_raised(plan.generation):
            standing = standing_of(board.standing(leader))
            entered, _ = board.tail(leader)
            if standing >= tail and index < entered:
                meta, _ = arena.log_entry(index)
                yield meta, own[index] if index < len(own) else None
                index += 1
            elif standing > tail:
                return
            else:
                time.sleep(_POLL_S)
    finally:
        arena.close()


def _dead_entries(link: Link, plan: Plan) -> list[bytes]:
    """What the dead rank had published of this tail. It stays where it is: this process may die as well."""
    rank = link.rank
    standing = standing_of(link.board.standing(rank))
    if standing.commits != plan.commits:
        link.board.set_tail(rank, 0, 0)  # what is there belongs to an older tail
    entered, _ = link.board.tail(rank)
    link.arena.log_adopt(entered)
    return [link.arena.log_entry(index)[1] for index in range(entered)]
