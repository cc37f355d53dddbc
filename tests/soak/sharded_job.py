"""The sharded job that the soak hits: those of the process tests. At its end each rank writes the bytes that it holds.

``sharded_job.py STEPS VARIANT RECORDS [plain]``; ``plain``: without a word of ours, for torchrun.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "process" / "jobs"))

import hsdp
import pipelined
import zero


def train(job: hsdp.Job, steps: int, record, plain: bool) -> None:
    def step_of(number: int) -> None:
        record.write(json.dumps({"step": number, "loss": job.body(number), "counts": []}) + "\n")
        record.flush()

    if plain:
        for number in range(steps):
            step_of(number)
        return
    import resilient_train as rt

    parts = {"model": job.model, "optimizer": job.optimizers, "scheduler": job.schedulers}
    with rt.Session(**parts, scaler=getattr(job, "scaler", None), undo="undo" in job.variant) as session:
        session.save_every(steps=10, memory_steps=1)
        for step in session.steps(steps):
            with step:
                step_of(step.number)


if __name__ == "__main__":
    steps, variant, records, *plain = sys.argv[1:]
    if plain:
        torch._C._stash_obj_in_tls = lambda *_: None  # stock gloo waits for the GIL, and who has that for gloo
    dist.init_process_group("gloo")
    names = frozenset(variant.split("+"))
    kind = zero.Zero if "zero" in names else pipelined.Job if "pp" in names else hsdp.Job
    job = kind(names)
    with (Path(records) / f"rank{dist.get_rank()}.jsonl").open("a") as record:
        train(job, int(steps), record, bool(plain))
    job.write(Path(records))
    dist.destroy_process_group()
