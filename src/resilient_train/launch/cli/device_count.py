"""What torchrun's flags need to know of devices, found out in a fork.

Who asks the CUDA driver has a thread of the driver's from then on, and no fork of its may use a device: ranks are forks
of the launcher. Having torch ask NVML instead (``PYTORCH_NVML_BASED_CUDA_CHECK``) was not enough on an H100 with torch
2.11: the driver's thread was there all the same, and all ranks started cold.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from resilient_train.frameworks.torch.watching.replaced import replace

_WELL, _REFUSED = b"=", b"!"


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Inside the block torch takes it that there is no device, and asks nobody. 2.15 asks for one of any kind."""
    import torch

    put_back = [replace(each, "is_available", lambda: False) for each in (torch.cuda, torch.accelerator)]
    try:
        yield
    finally:
        for each in put_back:
            each()


def ranks_for(wanted: str) -> str:
    """``--nproc-per-node`` as a number. Raises ValueError for a word that torch doesn't know, or can't count."""
    if wanted.isdecimal():
        return wanted
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        _answer(wanted, theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    if answer[:1] != _WELL:
        told = answer[1:].decode(errors="replace") or "counting the devices ended the process that did it"
        raise ValueError(f"--nproc-per-node {wanted}: {told}")
    return answer[1:].decode()


def _answer(wanted: str, pipe: int) -> None:
    try:
        from torch.distributed.run import determine_local_world_size

        answer = _WELL + str(determine_local_world_size(wanted)).encode()
    except Exception as error:
        answer = _REFUSED + str(error).encode()
    os.write(pipe, answer)
    os._exit(0)
