"""A small language model as large ones are trained: each block divided among ranks (FSDP2), two copies of the whole.

bfloat16 with sums in float32, blocks that are computed twice to save memory, two backward passes per update, clipped
gradients, a cosine schedule. Four ranks: two copies of two parts. What a rank holds, another one holds as well::

    resilient-run --nproc-per-node 4 --faults "kill rank=2 step=21 phase=COMPUTE at=backward" examples/fsdp2.py
    torchrun --nproc-per-node 4 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resilient_train as rt

STEPS = 30  # micro-steps: 15 updates
ACCUMULATE = 2
TOKENS, LENGTH, WIDTH, HEADS = 64, 24, 48, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_forward = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm_forward(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model() -> Model:
    torch.manual_seed(0)
    model = Model()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def make_data() -> TensorDataset:
    """Texts in which each token is told by the one before it, in nine of ten places."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, TOKENS, (1024, LENGTH + 1), generator=generator)
    kept = torch.rand(text.shape, generator=generator) < 0.9
    for place in range(LENGTH):
        text[:, place + 1] = torch.where(kept[:, place], (text[:, place] * 5 + 3) % TOKENS, text[:, place + 1])
    return TensorDataset(text)


def main() -> None:
    dist.init_process_group("gloo")
    model, data = make_model(), make_data()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, STEPS // ACCUMULATE)

    with rt.Session(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as session:
        session.save_every(steps=5)  # for what takes both copies of a part along
        for step in session.steps(STEPS):
            with step:
                (text,) = step.batch
                last = step.number % ACCUMULATE == ACCUMULATE - 1
                model.set_requires_gradient_sync(last)
                guessed = model(text[:, :-1]).float()
                loss = nn.functional.cross_entropy(guessed.flatten(0, 1), text[:, 1:].flatten()) / ACCUMULATE
                loss.backward()
                if last:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            if dist.get_rank() == 0 and step.number % 10 == 9:
                print(f"step {step.number + 1}: loss {loss.item() * ACCUMULATE:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
