"""Two models, two optimizers, and a backward pass between their updates: such a loop needs ``undo=True``.

Try::

    resilient-run --nproc-per-node 2 --faults "kill rank=1 step=20 phase=COMPUTE at=backward" examples/gan.py
"""

import torch
import torch.distributed as dist
from minimal import join_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

STEPS = 60
NOISE = 8


def main() -> None:
    join_group()
    torch.manual_seed(0)
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2)))
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3)
    score = nn.functional.binary_cross_entropy_with_logits
    torch.manual_seed(1000 + dist.get_rank())

    # Without undo a fault between the two updates could not be repaired: the first one cannot be taken back.
    with rt.Session(model=[generator, critic], optimizer=[of_critic, of_generator], undo=True) as session:
        for step in session.steps(STEPS):
            with step:
                angle = 6.2832 * torch.rand(32)
                real = torch.stack([angle.cos(), angle.sin()], dim=1)
                fake = generator(torch.randn(32, NOISE))

                of_critic.zero_grad()
                verdict = critic(torch.cat([real, fake.detach()]))
                loss_critic = score(verdict, torch.cat([torch.ones(32, 1), torch.zeros(32, 1)]))
                loss_critic.backward()
                of_critic.step()

                of_generator.zero_grad()
                loss_generator = score(critic(fake), torch.ones(32, 1))
                loss_generator.backward()
                of_generator.step()
            if dist.get_rank() == 0 and step.number % 20 == 19:
                losses = f"critic {loss_critic.item():.4f}, generator {loss_generator.item():.4f}"
                print(f"step {step.number + 1}: {losses}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
