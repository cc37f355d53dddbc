"""The first hour of a newcomer, recorded: ``make newcomer``.

Installs the wheel in an empty environment (torch afterwards), types the tutorial line by line at two terminals, and
gives wrong commands. The typist reads the prompt of the terminal that he types at, and waits for nothing else: what he
types at the second terminal comes right behind the line at the first. What both terminals show goes to standard output.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bad_inputs import BAD, complaint, words_of
from documented import ROOT, Block, blocks, write_file

TUTORIAL = ROOT / "docs" / "tutorial.md"
OTHER_TERMINAL = "in another terminal"
RUNS = ("/tmp/tutorial", "/tmp/tutorial2", "/tmp/tutorial3")
PROMPT = re.compile(rb"<(\d+)> $")
"""With the exit code of the command before."""
LIMIT_S = 300.0


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


class Terminal:
    """A shell at a pseudo-terminal of its own. ``name`` stands in front of what it shows."""

    def __init__(self, name: str, folder: Path, environ: dict[str, str]) -> None:
        self.name = name
        self._shown = b""
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**environ, "PS1": r"<$?> ", "TERM": "dumb"})
        self.prompt()

    def type(self, line: str) -> None:
        """A line and Enter."""
        os.write(self._descriptor, line.encode() + b"\n")

    def prompt(self) -> int:
        """Reads until the shell has its prompt; the exit code of what was typed before."""
        deadline = time.monotonic() + LIMIT_S
        while (found := PROMPT.search(self._shown)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._descriptor], [], [], left_s)[0]:
                raise SystemExit(f"{self.name}: no prompt after {LIMIT_S:g} s:\n{self._shown.decode(errors='replace')}")
            self._shown += os.read(self._descriptor, 1 << 16)
        text, self._shown = self._shown.decode(errors="replace"), b""
        for line in text.replace("\r", "").splitlines():
            print(f"{self.name}| {line}", flush=True)
        return int(found[1])

    def close(self) -> None:
        """Hangs up: what still runs here ends."""
        os.close(self._descriptor)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def type_block(block: Block, terminal: Terminal) -> None:
    """Types the lines, each when the one before is done, and gives the last one Enter too."""
    lines = block.text.splitlines()
    for number, line in enumerate(lines):
        terminal.type(line)
        if number < len(lines) - 1 and not line.endswith("\\"):
            ended_well(terminal, line)


def ended_well(terminal: Terminal, what: str) -> None:
    if code := terminal.prompt():
        raise SystemExit(f"{terminal.name}: {what!r} ended with exit code {code}")


def type_tutorial(folder: Path, environ: dict[str, str]) -> None:
    first, second = Terminal("1", folder, environ), Terminal("2", folder, environ)
    busy = False
    try:
        for block in blocks(TUTORIAL):
            if block.why_not or block.language == "text":
                continue
            if block.note == OTHER_TERMINAL:
                type_block(block, second)
                ended_well(second, block.text)
                continue
            if busy:
                ended_well(first, "the job")
                busy = False
            if not write_file(block, folder):
                type_block(block, first)
                busy = True
        ended_well(first, "the last job")
    finally:
        first.close()
        second.close()


def digest_of(tool: Path, run_dir: str) -> str:
    done = subprocess.run([tool, "report", run_dir], capture_output=True, text=True, check=True)
    found = re.search("parameters equal on all ranks, digest ([0-9a-f]+)", done.stdout)
    assert found is not None, done.stdout
    return found[1]


def give_bad_inputs(commands: Path, folder: Path, environ: dict[str, str]) -> int:
    """How many were not answered as they should be."""
    (folder / "script.py").write_text("raise SystemExit('started')\n")
    (folder / "file").write_text("text\n")
    (folder / "empty").mkdir()
    places = {"SCRIPT": "script.py", "FILE": "file", "EMPTY": "empty"}
    failures = 0
    for bad in BAD:
        name, *words = words_of(bad, places)
        done = subprocess.run(
            [commands / name, *words],
            cwd=folder,
            env={**environ, **bad.environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        wrong = complaint(done.returncode, done.stdout, done.stderr, bad)
        failures += bool(wrong)
        print(f"{'WRONG' if wrong else 'ok':6}{bad}\n      {wrong or done.stderr.strip()}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path, help="where all of it lies; must not exist")
    parser.add_argument("--pip-flags", default="")
    args = parser.parse_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENT_", "MS_", "PYTHON"))}
    commands = folder / "venv" / "bin"
    environ = {**kept, "PATH": f"{commands}:{kept['PATH']}"}
    pip = [commands / "pip", "install", "-q", "--disable-pip-version-check", *shlex.split(args.pip_flags)]
    begun = time.monotonic()

    say("an empty environment, and the wheel")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([*pip, args.wheel], check=True)
    subprocess.run([commands / "resilient-train", "--version"], check=True)
    say("torch")
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([commands / "resilient-train", "--version"], check=True)
    print(f"after {time.monotonic() - begun:.0f} s", flush=True)

    say("the tutorial")
    (folder / "work").mkdir()
    for run_dir in RUNS:
        if Path(run_dir).exists():
            raise SystemExit(f"{run_dir} is there already; the tutorial writes there: remove it first")
    type_tutorial(folder / "work", environ)
    digests = [digest_of(commands / "resilient-train", run_dir) for run_dir in RUNS]
    print(f"after {time.monotonic() - begun:.0f} s; digests {digests}", flush=True)
    if len(set(digests)) != 1:
        raise SystemExit("not the same bits")

    say(f"{len(BAD)} wrong commands")
    failures = give_bad_inputs(commands, folder, environ)
    say(f"{failures} of {len(BAD)} answered wrongly; all of it took {time.monotonic() - begun:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
