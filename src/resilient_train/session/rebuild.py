"""Process groups of a new generation, built on a helper thread: their constructor listens to nobody."""

from __future__ import annotations

import os
import threading
from typing import Any

from resilient_train.frameworks.roles import Groups
from resilient_train.protocol.messages import FromAgent, Stop
from resilient_train.session.link import Link


def build_groups(link: Link, groups: Groups, generation: int) -> Any:
    """The groups, built but not adopted; the error that ended the building; or None: a newer stop came."""
    readable, writable = os.pipe2(os.O_CLOEXEC)
    cancelled = threading.Event()
    outcome: list[Any] = []

    def build() -> None:
        try:
            outcome.append(groups.build(generation, link.attempt, cancelled))
        except Exception as error:
            outcome.append(error)
        finally:
            os.close(writable)

    threading.Thread(target=build, name="rt-build-groups", daemon=True).start()
    try:
        if not _built_before_stop(link, readable, generation):
            cancelled.set()
            return None
    finally:
        os.close(readable)
    return outcome[0]


def _built_before_stop(link: Link, readable: int, generation: int) -> bool:
    # A source may be ready with its offer before this rank has noticed that it is built.
    early: list[FromAgent] = []
    try:
        while not link.channel.wait_either(readable):
            frame = link.receive()
            if isinstance(frame, Stop) and frame.generation > generation:
                return False
            early.append(frame)
        return True
    finally:
        link.channel.put_back(early)
