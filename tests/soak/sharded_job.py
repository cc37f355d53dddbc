"""The sharded job that the soak hits: that of the process tests. At its end each rank names the bytes that it holds."""

import hashlib
import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "process" / "jobs"))

import hsdp
import pipelined

import resilient_train as rt

if __name__ == "__main__":
    steps, variant, records = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo")
    names = frozenset(variant.split("+"))
    job = (pipelined if "pp" in names else hsdp).Job(names)
    rank = dist.get_rank()
    parts = {"model": job.model, "optimizer": job.optimizers, "scheduler": job.schedulers}
    with (
        (records / f"rank{rank}.jsonl").open("a") as record,
        rt.Session(**parts, undo="undo" in job.variant) as session,
    ):
        session.save_every(steps=10, memory_steps=1)
        for step in session.steps(steps):
            with step:
                record.write(json.dumps({"step": step.number, "loss": job.body(step.number), "counts": []}) + "\n")
                record.flush()
    job.write(records)
    (records / f"end{rank}").write_text(hashlib.sha256((records / f"rank{rank}.bin").read_bytes()).hexdigest())
    dist.destroy_process_group()
