"""The torch engine: its roles, and what each of them is given."""

from __future__ import annotations

import torch.distributed as dist

from resilient_train import config
from resilient_train.frameworks.roles import Engine, Objects
from resilient_train.frameworks.torch import data
from resilient_train.frameworks.torch.between_bodies import BetweenBodies
from resilient_train.frameworks.torch.checks import admission
from resilient_train.frameworks.torch.checks.unregistered import Unregistered
from resilient_train.frameworks.torch.collectives import TorchCollectives
from resilient_train.frameworks.torch.device import TorchDevice, accelerator
from resilient_train.frameworks.torch.drill import TorchDrill
from resilient_train.frameworks.torch.gradients import TorchGradients
from resilient_train.frameworks.torch.groups import TorchGroups
from resilient_train.frameworks.torch.kept import generators
from resilient_train.frameworks.torch.pass_order import TorchPassOrder
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.sharding.zero import shown
from resilient_train.frameworks.torch.state import TorchState
from resilient_train.frameworks.torch.window import TorchWindow


def engine_for(objects: Objects) -> Engine:
    """See ``frameworks/roles.Plugin``."""
    admission.check(objects)
    data.shield_workers()
    rank = dist.get_rank() if dist.is_initialized() else 0
    device_of_rank = accelerator(rank, objects.models)
    generators.follow(device_of_rank)
    groups = TorchGroups(device_of_rank)
    rank_state = TorchRankState(objects.models, objects.rank_extra, rank)
    rank_state.buffers.claim(objects.models)
    held = objects._replace(optimizers=tuple(map(shown, objects.optimizers)))
    state = TorchState(held, rank_state, device_of_rank)
    device = TorchDevice(config.read_settings(), device_of_rank, state, rank_state, groups.communicators)
    gradients = TorchGradients(objects)
    unregistered = Unregistered(
        objects.models, (*objects.schedulers, *objects.extra.values(), *objects.rank_extra.values())
    )
    window = TorchWindow(objects, state, rank_state, gradients.behind_closure, unregistered)
    return Engine(
        groups=groups,
        collectives=TorchCollectives(
            held, groups, window.check_collective, unregistered, rank_state, lambda: state.divided_among
        ),
        device=device,
        state=state,
        rank_state=rank_state,
        data=data,
        pass_order=TorchPassOrder(objects),
        window=window,
        between=BetweenBodies(held, state, rank_state),
        gradients=gradients,
        drill=TorchDrill(held, groups, device, state),
    )
