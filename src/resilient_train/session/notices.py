"""What a rank tells: events for the job's log, and sentences for people, each with what happened and what to do.

What may come out otherwise than in the undisturbed run is told here, and nowhere else, by the rank that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from resilient_train.events import now
from resilient_train.frameworks.roles import WrittenEarly
from resilient_train.observe.sinks import EVENTS_FILE, JsonLines, say_aside
from resilient_train.protocol.rank import Rank
from resilient_train.session.agent_link import Link
from resilient_train.session.reading.loop_carried import LoopCarried


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:6])}{' ...' if names[6:] else ''}"


class Notices:
    """Those of one rank. ``number`` gives the step that they are about: the one that the user has, or the next."""

    has_outgrown = False
    """That the model has grown was told."""

    def __init__(self, link: Link, rank: Rank, number: Callable[[], int]) -> None:
        self._rank, self._number = rank, number
        self._who = {"rank": link.rank, "incarnation": link.incarnation}
        self.sink = JsonLines(f"{link.agent.run_dir}/{EVENTS_FILE}")
        self.is_speaker = link.rank == 0
        """This rank says what is true of all."""

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        """Writes one to the log."""
        where = {**self._who, "generation": self._rank.generation, "step": self._number()}
        self.sink.write(now(kind, **where, detail=detail))

    def say(self, text: str) -> None:
        """To people: of all ranks, one."""
        if self.is_speaker:
            say_aside(text)

    def say_of_rank(self, text: str) -> None:
        """To people, of this rank."""
        say_aside(f"rank {self._who['rank']}: {text}")

    def carried(self, found: LoopCarried) -> None:
        """What the loop keeps from step to step beside the Session."""
        self.event("loop_carried", {"names": list(found.names), "place": found.place})
        self.say(found.told())

    def outgrown(self, changed: str) -> None:
        """No new process could take the state up: a script builds its model in front of its loop."""
        self.has_outgrown = True
        self.event("outgrown", {"what": changed})
        self.say(
            f"{changed}: no new process is built like that, so a rank that is lost ends the job from now on, and "
            "nothing is saved any more (docs/how-to/loops.md, Parameters that join later)"
        )

    def update_left_out(self) -> None:
        """``on_anomaly="skip"``."""
        self.event("update_left_out", {})
        self.say(f"step {self._rank.number} was anomalous: it counts, without its update (on_anomaly='skip')")

    def batch_written(self) -> None:
        """By the body of a step, before its update."""
        self.event("batch_written", {})
        self.say(
            f"step {self._number()} wrote into its batch: from now on each batch is copied first, so that a step "
            "that is redone gets it as it was"
        )

    def written_early(self, found: WrittenEarly) -> None:
        """What the bodies have written before their update, and will be copied first from now on."""
        step = self._number()
        if found.hooks:
            self.event("hooks_lost", {"names": found.hooks})
            self.say_of_rank(
                f"step {step} had hung {found.hooks[0]} on the model, and has not when it ran again: a step that runs "
                "again begins without, and what is hung on once (`if handle is None`) is gone for good, so the bits "
                "will not be those of the undisturbed run; hang it on in front of the loop (docs/how-to/loops.md)"
            )
        if found.lost:
            self.event("written_early", {"names": [found.lost], "lost": True})
            self.say(
                f"step {step} wrote what {found.lost} keeps before its update, and nothing puts that back: a "
                "step that runs again writes it twice; write it behind the update (docs/how-to/loops.md, State that is "
                "written before the update)"
            )
        if not found.names:
            return
        self.event("written_early", {"names": found.names, "bytes": found.kept_bytes})
        more = f" and {len(found.names) - 1} more" if len(found.names) > 1 else ""
        self.say(
            f"step {step} wrote {found.names[0]}{more} before its update: from now on it is copied for each "
            f"step ({found.kept_bytes / 2**20:.1f} MiB in all), so that a fault can put it back"
        )

    def other_arguments(self) -> None:
        """A body is called with others than in the process whose place this one takes."""
        self.event("other_data", {})
        self.say_of_rank(
            f"step {self._rank.number} gets other data than in the process whose place this one takes: the bits will "
            "not be those of the undisturbed run; the loop must find its place in the data by session.position alone, "
            "and register what it hands from call to call (docs/how-to/trainers.md)"
        )

    def written_arguments(self) -> None:
        """The body that runs again has written into what it was called with."""
        self.event("other_data", {"arguments": True})
        self.say_of_rank(
            f"a body of session.call has written into its arguments, and step {self._rank.number} runs again with what "
            "it has left there: the bits may not be those of the undisturbed run; let it work on a copy "
            "(docs/how-to/trainers.md)"
        )

    def other_loop(self, following: int, loops: int, missed: int) -> None:
        """The script is in another of its loops than the job, whose step ``following`` comes next."""
        self.event("other_loop", {"next": following, "loops": loops, "missed": missed})
        self.say_of_rank(
            f"step {following} belongs to loop {loops} of the script over session.steps(), and this process is in its "
            f"loop {loops - missed}: what goes by that (an epoch that is counted around the loops, what stands between "
            "them) comes out otherwise than in the undisturbed run; let it come from step.number or step.epoch "
            "(docs/how-to/loops.md)"
        )

    def compiled_otherwise(self, place: str) -> None:
        """A process has begun anew, and code was, or is, compiled by the order in which shapes came."""
        self.event("compiled_otherwise", {"place": place})
        self.say_of_rank(
            f"torch.compile has compiled code for shapes as they came ({place}), and a new process meets them in "
            "another order: other kernels, so the bits may not be those of the undisturbed run; "
            "torch.compile(dynamic=True), or go through all shapes before the loop (docs/how-to/loops.md, Code that is "
            "compiled)"
        )

    def other_batch(self, following: int, epoch: int, taken: int) -> None:
        """The loader was brought to where step ``following`` begins, and is not there: ``taken`` of its pass."""
        self.event("other_data", {"next": following, "epoch": epoch, "batch": taken - 1})
        self.say_of_rank(
            f"its loader was brought to where step {following} begins, and gives another batch {taken - 1} of pass "
            f"{epoch} than in the process whose place this one takes: the bits will not be those of the undisturbed "
            "run; a loader must find each place again (docs/how-to/load-data.md, Another place)"
        )

    def tail_lost(self, following: int, names: Sequence[str], given: Sequence[str] = ()) -> None:
        """The process whose place this one takes was lost in or behind an update. ``names``: what code there writes;
        ``given``: what another rank has broadcast there, and is taken from it.
        """
        taken = {"given": list(given)} if given else {}
        self.event("tail_lost", {"next": following, "names": list(names), **taken})
        lost = f"rank {self._who['rank']} was lost in or behind the update before step {following}"
        if given:
            say_aside(
                f"{lost}: {_some(given)} are taken as they were broadcast there (an evaluation through "
                "DistributedDataParallel begins with rank 0's buffers), which is right unless they are written again "
                "behind that, on some ranks alone or past torch (`.data`) (docs/how-to/after-the-update.md)"
            )
        if not names:
            say_aside(
                f"{lost}: if the script does something there on that rank alone (it writes a file, say), look whether "
                "it is done, since nobody does it later (docs/how-to/after-the-update.md)"
            )
            return
        say_aside(
            f"{lost}, and code behind the update writes or draws {_some(names)}: "
            "what that rank alone had of it is lost, so the bits may not be those of the undisturbed run; write it at "
            "the head of the next step's body instead (docs/how-to/after-the-update.md)"
        )

    def without_steps(self) -> None:
        """This process has come to the end of its loop without a step."""
        self.say_of_rank(
            "all steps were made when this process took its place, and it has run none: what the loop binds (`step`, "
            "`loss`) has no value behind it (docs/how-to/loops.md, Behind the loop)"
        )
