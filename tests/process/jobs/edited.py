"""A script whose files are others on disk from step 3 on, as ``sys.argv[1]`` says. To be copied, with ``helper.py``.

``never``; ``rewritten``: one is, by itself, above the loop, and is read again; ``script`` and ``helper``: the text is
edited; ``package``: one has come in the place of ``helper.py``; ``gone``: nothing has; ``emptied``: as an editor leaves
it for a moment; ``removed``: with its folder; ``link``: the folder was a link, which leads to a newer release.
"""

import importlib
import shutil
import sys
from pathlib import Path

import helper
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

OWN = 1.0
HERE = Path(sys.path[0])


def change(how: str) -> None:
    script, beside, late = Path(__file__), HERE / "helper.py", HERE / "late.py"
    if how == "script":
        script.write_text(script.read_text().replace("OWN = 1.0", "OWN = 3.0"))
    elif how == "helper":
        beside.write_text("SCALE = 5.0\n")
        late.write_text("SHIFT = 5.0\n")
    elif how in ("package", "gone"):
        beside.unlink()
        if how == "package":
            beside.with_suffix("").mkdir()
            (beside.with_suffix("") / "__init__.py").write_text("SCALE = 5.0\n")
    elif how == "emptied":
        script.write_text("")
    elif how == "removed":
        shutil.rmtree(HERE)
    elif how == "link":
        newer = HERE.with_name("newer")
        shutil.copytree(HERE, newer)
        (newer / "helper.py").write_text("SCALE = 5.0\n")
        link = HERE.with_name("current")
        link.unlink()
        link.symlink_to(newer)


dist.init_process_group("gloo")
late = importlib.import_module("late")
scales = [late.SHIFT]
for value in (2.0, 3.25) if sys.argv[1] == "rewritten" else ():
    dist.barrier()
    (HERE / f"late_{dist.get_rank()}.py").write_text(f"SHIFT = {value}\n")
    found = importlib.import_module(f"late_{dist.get_rank()}")
    scales.append(importlib.reload(found).SHIFT)
print("SCALES", scales)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(9):
        with step:
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step.number))
            (model(inputs).pow(2).mean() * helper.SCALE * OWN + model(inputs).mean() * scales[-1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.done and step.number == 3:
            if dist.get_rank() == 0:
                change(sys.argv[1])
            dist.barrier()
