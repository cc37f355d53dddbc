"""The import of the package tells the agent of a rank, and neither fails nor waits for long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_train.config import AgentLink, link_environ
from resilient_train.launch.fork.live import cold
from resilient_train.protocol.messages import FromRank, Hello, Reply
from resilient_train.transport import FrameBuffer, decode, encode, from_rank

LONG_S = 60.0
SCRIPTS = {
    "statement": "import resilient_train as rt, resilient_train.config\nfrom resilient_train import Session",
    "a name of it": "from resilient_train import standby_point",
    "a module of it": "import resilient_train.errors",
    "importlib": "import importlib\nimportlib.import_module('resilient_' + 'train')",
    "by its name": "__import__('resilient_train')",
}


class Agent:
    """Hears all who connect, and answers unless it is told not to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers = True
        self.heard: list[FromRank] = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.serves = threading.Thread(target=self.serve)

    def end(self) -> None:
        """It has heard then all that was said."""
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self.path))
        self.serves.join()

    def serve(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            with connection:
                said = connection.recv(1 << 16)
                if not said:
                    return
                self.heard += [decode(body, from_rank) for body in FrameBuffer().feed(said)]
                if self.answers:
                    connection.sendall(encode(Reply()))
                connection.recv(1)  # until the other end has closed

    def told(self) -> list[tuple[str, int, int, str]]:
        self.end()
        hellos = [each for each in self.heard if isinstance(each, Hello)]
        return [(each.role, each.rank, each.incarnation, each.token) for each in hellos]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "agent.sock")
    agent.serves.start()
    yield agent
    agent.end()
    agent.listener.close()


def run(command: tuple[str, ...], path: Path, *, joining: bool = False, **more: str) -> None:
    link = AgentLink(str(path), 1, 2, 3, joining, str(path.parent), "token")
    environ = {**os.environ, **link_environ(link), **more}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "done\n")


def written(folder: Path, script: str) -> tuple[str, ...]:
    """The command that runs it."""
    path = folder / "script.py"
    path.write_text(f"{script}\nprint('done')\n")
    return (sys.executable, "-u", str(path))


@pytest.mark.parametrize("boots", [False, True], ids=["first", "imported before"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_import_is_told_once(agent: Agent, tmp_path: Path, script: str, boots: bool) -> None:
    """Also where the package was imported before the script began, which does not count."""
    command = written(tmp_path, SCRIPTS[script])
    run(cold(command) if boots else command, agent.path)
    assert agent.told() == [("import", 1, 3, "token")]


@pytest.mark.parametrize("boots", [False, True], ids=["first", "imported before"])
def test_a_process_that_joins_has_nothing_to_tell(agent: Agent, tmp_path: Path, boots: bool) -> None:
    command = written(tmp_path, SCRIPTS["statement"])
    run(cold(command) if boots else command, agent.path, joining=True)
    assert agent.told() == []


def test_a_script_that_does_not_import_us_says_nothing(agent: Agent, tmp_path: Path) -> None:
    """What this package imports of itself later is none of the script's doing."""
    own = "import sys\nsys.modules['resilient_train._register']._wrap\nimport torch.distributed"
    run(cold(written(tmp_path, own)), agent.path)
    assert agent.told() == []


def test_the_package_is_what_it_was(agent: Agent, tmp_path: Path) -> None:
    script = "import sys, types\nbefore = sys.modules['resilient_train']\nimport resilient_train as rt\n"
    script += "assert rt is before\nassert type(rt) is types.ModuleType\nassert rt.__spec__.name == 'resilient_train'"
    run(cold(written(tmp_path, script)), agent.path)
    assert len(agent.told()) == 1


def test_an_agent_that_does_not_answer_is_not_waited_for(agent: Agent, tmp_path: Path) -> None:
    agent.answers = False
    run(written(tmp_path, SCRIPTS["statement"]), agent.path)
    assert len(agent.told()) == 1, "it is told all the same"


def test_an_agent_that_lets_nobody_in(tmp_path: Path) -> None:
    """It is stopped, and as many wait at its door as there is room for."""
    agent = Agent(tmp_path / "agent.sock")
    agent.listener.listen(0)
    with socket.socket(socket.AF_UNIX) as waits:
        waits.connect(str(agent.path))
        run(written(tmp_path, SCRIPTS["statement"]), agent.path)
    agent.listener.close()


@pytest.mark.parametrize("there", [False, True], ids=["no socket", "nobody listens"])
def test_an_agent_that_is_gone(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "agent.sock"
    if there:
        with socket.socket(socket.AF_UNIX) as former:
            former.bind(str(path))
    run(written(tmp_path, SCRIPTS["statement"]), path)


def test_an_agent_that_talks_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\xff" * 64)

        thread = threading.Thread(target=serve)
        thread.start()
        run(written(tmp_path, SCRIPTS["statement"]), path)
        thread.join()


def test_a_link_that_makes_no_sense(tmp_path: Path) -> None:
    run(written(tmp_path, "import resilient_train"), tmp_path / "agent.sock", RESILIENT_INCARNATION="none")
