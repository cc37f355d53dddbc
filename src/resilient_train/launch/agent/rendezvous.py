"""The store by which torch's process groups find one another: on this node's loopback interface, and nowhere else.

Any process of the machine can connect to it, as often as there are descriptors. So it has descriptors of its own: who
takes all of those leaves the agent's to the agent, which needs some for each recovery.
"""

from __future__ import annotations

import gc
import signal
import socket
import threading
from concurrent.futures import Future

from torch._C._distributed_c10d import TCPStore

from resilient_train.descriptors import keep_alone
from resilient_train.errors import ConfigError

_CONNECT_S = 10.0
_OF_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""They are of the thread that makes the mistake."""


def make_store(host: str, port: int) -> TCPStore:
    """A store that listens on ``host`` (torch's own choice would be all interfaces), until this process ends. Port 0:
    any that is free. Returns a connection to it. To be called before there are other threads.

    Raises ConfigError if that is not possible.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a job that has just ended may have had the port
        listener.bind((host, port))
        listener.listen(2048)
        bound = int(listener.getsockname()[1])
        _check_reachable(listener)
        _serve(host, bound, listener)
        return TCPStore(host, bound, is_master=False)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"the store can't listen on {host}:{port}: {error}") from None


def _check_reachable(listener: socket.socket) -> None:
    """Torch would try for five minutes, and write its stacks each time. Raises ConfigError."""
    host, port = listener.getsockname()
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            listener.accept()[0].close()
    except OSError as error:
        raise ConfigError(
            f"no process of this machine can connect to {host}, where the ranks are to meet: {error} (is the interface "
            "`lo` up, and are there free ports?)"
        ) from None


def _serve(host: str, port: int, listener: socket.socket) -> None:
    """The store itself, in a thread that does nothing else. Its own threads have the descriptors of their maker."""
    begun: Future[bool] = Future()

    def serve() -> None:
        # One that came here (to a launcher that stands still the kernel gives it by any thread) would be told of by
        # writing to a descriptor of the event loop's, whose number is another's here: a SIGTERM was lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_CRASHES)
        try:
            alone = keep_alone(listener.fileno())
            store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno())
        except (OSError, RuntimeError) as error:
            begun.set_exception(error)
            return
        begun.set_result(alone)
        threading.Event().wait()
        del store  # never: this thread alone could close what it holds

    collects = gc.isenabled()
    gc.disable()  # what it found would be closed in that thread: by number, and the numbers are others there
    try:
        threading.Thread(target=serve, name="rt-store", daemon=True).start()
        alone = begun.result()
    finally:
        if collects:
            gc.enable()
    if alone:
        listener.close()
    else:
        listener.detach()  # it is the store's
