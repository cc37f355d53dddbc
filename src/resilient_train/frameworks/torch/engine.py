"""The torch engine: its roles, and what each of them is given."""

from __future__ import annotations

import torch.distributed as dist

from resilient_train import config
from resilient_train.frameworks.roles import Engine, Objects
from resilient_train.frameworks.torch import admission, data, generators
from resilient_train.frameworks.torch.collectives import Collectives
from resilient_train.frameworks.torch.device import Device, accelerator
from resilient_train.frameworks.torch.drill import Drill
from resilient_train.frameworks.torch.gradients import Gradients
from resilient_train.frameworks.torch.groups import Groups
from resilient_train.frameworks.torch.rank_state import RankState
from resilient_train.frameworks.torch.state import State
from resilient_train.frameworks.torch.step import Step


def engine_for(objects: Objects) -> Engine:
    """See ``frameworks/roles.Plugin``."""
    admission.check(objects)
    data.shield_workers()
    device_of_rank = accelerator(dist.get_rank() if dist.is_initialized() else 0)
    generators.follow(device_of_rank)
    groups = Groups(device_of_rank)
    rank_state = RankState(objects.models, objects.rank_extra)
    state = State(objects, rank_state, device_of_rank)
    device = Device(config.read_settings(), device_of_rank, state, rank_state, groups.communicators)
    gradients = Gradients(objects)
    step = Step(objects, state, rank_state, gradients.behind_closure)
    return Engine(
        groups=groups,
        collectives=Collectives(objects, groups, step.check_collective),
        device=device,
        state=state,
        rank_state=rank_state,
        data=data,
        step=step,
        gradients=gradients,
        drill=Drill(objects, groups, device, state),
    )
