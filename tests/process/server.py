"""The test server: a process that has imported torch and the launcher once, and forks a launcher for each job.

``server.py DESCRIPTOR``: a Unix socket to the tests (``served.Served``). A launcher that is forked from here has what
a new ``python -m resilient_train.launch.cli.run`` has, but for the seconds that the imports take; likewise a script. It
ends when the socket is closed, and takes what it has started along.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import weakref
from pathlib import Path

from resilient_train import _native, _register

LAUNCHER = "resilient_train.launch.cli.run"


def import_all() -> None:
    _register.wrap_for_forks()
    from resilient_train.launch.fork.zygote import ALWAYS, is_of_another_torch

    for name in (LAUNCHER, "resilient_train.launch.agent.agent", "torch.distributed.run", "asyncio", *ALWAYS):
        if not is_of_another_torch(name):
            importlib.import_module(name)
    leave_libraries()
    gc.collect()
    gc.freeze()


def leave_libraries() -> None:
    """At their ends processes do not take down torch's tables of operators, library by library: 0.1 s for each rank."""
    for each in list(weakref.finalize._registry):
        each.atexit = False


def serve(channel: socket.socket) -> dict | None:
    """Returns the request in the fork that is to carry it out, None when the tests are over."""
    living: set[int] = set()
    ended_whole: set[str] = set()
    while True:
        data, streams, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not data:
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return None
        request = json.loads(data)
        if "reap" in request:
            pid = request["reap"]
            living.discard(pid)
            channel.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            continue
        script = next((each for each in request["arguments"] if each.endswith(".py")), "")
        request["ends_whole"] = script not in ended_whole
        ended_whole.add(script)
        pid = os.fork()
        if pid == 0:
            channel.close()
            for source, target in zip(streams, (0, 1, 2), strict=True):
                os.dup2(source, target)
                os.close(source)
            os.setsid()
            _native.die_with_parent(signal.SIGKILL)  # as the server does with the tests, if these are killed
            return request
        for each in streams:
            os.close(each)
        living.add(pid)
        channel.send(json.dumps(pid).encode())


def change(request: dict) -> None:
    """See ``served.changed``."""
    if "umask" in request:
        os.umask(request["umask"])
    if "descriptors" in request:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["descriptors"]))
    exec(compile(request.get("code", ""), "<the test's own>", "exec"), {})


def launch(request: dict) -> None:
    """In the fork: what ``python -m`` would do. It ends the process.

    To take down all that was imported takes a third of a small job's time: rank 0 of each script's first job does so.
    """
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    change(request)
    module, script = sys.modules[LAUNCHER], request["script"]
    sys.path[0] = str(Path(script).parent) if script else request["cwd"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[:] = [script or module.__file__, *request["arguments"]]
    launcher, code = os.getpid(), 0
    try:
        if script:
            # Stock gloo waits for the GIL, and whoever has that for gloo: docs/facts.md.
            sys.modules["torch"]._C._stash_obj_in_tls = lambda *_: None
            runpy.run_path(script, run_name="__main__")
        else:
            module.main()
    except SystemExit as end:
        if os.getpid() != launcher and not isinstance(end.code, int | None):
            raise
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    if os.getpid() != launcher:
        if request["ends_whole"] and os.environ["RANK"] == "0":
            sys.exit(code)  # a crash in an interpreter's end would not be seen else
        threading._shutdown()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _native.die_with_parent(signal.SIGKILL)
    ours = socket.socket(fileno=int(sys.argv[1]))
    import_all()
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    asked = serve(ours)
    if asked is not None:
        launch(asked)
