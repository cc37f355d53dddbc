"""An agent in little, for tests/process/test_standby.py: runs commands cold and forked, and says how they ended.

``small_agent.py FOLDER``; one JSON object on stdout. Afterwards a fork, a spare and a nursery run on: the test looks at
what becomes of them.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from resilient_train.config import Settings
from resilient_train.launch.logs import Streams
from resilient_train.launch.processes import _start_cold
from resilient_train.launch.standby import Standby

SCRIPT = str(Path(__file__).with_name("forked.py"))
CASES = {
    "tell": (SCRIPT, "tell", "a b", ""),
    "relative": (os.path.relpath(SCRIPT), "raise"),
    "module": ("-m", "forked", "tell"),
    "raise": (SCRIPT, "raise"),
    "module raises": ("-m", "forked", "raise"),
    "hook": (SCRIPT, "hook"),
    "no such module": ("-m", "not.there"),
    "exit number": (SCRIPT, "exit", "number"),
    "exit text": (SCRIPT, "exit", "text"),
    "exit none": (SCRIPT, "exit", "none"),
    "interrupt": (SCRIPT, "interrupt"),
    "abort": (SCRIPT, "abort"),
}


class Little:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[tuple[str, dict]] = []
        self.environ = {**os.environ, "RANK": "0", "PYTHONPATH": str(Path(SCRIPT).parent)}
        command = (sys.executable, "-u", SCRIPT)
        self.standby = Standby(command, folder, Settings(standby_delay_s=0.0), self.note)

    def note(self, kind: str, detail: dict) -> None:
        self.events.append((kind, detail))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - a process ends without telling this loop
            await asyncio.sleep(0.005)

    def count(self, kind: str) -> int:
        return sum(each == kind for each, _ in self.events)

    def stocked(self) -> bool:
        """The nursery, and a spare beside it."""
        return len(self.standby.pids()) == 2

    async def run(self, name: str, way: str, arguments: tuple[str, ...], **more: str) -> dict:
        child, paths = self.start(name, way, arguments, more)
        await self.until(lambda: child.poll() is not None)
        out, err = (path.read_text() for path in paths)
        return {"code": child.poll(), "out": out, "err": err}

    def start(self, name: str, way: str, arguments: tuple[str, ...], more: dict[str, str]):
        paths = [self.folder / f"{name}.{way}.{suffix}" for suffix in ("out", "err")]
        streams = Streams(*(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC) for path in paths))
        command, environ = (sys.executable, "-u", *arguments), {**self.environ, **more}
        if way == "cold":
            child = _start_cold(command, environ, streams)
        else:
            child = self.standby.become(command, environ, streams)
        for each in streams:
            os.close(each)
        return child, paths


async def main(folder: Path) -> None:
    little = Little(folder)
    little.standby.begin([little.environ])
    await little.until(lambda: little.count("standby_ready") == 1)
    told = {}
    for name, arguments in CASES.items():
        # Side by side: the interpreter and torch take their second either way.
        ways = [little.run(name, way, arguments, RANK="3") for way in ("cold", "forked")]
        told[name] = dict(zip(("cold", "forked"), await asyncio.gather(*ways), strict=True))
    again = await little.run("again", "forked", CASES["tell"], RANK="3")
    await little.until(little.stocked)
    begun = time.monotonic()
    other = little.start("other", "forked", (SCRIPT, "tell"), {"OMP_NUM_THREADS": "7"})[0]
    nursery = next(detail["pid"] for kind, detail in little.events if kind == "standby_ready")
    os.kill(nursery, 9)
    await little.until(lambda: little.count("standby_lost") == 1)
    spare = little.start("spare", "forked", (SCRIPT, "sleep"), {})[0]
    none = little.start("none", "forked", (SCRIPT, "sleep"), {})[0]
    refused_s = time.monotonic() - begun
    await little.until(little.stocked)
    left = [spare.pid, *little.standby.pids()] if spare else []
    result = {"told": told, "again": again, "other": other is None, "none": none is None}
    print(json.dumps({**result, "refused_s": refused_s, "left": left, "events": little.events}), flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
