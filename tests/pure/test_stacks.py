"""Stacks are written while other threads run, and kill nobody."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from resilient_train.interrupt import STACKS_SIGNAL
from resilient_train.observe.stacks import append_other_threads, stacks_file

BUSY = """
import pathlib, sys, threading
from resilient_train.observe.stacks import listen_for_stacks

def busy():
    while True:
        str(pathlib.Path("/a/b") / "c" / "d")

file = listen_for_stacks(pathlib.Path(sys.argv[1]))
threading.Thread(target=busy, daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""


def test_a_thread_that_runs_is_not_looked_into(tmp_path: Path) -> None:
    """Of five processes five died of 22 writings of all threads, by SIGSEGV."""
    path = stacks_file(tmp_path, 0, 0)
    command = [sys.executable, "-c", BUSY, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for number in range(1, 201):
            os.kill(process.pid, STACKS_SIGNAL)
            # Until its last line is there: another signal would go to the other thread meanwhile, and say nothing.
            while path.read_text().count(" in <module>\n") < number:
                assert process.poll() is None
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert "in busy" not in path.read_text()


def test_other_threads_follow_from_a_thread_of_ours(tmp_path: Path) -> None:
    path, over = stacks_file(tmp_path, 3, 1), threading.Event()

    def waits_here() -> None:
        over.wait()

    other = threading.Thread(target=waits_here, name="the other")
    other.start()
    ours = threading.Thread(target=append_other_threads, args=(path,))
    ours.start()
    ours.join()
    over.set()
    other.join()
    text = path.read_text()
    assert "Thread the other (most recent call first):" in text
    assert f'File "{__file__}", line ' in text
    assert "in waits_here" in text
    assert "test_other_threads_follow" not in text, "the main thread's is there already"
