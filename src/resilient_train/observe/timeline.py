"""From ``events.jsonl`` to the story of a run: each recovery with its phases, and how the job ended.

A recovery is everything that happened in one generation above 0, from its ``fault`` to ``resumed`` (or ``paused``: all
stand where they were to go on), or to the next ``fault`` (superseded), or to ``job_end`` (failed). Files may be torn,
or written by something else: what an event fails to say is unknown (None) here, and never an exception.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

from resilient_train.events import Event
from resilient_train.faults import COST_NO_PROCESS
from resilient_train.observe.deviations import Deviation, read_deviations
from resilient_train.observe.fields import groups_of, number_of, ranks_of, text_of
from resilient_train.observe.paused import PauseRecord, read_pauses
from resilient_train.observe.saved import Saved, read_saved
from resilient_train.observe.slower import Straggler, read_paces, read_stragglers
from resilient_train.protocol.stragglers import Pace

PHASES = ("DETECT", "STOP", "REPLACE", "AGREE", "REBUILD", "RESTORE", "RESUME")
"""Phases in the order in which they end. REPLACE overlaps STOP; DETECT lies before the recovery's start."""

_INJECTION_WINDOW_NS = 60 * 10**9
_NS_PER_MS = 1e6


class RecoveryOutcome(enum.StrEnum):
    """How a recovery ended. UNFINISHED: the events end before the recovery does."""

    RESUMED = "resumed"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    UNFINISHED = "unfinished"


class PhaseSpan(msgspec.Struct, frozen=True):
    """A phase; wall-clock nanoseconds."""

    phase: str
    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """Length in milliseconds."""
        return (self.end_ns - self.start_ns) / _NS_PER_MS


class Copy(msgspec.Struct, frozen=True):
    """State that went from ``source`` to ``target``; the rest is None where the copy's end was not written."""

    source: int
    target: int
    size_bytes: int | None = None
    duration_ms: float | None = None
    way: str | None = None


class Injected(msgspec.Struct, frozen=True):
    """A fault that was planned: what the victim wrote before it hit itself."""

    rank: int
    step: int
    phase: str
    kind: str
    at: str


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. ``lost`` is empty where a collective failed and nobody had died."""

    generation: int
    lost: tuple[int, ...]
    reason: str
    outcome: RecoveryOutcome
    fault_ns: int
    end_ns: int
    spans: tuple[PhaseSpan, ...]
    """The phases that are known, in the order of ``PHASES``."""
    seen_by: dict[int, str]
    """Lost rank -> what saw its death."""
    last_words: tuple[str, ...]
    """Why lost ranks have ended themselves, as they said."""
    injected: tuple[Injected, ...]
    starts: dict[int, str]
    """Rank -> how its new process was started: cold or forked."""
    copies: tuple[Copy, ...]
    rolled_forward: tuple[int, ...]
    redone_by: tuple[int, ...]
    """Ranks that ran ``redone_step`` again."""
    redone_step: int | None
    fenced: tuple[int, ...]
    commits: int | None
    """Optimizer updates from whose end all ranks went on; None where no plan was made."""
    commits_lost: int
    """Updates that some rank had applied before the fault and that the plan did not keep. Must be 0."""

    @property
    def total_ms(self) -> float:
        """From the fault being seen to all ranks training again (or to the recovery's end otherwise)."""
        return (self.end_ns - self.fault_ns) / _NS_PER_MS

    def span(self, phase: str) -> PhaseSpan | None:
        """The span of ``phase``; None if it is not known."""
        return next((span for span in self.spans if span.phase == phase), None)


class NanSeen(msgspec.Struct, frozen=True):
    """There was NaN in the state, and when a rank had looked before there was none. Told by the first rank, once for
    each start of all.
    """

    told: str
    commits: int | None
    """After how many updates it was seen."""
    without: int | None
    """After how many there was none; None: that process had never looked."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run; ``exit_code`` and ``end_reason`` are None where the job's end was not written (yet)."""

    world_size: int | None
    recoveries: tuple[Recovery, ...]
    restarts: int
    """How often all ranks were started again together: before the first step, or because their state was lost."""
    replacements: int
    """Processes that were started in the place of one that was lost."""
    saved: Saved
    pauses: tuple[PauseRecord, ...]
    """In none of the times of ``recoveries``: what stands because somebody wants it loses nothing."""
    deviations: tuple[Deviation, ...]
    nan: tuple[NanSeen, ...]
    stragglers: tuple[Straggler, ...]
    paces: dict[int, Pace]
    """By rank: how long it computed in a step at the end, or when the job was asked to end."""
    finished: bool
    exit_code: int | None
    end_reason: str | None
    digests: dict[int, str]
    """Rank -> digest of its parameters at its normal end."""
    rank_digests: dict[int, str]
    """Rank -> digest of the state that is its own (random numbers, loader)."""
    replicas: tuple[tuple[int, ...], ...] = ()
    """The ranks that are to hold the same; () where that is all of them."""
    otherwise: tuple[str, ...] = ()
    """The events that say that something was computed, or is left, otherwise than without faults."""

    @property
    def steps_redone(self) -> int:
        """Steps that had to be run again; one that all ranks redid in one recovery counts once."""
        return sum(
            bool(recovery.redone_by) for recovery in self.recoveries if recovery.outcome is RecoveryOutcome.RESUMED
        )

    @property
    def paused_s(self) -> float:
        """For how long all ranks stood because somebody wanted it."""
        return sum(pause.length_s for pause in self.pauses)

    @property
    def commits_lost(self) -> int:
        """Committed steps that were lost, over all recoveries."""
        return sum(recovery.commits_lost for recovery in self.recoveries)

    @property
    def digest(self) -> str | None:
        """The digest of the parameters at the end; None unless all ranks reached the end with the same. Of a model in
        parts: that of each part, by its first rank.
        """
        if self.world_size is None or set(self.digests) != set(range(self.world_size)):
            return None
        groups = self.replicas or (tuple(range(self.world_size)),)
        found = [{self.digests[rank] for rank in group if rank in self.digests} for group in groups]
        return " ".join(one for (one,) in found) if all(len(each) == 1 for each in found) else None


def _nan_seen(event: Event) -> NanSeen:
    without = number_of(event, "without")
    known = without if without is None or without >= 0 else None
    return NanSeen(text_of(event, "told") or "", number_of(event, "commits"), known)


_ENDS_ITSELF = ("device_failed", "worker_lost", "unbound_name", "body_lost", "state_lost")
_OTHERWISE = (
    "tail_input_missing",
    "tail_added_otherwise",
    "other_data",
    "other_loop",
    "hooks_lost",
    "compiled_otherwise",
)
_OTHERWISE_WITH = {"tail_lost": "names", "verified": "everywhere"}
"""Those that say so where this stands in them."""


def _is_otherwise(event: Event) -> bool:
    told = _OTHERWISE_WITH.get(event.kind)
    return event.kind in _OTHERWISE or (told is not None and bool(event.detail.get(told)))


def _otherwise(ordered: Sequence[Event]) -> tuple[str, ...]:
    """A process that takes a rank's place has what another rank had, where all were to have the same and had not."""
    replaced = {event.rank for event in ordered if event.kind == "spawned" and event.detail.get("joining") is True}
    return tuple(
        dict.fromkeys(
            event.kind
            for event in ordered
            if _is_otherwise(event)
            or (event.kind == "state_differs" and any(replaced & {*group} for group in groups_of(event, "ranks")))
        )
    )


def _all_left_well(ordered: Sequence[Event]) -> bool:
    """Where no Session says that it is over: each rank's newest process has ended with 0."""
    newest: dict[int, bool] = {}
    for event in ordered:
        if event.kind in ("spawned", "exited"):
            newest[event.rank] = event.kind == "exited" and number_of(event, "code") == 0
    return bool(newest) and all(newest.values())


def read_run(events: Iterable[Event]) -> Run:
    """The story that the events tell."""
    ordered = sorted(events, key=lambda event: event.time_ns)
    starts = [event for event in ordered if event.kind == "run_start"]
    ends = [event for event in ordered if event.kind == "job_end"]
    sessions = [event for event in ordered if event.kind == "session_end"]
    begun = [event for event in ordered if event.kind == "started"]
    return Run(
        world_size=number_of(starts[0], "world_size") if starts else None,
        recoveries=tuple(recoveries(ordered)),
        restarts=sum(event.kind == "restart_all" for event in ordered),
        replacements=sum(event.kind == "spawned" and event.detail.get("joining") is True for event in ordered),
        saved=read_saved(ordered),
        pauses=read_pauses(ordered),
        deviations=read_deviations(ordered),
        nan=tuple(map(_nan_seen, (e for e in ordered if e.kind == "holds_nan" and e.detail.get("first") is True))),
        stragglers=read_stragglers(ordered),
        paces=read_paces(ordered),
        finished=any(event.kind == "finished" for event in ordered) or (not ends and _all_left_well(ordered)),
        exit_code=number_of(ends[-1], "code") if ends else None,
        end_reason=text_of(ends[-1], "reason") if ends else None,
        digests={event.rank: text for event in sessions if (text := text_of(event, "params_digest"))},
        rank_digests={event.rank: text for event in sessions if (text := text_of(event, "rank_digest"))},
        replicas=groups_of(begun[-1], "replicas") if begun else (),
        otherwise=_otherwise(ordered),
    )


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    """The recoveries of a run, oldest first."""
    ordered = sorted(events, key=lambda event: event.time_ns)
    faults = [event for event in ordered if event.kind == "fault" and event.generation > 0]
    found: list[Recovery] = []
    newcomers: set[int] = set()
    lost_at: dict[int, int] = {}
    for index, fault in enumerate(faults):
        following = faults[index + 1] if index + 1 < len(faults) else None
        lost = ranks_of(fault, "lost")
        deaths = {rank: death for rank in lost if (death := _death(rank, fault, ordered, lost_at.get(rank, 0)))}
        newcomers |= set(lost)
        recovery = _recovery(fault, following, ordered, deaths, newcomers, faults[index - 1] if index else None)
        found.append(recovery)
        lost_at |= dict.fromkeys(lost, fault.time_ns)
        if recovery.outcome is RecoveryOutcome.RESUMED:
            # Until then, replacements of the generation before are processes that start, not survivors.
            newcomers = set()
    return found


def _recovery(
    fault: Event,
    following: Event | None,
    events: Sequence[Event],
    deaths: dict[int, Event],
    newcomers: set[int],
    before: Event | None,
) -> Recovery:
    until = following.time_ns if following else None
    inside = [
        event
        for event in events
        if event.generation == fault.generation
        and event.time_ns >= fault.time_ns
        and (until is None or event.time_ns <= until)
    ]
    outcome, end_ns = _ending(fault, following, inside, events)
    # The agent writes `fault` when it has acted on it already: the recovery began when the death was seen.
    begin_ns = min([fault.time_ns, *(death.time_ns for death in deaths.values())])
    plan = _last(inside, "plan")
    joined = [event for event in inside if event.kind == "joined"]
    redone_by = tuple(sorted({event.rank for event in inside if event.kind == "done" and event.detail.get("redone")}))
    steps = [event.step for event in inside if event.kind == "done" and event.rank in redone_by and event.step >= 0]
    commits = number_of(plan, "commits") if plan else None
    reached = max((number_of(event, "commits") or 0 for event in joined), default=0)
    injections = _injections(fault, deaths, before, events)
    return Recovery(
        generation=fault.generation,
        lost=ranks_of(fault, "lost"),
        reason=text_of(fault, "reason") or "",
        outcome=outcome,
        fault_ns=begin_ns,
        end_ns=end_ns,
        spans=_spans(begin_ns, _detection(begin_ns, deaths, injections, events), inside, newcomers),
        seen_by={rank: text_of(death, "by") or "unknown" for rank, death in deaths.items()},
        last_words=tuple(words for death in deaths.values() if (words := _last_words(death, events))),
        injected=tuple(map(_as_injected, injections)),
        starts=_starts(fault.generation, events),
        copies=_copies(plan, inside),
        rolled_forward=ranks_of(plan, "rolled_forward") if plan else (),
        redone_by=redone_by,
        redone_step=(min(steps) if steps else commits) if redone_by else None,
        fenced=tuple(sorted({event.rank for event in inside if event.kind == "fenced"})),
        commits=commits,
        commits_lost=max(0, reached - commits) if commits is not None else 0,
    )


def _ending(
    fault: Event, following: Event | None, inside: Sequence[Event], events: Sequence[Event]
) -> tuple[RecoveryOutcome, int]:
    resumed = _let_go(inside)
    if resumed:
        return RecoveryOutcome.RESUMED, resumed.time_ns
    until_ns = following.time_ns if following else events[-1].time_ns + 1
    for event in events:
        if event.kind == "restart_all" and fault.time_ns <= event.time_ns < until_ns:
            return RecoveryOutcome.FAILED, event.time_ns
    if following:
        return RecoveryOutcome.SUPERSEDED, following.time_ns
    ends = [event for event in events if event.kind == "job_end" and event.time_ns >= fault.time_ns]
    if ends:
        return RecoveryOutcome.FAILED, ends[0].time_ns
    return RecoveryOutcome.UNFINISHED, inside[-1].time_ns if inside else fault.time_ns


def _spans(
    begin_ns: int, detection: tuple[int | None, int | None], inside: Sequence[Event], newcomers: set[int]
) -> tuple[PhaseSpan, ...]:
    """Each phase whose two ends are known. One machine, one clock: a negative length is noise, and becomes 0."""
    joined = [event for event in inside if event.kind == "joined"]
    stopped = [number_of(e, "stopped_ns") or e.time_ns for e in joined if e.rank not in newcomers]
    replaced = [event.time_ns for event in joined if event.rank in newcomers]
    plan, built = _last(inside, "plan"), _last(inside, "built")
    done, resumed = _last(inside, "done"), _let_go(inside)
    all_joined = joined[-1].time_ns if joined else None
    edges: dict[str, tuple[int | None, int | None]] = {
        "DETECT": detection,
        "STOP": (begin_ns, max(stopped, default=None)),
        "REPLACE": (begin_ns, max(replaced, default=None)),
        "AGREE": (all_joined, _time(plan)),
        "REBUILD": (_time(plan), _time(built)),
        "RESTORE": (_time(built), _time(done)),
        "RESUME": (_time(done), _time(resumed)),
    }
    found = []
    for phase in PHASES:
        start, end = edges[phase]
        if start is not None and end is not None:
            found.append(PhaseSpan(phase, start, max(start, end)))
    return tuple(found)


def _detection(
    begin_ns: int, deaths: dict[int, Event], injections: Sequence[Event], events: Sequence[Event]
) -> tuple[int | None, int | None]:
    """The longest way from an injection to its being seen; unknown for a fault that nobody injected."""
    ways = [(event.time_ns, death.time_ns) for death in deaths.values() if (event := _injection(death, events))]
    if not deaths:  # else one that kills nobody may be without effect so far
        ways = [(event.time_ns, begin_ns) for event in injections]
    return max(ways, key=lambda way: way[1] - way[0], default=(None, None))


def _death(rank: int, fault: Event, events: Sequence[Event], after_ns: int) -> Event | None:
    """The death of ``rank`` that led to ``fault``; not one that an earlier fault (at ``after_ns``) was about."""
    seen = [event for event in events if event.kind == "death_seen" and event.rank == rank]
    return next((event for event in reversed(seen) if after_ns < event.time_ns <= fault.time_ns), None)


def _last_words(death: Event, events: Sequence[Event]) -> str:
    """What the process has written before it ended itself; empty if something else has ended it."""
    of_rank = [event for event in events if event.rank == death.rank and event.time_ns <= death.time_ns]
    newest = next((event for event in reversed(of_rank) if event.kind in ("spawned", *_ENDS_ITSELF)), None)
    return (text_of(newest, "error") or "") if newest is not None else ""


def _injection(death: Event, events: Sequence[Event]) -> Event | None:
    """What caused ``death``: an injection of that rank, at most a minute earlier, no other death in between."""
    for event in reversed(events):
        if event.rank != death.rank or event.time_ns > death.time_ns or event is death:
            continue
        if event.kind == "death_seen":
            return None
        if event.kind == "injected":
            return event if death.time_ns - event.time_ns <= _INJECTION_WINDOW_NS else None
    return None


def _injections(fault: Event, deaths: dict[int, Event], before: Event | None, events: Sequence[Event]) -> list[Event]:
    """What caused ``fault``: injections that killed, and those that kill nobody since the fault before."""
    found = [event for rank in deaths if (event := _injection(deaths[rank], events))]
    since = max(fault.time_ns - _INJECTION_WINDOW_NS, before.time_ns if before else 0)
    for event in events:
        harmless = event.kind == "injected" and event.detail.get("kind") in COST_NO_PROCESS
        if harmless and since < event.time_ns <= fault.time_ns and event not in found:
            found.append(event)
    return found


def _as_injected(event: Event) -> Injected:
    return Injected(event.rank, event.step, event.phase, text_of(event, "kind") or "fault", text_of(event, "at") or "")


def _starts(generation: int, events: Sequence[Event]) -> dict[int, str]:
    """Of all events: the agent may have started the process before it wrote ``fault``."""
    spawned = [event for event in events if event.kind == "spawned" and event.generation == generation]
    return {event.rank: start for event in spawned if (start := text_of(event, "start"))}


def _copies(plan: Event | None, inside: Sequence[Event]) -> tuple[Copy, ...]:
    planned = plan.detail.get("copies") if plan else None
    sources: dict[int, int] = {}
    if isinstance(planned, dict):
        for target, source in planned.items():
            if str(target).isdecimal() and isinstance(source, int):
                sources[int(target)] = source
    copies = {target: Copy(source, target) for target, source in sources.items()}
    for event in inside:
        if event.kind == "fetched":
            source = number_of(event, "source")
            duration_ns = number_of(event, "duration_ns")
            copies[event.rank] = Copy(
                source=-1 if source is None else source,
                target=event.rank,
                size_bytes=number_of(event, "bytes"),
                duration_ms=None if duration_ns is None else duration_ns / _NS_PER_MS,
                way=text_of(event, "way"),
            )
    return tuple(copies[target] for target in sorted(copies))


def _last(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in reversed(events) if event.kind == kind), None)


def _let_go(inside: Sequence[Event]) -> Event | None:
    """All were where the plan wanted them: they went on, or stood there because somebody wanted it."""
    return next((event for event in inside if event.kind in ("resumed", "paused")), None)


def _time(event: Event | None) -> int | None:
    return event.time_ns if event else None
