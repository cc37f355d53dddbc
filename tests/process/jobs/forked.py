"""Says what a process can find out about itself, to be compared between a new interpreter and a fork of the zygote."""

import atexit
import ctypes
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

mode = sys.argv[1]


def digest(*values: bytes) -> str:
    return hashlib.sha256(b"".join(values)).hexdigest()


def status(field: str) -> str:
    with Path("/proc/self/status").open() as file:
        return next(line.split()[1] for line in file if line.startswith(field))


def death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    return number.value


def of_torch() -> dict:
    """And what importing it changes."""
    import numpy as np
    import torch

    product = torch.arange(640_000.0).sin().view(800, 800)
    product @= product.T
    other = np.sin(np.arange(160_000.0)).reshape(400, 400)
    return {
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "masks": [status(name) for name in ("SigBlk:", "SigIgn:", "SigCgt:")],
        "bits": digest(product.numpy().tobytes(), (other @ other).tobytes()),
        "wrapped": hasattr(torch.distributed.init_process_group, "__wrapped__"),
    }


def same() -> dict:
    import resilient_train

    main = sys.modules["__main__"].__dict__
    computed = {} if "all but torch" in sys.argv else of_torch()
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": list(sys.flags),
        "main": {name: str(main.get(name, "none")).partition(" at 0x")[0] for name in MAIN},
        "names": sorted(name for name in main if name.startswith("__")),
        "frame": sys._getframe(1).f_globals is main,
        "streams": [repr(each) for each in (sys.stdin, sys.stdout, sys.stderr, sys.stdout.buffer)],
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "through": [sys.stdout.write_through, sys.stdout.line_buffering],
        "descriptors": sorted(each.name for each in Path("/proc/self/fd").iterdir()),
        "signals": [str(signal.getsignal(each)).partition(" at 0x")[0] for each in sorted(signal.valid_signals())],
        "parent": os.getppid(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "death_signal": death_signal(),
        "environ": dict(os.environ),
        "environ of C": subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout,
        "cwd": str(Path.cwd()),
        "mask": os.umask(0o22),
        "limits": [resource.getrlimit(each) for each in range(16)],
        "nice": os.nice(0),
        "policy": os.sched_getscheduler(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "hook": sys.excepthook is sys.__excepthook__,
        "recursion": sys.getrecursionlimit(),
        "version": resilient_train.__version__,
        **computed,
    }


MAIN = ("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__", "__builtins__")

if mode == "tell":
    found = {"same": same()}
    modules, own = sys.modules, [random.random()]
    if "bits" in found["same"]:
        own += [float(modules["numpy"].random.rand()), modules["torch"].initial_seed()]
    print(json.dumps({**found, "own": own}))
    atexit.register(print, "the end")
elif mode == "raise":
    try:
        {}["missing"]
    except KeyError:
        raise ValueError("out of the script") from None
elif mode == "hook":
    sys.excepthook = lambda kind, error, trace: print(kind.__name__, error, trace.tb_frame.f_code.co_filename)
    raise ValueError("told to the script's own hook")
elif mode == "exit":
    sys.exit({"number": 7, "text": "said by sys.exit", "none": None}[sys.argv[2]])
elif mode == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
elif mode == "abort":
    print("before", end="")
    os.abort()
elif mode == "spawn":
    import multiprocessing

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(abs, [-1]), __file__, sys.argv)
elif mode == "sleep":
    print("asleep")
    time.sleep(600)
