"""The files that a clique opens: gloo ends the process where it may not."""

import os
import re
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, sys
import torch
from torch._C import _distributed_c10d as c10d
from resilient_train.errors import UsageError
from resilient_train.frameworks.torch.communication.clique import Clique

hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
try:
    clique = Clique(20)
except UsageError as error:
    print(error)
    os._exit(0)
tensors = [torch.full((3,), float(member)) for member in range(20)]
clique.run("allreduce", [([tensor], c10d.AllreduceOptions()) for tensor in tensors])
clique.close()
print({tensor.tolist()[0] for tensor in tensors})
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("hard", "told"), [(5000, r"\{190.0\}"), (400, r"this process may not open \d+ files \(ulimit -Hn is 400\)")]
)
def test_more_members_than_files(hard: int, told: str) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this machine allows fewer")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(hard)]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert re.fullmatch(told, run.stdout.strip()), run
