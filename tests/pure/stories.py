"""Hand-written runs for the tests of ``observe`` and of the command line; times are milliseconds after EPOCH_NS."""

from pathlib import Path

from resilient_train.events import Event, from_line, to_line
from resilient_train.observe.sinks import EVENTS_FILE

EPOCH_NS = 1_790_000_000 * 10**9


def ns(ms: float) -> int:
    return EPOCH_NS + round(ms * 1e6)


def at(ms: float, kind: str, rank: int = -1, generation: int = 0, step: int = -1, phase: str = "", **fields) -> Event:
    incarnation = fields.pop("incarnation", 0)
    detail = fields.pop("detail", fields)
    event = Event(kind, ns(ms), rank, incarnation, generation, step, phase, 0, detail)
    assert from_line(to_line(event)) == event
    return event


def beginning(world_size: int = 3) -> list[Event]:
    spawned = [at(1 + rank, "spawned", rank, pid=100 + rank, joining=False) for rank in range(world_size)]
    return [at(0, "run_start", world_size=world_size, argv=["job.py"]), *spawned, at(500, "started")]


def one_kill(t: float = 1000, generation: int = 1, rank: int = 2, step: int = 7) -> list[Event]:
    """A rank of three is killed in its backward; the two others redo the step, the new one copies from rank 0."""
    g = generation
    others = [other for other in range(3) if other != rank]
    joined = {"commits": step, "phase": 1, "holds": True, "stopped_ns": 0}
    return [
        at(t - 2, "injected", rank, g - 1, step, "COMPUTE", detail={"kind": "kill", "at": "backward"}),
        at(t, "death_seen", rank, g - 1, by="futex"),
        at(t + 0.5, "spawned", rank, g, incarnation=1, pid=200, joining=True, start="forked"),
        at(t + 1, "fault", rank, g, lost=[rank], reason=f"rank {rank} was killed by signal 9"),
        at(t + 10, "joined", others[0], g, detail=joined | {"stopped_ns": ns(t + 8)}),
        at(t + 12, "joined", others[1], g, detail=joined),
        at(t + 300, "joined", rank, g, detail=joined | {"commits": 0, "phase": 0, "holds": False}),
        at(t + 302, "plan", -1, g, commits=step, copies={str(rank): others[0]}, rolled_forward=[], redone=others),
        *(at(t + 310 + r, "built", r, g) for r in range(3)),
        at(t + 340, "fetched", rank, g, source=others[0], bytes=12_000_000, duration_ns=20_000_000, way="memory"),
        *(at(t + 315, "done", r, g, step, redone=True) for r in others),
        at(t + 350, "done", rank, g, step, redone=False),
        at(t + 351, "resumed", -1, g, commits=step),
    ]


def normal_end(t: float = 5000, world_size: int = 3, digest: str = "abc") -> list[Event]:
    detail = {"params_digest": digest, "rank_digest": "r", "steps": 20, "commits": 20, "redone": 1}
    return [
        at(t, "finished"),
        *(at(t + 1 + rank, "session_end", rank, detail=detail) for rank in range(world_size)),
        *(at(t + 20 + rank, "exited", rank, code=0) for rank in range(world_size)),
        at(t + 30, "job_end", code=0, reason=""),
    ]


def whole_run() -> list[Event]:
    return [*beginning(), *one_kill(), *normal_end()]


def write(run_dir: Path, events: list[Event], tail: bytes = b"") -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / EVENTS_FILE).write_bytes(b"".join(map(to_line, events)) + tail)
    return run_dir


HOSTILE = b"\n".join(
    [
        b"not json at all",
        b"\xff\xfe\x00",
        b"[]",
        b'{"kind":"fault"}',
        b'{"kind":"fault","time_ns":"soon"}',
        b'{"kind":"fault","time_ns":5,"generation":1,"detail":{"lost":"all","reason":7}}',
        b'{"kind":"plan","time_ns":6,"generation":1,"detail":{"copies":[1],"commits":"x","rolled_forward":3}}',
        b'{"kind":"plan","time_ns":6,"generation":1,"detail":{"copies":{"x":1,"2":"y","3":0},"commits":true}}',
        b'{"kind":"fetched","time_ns":7,"generation":1,"rank":-9,"detail":{"bytes":-1,"duration_ns":1e300,"way":[]}}',
        b'{"kind":"joined","time_ns":4,"generation":1,"rank":0,"detail":{"stopped_ns":-5,"commits":3}}',
        b'{"kind":"joined","time_ns":8,"generation":1,"rank":1,"detail":{"stopped_ns":99999999999999999999999999}}',
        b'{"kind":"done","time_ns":9,"generation":1,"rank":0,"detail":{"redone":"yes"},"duration_ns":-4}',
        b'{"kind":"built","time_ns":2,"generation":1,"rank":0}',
        b'{"kind":"death_seen","time_ns":-3,"rank":0}',
        b'{"kind":"run_start","time_ns":0,"detail":{"world_size":"four"}}',
        b'{"kind":"session_end","time_ns":9,"rank":0,"detail":{"params_digest":5}}',
        b'{"kind":"[bold]\\u001b[31m","time_ns":9,"phase":"[/x]"}',
        b'{"kind":"job_end","time_ns":10,"detail":{"code":"zero","reason":"[/bold] odd"}}',
        b'{"kind":"resumed","time_',
    ]
)
"""What no writer of ours writes: garbage, wrong types, impossible times, and a torn last line."""
