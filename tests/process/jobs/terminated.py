"""A process that hears SIGTERM natively. Prints what the board says; ``mode`` is what it is at meanwhile."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def is_pending(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(word >> (number - 1) & 1 for word in words)


mode = sys.argv[1]
libc = ctypes.CDLL(None)
if mode in ("late", "exits"):
    for _ in range(2):  # called last: what is registered before the module is loaded comes behind its own destructors
        libc["__cxa_atexit"](libc["raise"], ctypes.c_void_p(signal.SIGTERM), None)

from resilient_train._native import Board, hear_terminate, leave_terminate, shield_worker  # noqa: E402

board = Board.create(2)
if mode == "users":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(hear_terminate(board, 1), flush=True)
if mode == "left":
    leave_terminate()
    leave_terminate()
if mode == "agents":
    board.set_asked(1, signal.SIGTERM)
if mode in ("late", "exits"):
    del board  # who hears is the last one that needs it
    if mode == "exits":
        libc.exit(0)  # Python hears nothing of it
    sys.exit()
if mode == "child":
    child = os.fork()
    if child == 0:
        time.sleep(60)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), board.asked(1), flush=True)
    sys.exit()
if mode in ("shielded", "usr1-child"):
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        if mode == "shielded":
            shield_worker()
        os.write(tells, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(told, 1)
    for name in ("USR1", "TERM") if mode == "shielded" else ("USR1",):
        subprocess.run(["sh", "-c", f"kill -{name} {child}"], check=True)
    while is_pending(child, signal.SIGTERM):  # the next one would be taken for this one
        time.sleep(0.001)
    print(os.waitpid(child, os.WNOHANG)[0], flush=True)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), board.asked(1), flush=True)
    sys.exit()
if mode == "forked":
    print(subprocess.run(["sh", "-c", "kill -TERM $$"], check=False).returncode, board.asked(1), flush=True)
    sys.exit()
first = signal.SIGUSR1 if mode == "usr1" else signal.SIGTERM
os.kill(os.getpid(), first)
print(board.asked(0), board.asked(1), flush=True)
os.kill(os.getpid(), signal.SIGUSR1)  # the second one of these is not heard, and does no harm
os.kill(os.getpid(), signal.SIGTERM)
print("lives", flush=True)
