"""``train.py``, with a recorder in the place of torch_npu. Each verb is a line of ``npu_RANK_INCARNATION.jsonl``.

Rank 1's device finds damage in a tensor when it is asked first; rank 0's does not stop when it is told for the second
time.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from pure.recorded_npu import RecordedNpu
from resilient_train.config import read_link
from resilient_train.frameworks.torch_npu import device

link = read_link()
assert link is not None
recorded = RecordedNpu()


class Journal(list[tuple[str, dict[str, Any]]]):
    """Written at once: the process may be killed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, call: tuple[str, dict[str, Any]]) -> None:
        super().append(call)
        name, arguments = call
        plain = {key: value for key, value in arguments.items() if key != "tensor_obj"}
        os.write(self._file, json.dumps([name, plain]).encode() + b"\n")
        times = sum(known == name for known, _ in self)
        if name == "check_uce_in_memory":
            recorded.answer("npu.check_uce_in_memory", 3 if (link.rank, link.incarnation, times) == (1, 0, 1) else 0)
        if name == "stop_device":
            recorded.answer("npu.stop_device", int((link.rank, link.incarnation, times) == (0, 0, 2)))


recorded.calls = Journal(Path(link.run_dir) / f"npu_{link.rank}_{link.incarnation}.jsonl")
sys.modules["torch_npu"] = recorded.module
device.NPU = "cpu"
sys.argv[0] = str(Path(__file__).with_name("train.py"))
runpy.run_path(sys.argv[0], run_name="__main__")
