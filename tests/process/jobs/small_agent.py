"""An agent in little, for tests/process/test_fork.py: runs commands in three ways, and says how they ended.

``small_agent.py FOLDER``; one JSON object on stdout. Afterwards a rank, a spare, the zygote and the root run on: the
test looks at what becomes of them.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from resilient_train import _register

_register.wrap_for_forks()  # as the launcher does, before torch is imported

from torch.distributed import run as _torchrun  # noqa: E402, F401

from resilient_train.config import Settings, environ_copy  # noqa: E402
from resilient_train.launch.agent.logs import Streams  # noqa: E402
from resilient_train.launch.agent.processes import start_cold  # noqa: E402
from resilient_train.launch.fork import standby_pool  # noqa: E402
from resilient_train.launch.fork.zygote import Born, start_root  # noqa: E402

SCRIPT = str(Path(__file__).with_name("forked.py"))
CASES = {
    "tell": (SCRIPT, "tell", "a b", ""),
    "relative": (os.path.relpath(SCRIPT), "raise"),
    "module": ("-m", "forked", "tell", "all but torch"),
    "raise": (SCRIPT, "raise"),
    "module raises": ("-m", "forked", "raise"),
    "hook": (SCRIPT, "hook"),
    "no such module": ("-m", "not.there"),
    "exit number": (SCRIPT, "exit", "number"),
    "exit text": (SCRIPT, "exit", "text"),
    "exit none": (SCRIPT, "exit", "none"),
    "interrupt": (SCRIPT, "interrupt"),
    "abort": (SCRIPT, "abort"),
    "spawn": (SCRIPT, "spawn"),
}
WAYS = ("plain", "cold", "forked")


class Held(standby_pool.Pool):
    """``holds``: zygotes that are made from now on do not come to their imports."""

    holds = False

    def _arrived(self, answer):
        found = super()._arrived(answer)
        if self.holds and found is not None:
            os.kill(found.child.pid, signal.SIGSTOP)
        return found


class Little:
    def __init__(self, folder: Path, root) -> None:
        self.folder = folder
        self.events: list[tuple[str, dict]] = []
        self.environ = {**os.environ, "RANK": "0"}
        self.command = (sys.executable, "-u", SCRIPT)
        self.pool = Held(root, self.command, Settings(), lambda *event: self.events.append(event))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - a process ends without telling this loop
            await asyncio.sleep(0.005)

    def count(self, kind: str) -> int:
        return sum(each == kind for each, _ in self.events)

    def stocked(self) -> bool:
        """The root, the zygote, and a spare beside them."""
        return len(self.pool.processes()) == 3

    def zygote(self) -> int:
        """0: there is none."""
        return next((each["pid"] for each in self.pool.describe() if each["depth"] == "zygote"), 0)

    def take(self, more: dict[str, str]):
        """What can become a rank; None: nothing; a future: soon."""
        given = asyncio.get_running_loop().create_future()
        self.pool.take({**self.environ, **more}, given.set_result, lambda: True)
        return given

    async def run(self, name: str, way: str, arguments: tuple[str, ...], **more: str) -> dict:
        child, paths = await self.start(name, way, arguments, more)
        await self.until(lambda: child.poll() is not None)
        out, err = (path.read_text() for path in paths)
        return {"code": child.poll(), "out": out, "err": err}

    async def start(self, name: str, way: str, arguments: tuple[str, ...], more: dict[str, str]):
        paths = [self.folder / f"{name}.{way}.{suffix}" for suffix in ("out", "err")]
        streams = Streams(*(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC) for path in paths))
        command, environ = (sys.executable, "-u", *arguments), {**self.environ, **more}
        if way == "plain":
            pipes = {"stdin": subprocess.DEVNULL, "stdout": streams.out, "stderr": streams.err}
            child = subprocess.Popen(command, env=environ, start_new_session=True, **pipes)  # noqa: ASYNC220
        elif way == "cold":
            child = start_cold(command, environ, streams)
        else:
            waiting = await self.take(more)
            assert waiting is not None, self.events
            assert self.pool.give_life(waiting, command, environ, streams)
            child = waiting.child
        for each in streams:
            os.close(each)
        return child, paths


def delays_of(pool: Held) -> list[float]:
    """After what times another zygote is made, from now on."""
    loop, found = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def noted(delay, callback, *args, **named):
        if callback == pool._make_zygote:
            found.append(delay)
        return call_later(delay, callback, *args, **named)

    loop.call_later = noted
    return found


async def main(folder: Path, root) -> None:
    little = Little(folder, root)
    little.pool.begin([little.environ])
    told = {}
    for name, arguments in CASES.items():
        ways = [little.run(name, way, arguments, RANK="3") for way in WAYS]
        told[name] = dict(zip(WAYS, await asyncio.gather(*ways), strict=True))
    again = await little.run("again", "forked", CASES["tell"], RANK="3")
    await little.until(little.stocked)
    other = (await little.take({"OMP_NUM_THREADS": "7"})) is None
    little.pool.holds = True
    again_s = delays_of(little.pool)
    os.kill(little.zygote(), 9)
    await little.until(lambda: little.count("standby_lost") == 1)
    spare, _ = await little.start("spare", "forked", (SCRIPT, "sleep"), {})
    none = await little.take({})
    await little.until(lambda: little.zygote() != 0)
    little.pool.holds = False
    os.kill(little.zygote(), 9)  # in the middle of its imports
    await little.until(lambda: little.count("standby_lost") == 2)
    await little.until(little.stocked)
    left = [spare.pid, *(each.child.pid for each in little.pool.processes())]
    result = {"told": told, "again": again, "other": other, "none": none is None}
    print(
        json.dumps({**result, "again_s": again_s, "left": left, "events": little.events}),
        flush=True,
    )
    await asyncio.sleep(600)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    standby_pool._PAUSE_S, standby_pool._ANSWER_S = 0.05, 60
    standby_pool._AGAIN_S = (standby_pool._AGAIN_S[0], 1.5)
    first = start_root(place / "standby.log", environ_copy())
    if isinstance(first, Born):
        first.begin()
    else:
        asyncio.run(main(place, first))
