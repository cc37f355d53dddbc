"""An agent in little whose spares run ``early.py`` ahead, for tests/process/test_fork.py: ``early_agent.py FOLDER``.

One zygote serves all cases: what the script does is in a file that it reads. One JSON object on stdout.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from resilient_train import _register

_register.wrap_for_forks()  # as the launcher does, before torch is imported

from torch._C._distributed_c10d import TCPStore  # noqa: E402

from resilient_train.config import AgentLink, Settings, environ_copy, link_environ  # noqa: E402
from resilient_train.launch.agent.logs import Streams  # noqa: E402
from resilient_train.launch.fork import standby_pool  # noqa: E402
from resilient_train.launch.fork.zygote import Born, start_root  # noqa: E402

SCRIPT = str(Path(__file__).with_name("early.py"))
LIMIT_S, PATIENCE_S = 1.5, 30
"""A spare's time for the script: where that is to run out, and where it is not, however busy the machine is."""
FINE = [f"{what}@group" for what in ("file", "lock", "fork that ends", "set another")]
FINE += ["warm", "raise as a rank", "no point"]
VARIABLES = ("get", "getenv", "contains", "copy", "bytes", "set", "library", "suppressed", "child reads")
DEEDS = ("child lives", "raise", "exit", "die", "slow")
OF_GROUP = ("rank", "sampler", "new group", "objects", "raise", "get")
ODD = [*(f"{what}@group" for what in (*VARIABLES, *DEEDS)), *(f"{what}@point" for what in OF_GROUP), "end"]


def within(limit_s: float) -> Settings:
    return Settings(standby_depth="built", standby_limit_s=limit_s)


class Little:
    def __init__(self, folder: Path, root) -> None:
        self.folder = folder
        self.mode = folder / "mode"
        self.events: list[tuple[str, dict]] = []
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "LOCAL_RANK": "2",
        }
        link = AgentLink(str(folder / "none.sock"), 2, 3, 1, joining=True, run_dir=str(folder))
        self.environ = {**os.environ, **shared, **link_environ(link)}
        self.command = (sys.executable, "-u", SCRIPT, str(self.mode), str(folder))
        self.pool = standby_pool.Pool(root, self.command, within(PATIENCE_S), lambda *event: self.events.append(event))

    async def until(self, condition) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            await asyncio.sleep(0.005)

    def has(self, *kinds: str) -> bool:
        return any(kind in kinds for kind, _ in self.events)

    async def run_ahead(self, mode: str) -> None:
        """A spare goes on its way; when this returns it waits, or is no more."""
        self.mode.write_text(mode)
        for spare in self.pool._spares.copy():  # every case begins anew
            self.pool._spares.remove(spare)
            self.pool._end(spare)
        self.pool._depth = "built"
        self.pool._settings = within(LIMIT_S if mode.startswith("slow@") else PATIENCE_S)
        self.events.clear()
        self.pool._stock()
        await self.until(lambda: self.has("standby_waits", "standby_shallow"))

    def buried(self, pid: int) -> bool:
        """What the agent does with ended children, for one."""
        if not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        return self.pool.reap(pid)

    async def live(self, mode: str) -> dict:
        """The spare that waits becomes rank 2 of 3; what came of it."""
        paths = [self.folder / f"{mode}.{suffix}" for suffix in ("out", "err")]
        streams = Streams(*(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC) for path in paths))
        waiting = (await self.take(self.environ))[0]
        assert self.pool.give_life(waiting, self.command, self.environ, streams)
        for each in streams:
            os.close(each)
        child = waiting.child
        await self.until(lambda: child.poll() is not None)
        out, err = (path.read_text() for path in paths)
        return {"start": child.start, "code": child.poll(), "out": out, "err": err}

    async def take(self, environ: dict[str, str]) -> list:
        given: list = []
        self.pool.take(environ, given.append, lambda: True)
        await self.until(lambda: given)
        return given


async def main(folder: Path, root) -> None:
    little = Little(folder, root)
    little.mode.write_text("")
    little.pool.begin([little.environ])
    little.pool.train("0")
    await little.until(lambda: little.has("standby_waits"))
    told: dict[str, dict] = {"odd": {}, "lives": {}}
    told["lives"]["plain"] = await little.live("plain")
    for mode in ODD:
        await little.run_ahead(mode)
        told["odd"][mode] = list(little.events)
    for mode in FINE:
        await little.run_ahead(mode)
        told["lives"][mode] = await little.live(mode)
    # Who waits is replaced when it dies; who is on its way dies with the agent.
    await little.run_ahead("")
    first = little.events[-1][1]["pid"]
    os.kill(first, signal.SIGKILL)
    await little.until(lambda: little.buried(first))
    await little.until(lambda: [kind for kind, _ in little.events].count("standby_waits") == 2)
    told["after a death"] = [kind for kind, _ in little.events]
    told["described"] = little.pool.describe()
    (taken,) = await little.take({**little.environ, "TORCHELASTIC_RESTART_COUNT": "1"})
    told["of another attempt"] = taken.child.start
    little.mode.write_text("slow@group")
    little.pool._stock()
    await little.until(lambda: [each["ready"] for each in little.pool.describe()] == [True, True, False])
    family = psutil.Process().children(recursive=True)  # nobody here reaps what cases have left behind, and it is dead
    told["left"] = [each.pid for each in family if each.status() != psutil.STATUS_ZOMBIE]
    print(json.dumps(told), flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    standby_pool._PAUSE_S, standby_pool._ANSWER_S = 0.01, 60
    first = start_root(place / "standby.log", environ_copy())
    if isinstance(first, Born):
        first.begin()
    else:
        asyncio.run(main(place, first))
