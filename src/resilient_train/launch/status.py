"""What a running job answers when an operator asks how it is."""

from __future__ import annotations

from typing import Any

from resilient_train._native import Board
from resilient_train.launch.processes import Processes
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.standing import standing_of


def status_of(controller: Controller, processes: Processes, board: Board) -> dict[str, Any]:
    """The controller's view of the job, and each rank's step record."""
    ranks = []
    for rank in range(board.world_size):
        process = processes.current.get(rank)
        standing = standing_of(board.standing(rank))
        ranks.append(
            {
                "rank": rank,
                "pid": process.pid if process is not None else None,
                "incarnation": controller.incarnations[rank],
                "commits": standing.commits,
                "phase": standing.phase.name,
                "step": board.step(rank),
                "beats": board.beats(rank),
            }
        )
    return {
        "stage": controller.stage.value,
        "generation": controller.generation,
        "restarts": controller.restarts,
        "max_restarts": controller.policy.max_restarts,
        "ranks": ranks,
    }
