"""What a process that takes a lost rank's place asks its agent before it has a Session.

The connection is one of its own, open for a moment: the rank's own begins with the Session.
"""

from __future__ import annotations

import os

from resilient_train.config import AgentLink
from resilient_train.errors import ConfigError, ProtocolError
from resilient_train.observe.sinks import say_aside
from resilient_train.protocol.messages import Hello, Reply, SetUp, Strayed
from resilient_train.transport import Channel

HOW_TO_KEEP = "register it too, in model=, scheduler= or state= of the Session (docs/reference/session.md)"


def recall(link: AgentLink) -> SetUp:
    """What the rank's first process has sent. Raises ConfigError if this process is no rank of the agent's, JobEnded if
    there is no agent any more.
    """
    channel, first = _ask(link)
    channel.close()
    return first


def stray(link: AgentLink, why: str) -> SystemExit:
    """Tells the agent that this process can't be what its predecessor was, so that the job ends. To be raised."""
    text = f"rank {link.rank} can't be replaced, {why}"
    say_aside(text)
    channel, _ = _ask(link)
    channel.send(Strayed(text))
    channel.receive()  # or the end of this process might be seen first
    channel.close()
    return SystemExit(2)


def _ask(link: AgentLink) -> tuple[Channel, SetUp]:
    channel = Channel(link.socket)
    channel.send(Hello("set-up", link.rank, link.incarnation, os.getpid(), token=link.token))
    answer = channel.receive()  # without a limit: see session/agent_link.py
    if isinstance(answer, Reply):
        raise ConfigError(answer.error)
    if not isinstance(answer, SetUp):
        raise ProtocolError(f"the agent answered {type(answer).__name__} instead of SetUp")
    return channel, answer
