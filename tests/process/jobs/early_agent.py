"""An agent in little whose spares run ``early.py`` ahead, for tests/process/test_standby.py: ``early_agent.py FOLDER``.

One nursery serves all cases: what the script does is in a file that it reads. One JSON object on stdout.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
from torch._C._distributed_c10d import TCPStore

from resilient_train.config import AgentLink, Settings, link_environ
from resilient_train.launch import spares, standby
from resilient_train.launch.logs import Streams

SCRIPT = str(Path(__file__).with_name("early.py"))
LIMIT_S = 1.5
FINE = [
    f"{what}@group"
    for what in ("mine", "temporary", "append", "programs of Python", "lock", "fork that ends", "set another")
]
FINE += ["warm", "raise as a rank"]
VARIABLES = ("get", "getenv", "contains", "copy", "bytes", "set", "library", "suppressed", "child reads")
DEEDS = (
    "program",
    "shell",
    "overwrite",
    "remove",
    "save",
    "remove all",
    "spawn",
    "child lives",
    "raise",
    "exit",
    "die",
    "slow",
)
OF_GROUP = ("rank", "sampler", "new group", "objects", "session", "raise", "get")
ODD = [*(f"{what}@group" for what in (*VARIABLES, *DEEDS)), *(f"{what}@point" for what in OF_GROUP), "end"]


class Little:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mode = folder / "mode"
        self.events: list[tuple[str, dict]] = []
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = store
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "LOCAL_RANK": "2",
        }
        link = AgentLink(str(folder / "none.sock"), 2, 3, 1, joining=True, run_dir=str(folder))
        self.environ = {**os.environ, **shared, **link_environ(link)}
        self.command = (sys.executable, "-u", SCRIPT, str(self.mode), str(folder))
        settings = Settings(standby_delay_s=0.0, standby_depth="built", standby_limit_s=LIMIT_S)
        self.standby = standby.Standby(self.command, folder, settings, lambda *event: self.events.append(event))

    async def until(self, condition) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.events
            await asyncio.sleep(0.005)

    def has(self, *kinds: str) -> bool:
        return any(kind in kinds for kind, _ in self.events)

    async def rehearse(self, mode: str, depth: str = "built") -> None:
        """A spare goes on its way; when this returns it waits, or is no more."""
        self.mode.write_text(mode)
        (self.folder / "there").write_text("of the job")
        (self.folder / "tree").mkdir(exist_ok=True)
        (self.folder / "tree" / "leaf").write_text("of the job")
        self.standby._spares.close()  # every case begins anew
        self.standby._spares._depth = depth
        self.events.clear()
        self.standby._stock_up()
        await self.until(lambda: self.has("standby_waits", "standby_shallow"))

    def buried(self, pid: int) -> bool:
        """What the agent does with ended children, for one."""
        if not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        self.standby.bury(pid)
        return True

    async def live(self, mode: str, depth: str) -> dict:
        """The spare that waits becomes rank 2 of 3; what came of it."""
        paths = [self.folder / f"{mode}.{depth}.{suffix}" for suffix in ("out", "err")]
        streams = Streams(*(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC) for path in paths))
        child = self.standby.become(self.command, self.environ, streams)
        for each in streams:
            os.close(each)
        await self.until(lambda: child.poll() is not None)
        out, err = (path.read_text() for path in paths)
        return {"start": child.start, "code": child.poll(), "out": out, "err": err}


async def main(folder: Path) -> None:
    spares.PAUSE_S = standby.PAUSE_S = 0.01
    little = Little(folder)
    little.mode.write_text("")
    little.standby.begin([little.environ])
    await little.until(lambda: little.has("standby_waits"))
    told: dict[str, dict] = {"odd": {}, "lives": {}}
    told["lives"]["plain"] = await little.live("plain", "built")
    for mode in ODD:
        await little.rehearse(mode)
        told["odd"][mode] = [*little.events, *((little.folder / name).read_text() for name in ("there", "tree/leaf"))]
    await little.rehearse("", "idle")
    told["lives"]["idle"] = await little.live("", "idle")
    for mode in FINE:
        await little.rehearse(mode)
        told["lives"][mode] = await little.live(mode, "built")
    # Who waits is replaced when it dies; who is on its way dies with the agent.
    await little.rehearse("")
    first = little.events[-1][1]["pid"]
    os.kill(first, signal.SIGKILL)
    await little.until(lambda: little.buried(first))
    await little.until(lambda: [kind for kind, _ in little.events].count("standby_waits") == 2)
    told["after a death"] = [kind for kind, _ in little.events]
    told["described"] = little.standby.describe()
    later = {**little.environ, "TORCHELASTIC_RESTART_COUNT": "1"}
    little.mode.write_text("")
    taken = little.standby.become(little.command, later, Streams(2, 2))
    told["of another attempt"] = taken.start if taken else "none"
    little.standby._spares.close()
    little.mode.write_text("slow@group")
    little.standby._stock_up()
    await asyncio.sleep(0.3)
    assert [each["ready"] for each in little.standby.describe()] == [True, False]
    family = psutil.Process().children(recursive=True)  # nobody here reaps what cases have left behind, and it is dead
    told["left"] = [each.pid for each in family if each.status() != psutil.STATUS_ZOMBIE]
    print(json.dumps(told), flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
