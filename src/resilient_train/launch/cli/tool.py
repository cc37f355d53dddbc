"""``resilient-train``: looks at runs, hits them, and demonstrates what happens then.

Exit codes: 0 it worked, 1 it did not, 2 the command was wrong; then one line on stderr says what. Results go to
stdout, as one JSON object with ``--json``.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from resilient_train.child_job import new_run_dir
from resilient_train.errors import ConfigError, ResilientError
from resilient_train.events import Event, now
from resilient_train.faults import INJECTABLE, TARGETS, check_fault, nearest
from resilient_train.frameworks.supported import torch_installed, torch_problem, version_line
from resilient_train.launch.cli import asking, status_text
from resilient_train.launch.cli.asking import RUNS
from resilient_train.observe.report import Line, as_dict, lines, show
from resilient_train.observe.sinks import EVENTS_FILE, JsonLines, read_events
from resilient_train.observe.timeline import read_run
from resilient_train.observe.trace import TRACE_FILE, write_trace
from resilient_train.protocol.messages import Inject, Pause, Unpause

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
_DEVICE = "device"
"""What ``inject`` takes beside the kinds of ``faults``."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (that of the process by default) and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a bar that the terminal's encoding lacks is no reason to fail
    try:
        code = app(list(arguments) or ["--help"], prog_name="resilient-train", standalone_mode=False)
    except ConfigError as error:
        return _complain(str(error), EXIT_WRONG_INPUT)
    except BrokenPipeError:
        # The reader (head, less) has left; stdout must not be flushed into the void again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except (ResilientError, OSError) as error:
        return _complain(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", 130)
    except Exception as error:
        # The parser's own complaints are of a class that some versions of typer bring along and others import.
        explain: Callable[[], str] | None = getattr(error, "format_message", None)
        if explain is None:
            raise
        return _complain(explain(), EXIT_WRONG_INPUT)
    return code if isinstance(code, int) else 0


def _complain(text: str, code: int) -> int:
    _tell(text)
    return code


def _tell(text: str) -> None:
    sys.stderr.write(f"resilient-train: {' '.join(text.split())}\n")


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"{version_line()}\n")
        raise typer.Exit


def _need_torch() -> None:
    """Raises ConfigError where no job could be run."""
    if problem := torch_problem(torch_installed()):
        raise ConfigError(problem)


@app.callback()
def _about(
    _asked: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Looks at runs of resilient-run, hits them, and demonstrates what happens then."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each of the two runs.")] = 60,
    ranks: Annotated[int, typer.Option(help="Training processes.")] = 4,
    faults: Annotated[str, typer.Option(help="Plan of faults, e.g. 'kill rank=1 step=9'; default: two kills.")] = "",
    run_dir: Annotated[Path | None, typer.Option(help="Where to write; must be new or empty.")] = None,
    as_json: Json = False,
) -> int:
    """Train a small GPT twice, undisturbed and with ranks killed, and compare every bit."""
    from resilient_train.demo import run

    _need_torch()
    options = run.DemoOptions(run_dir=run_dir or new_run_dir("demo"), steps=steps, ranks=ranks, faults=faults)
    with _progress(as_json) as progress:
        comparison = run.compare(options, progress)
    _answer(as_json, run.as_dict(comparison), run.as_lines(comparison))
    return 0 if comparison.good else EXIT_FAILED


@app.command()
def drill(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- SCRIPT [ARGS]", show_default=False)] = None,
    ranks: Annotated[int, typer.Option(help="Training processes.")] = 2,
    faults: Annotated[int, typer.Option(help="How many faults.")] = 6,
    kinds: Annotated[str, typer.Option(help="Which, by commas: kill, stop, hcce, uce, loop.")] = ("kill,stop,hcce,uce"),
    seed: Annotated[int, typer.Option(help="The same seed, the same faults.")] = 0,
    each: Annotated[bool, typer.Option("--each", help="Each fault in a run of its own: which one does it?")] = False,
    limit_s: Annotated[float, typer.Option(help="Time for the undisturbed run.")] = 3600.0,
    run_dir: Annotated[Path | None, typer.Option(help="Where to write; must be new or empty.")] = None,
    as_json: Json = False,
) -> int:
    """Run your own script undisturbed and with faults, and say what was recovered, how, and whether bit for bit."""
    from resilient_train.testing import drill as drills

    _need_torch()
    options = drills.DrillOptions(
        command=tuple(command or ()),
        run_dir=run_dir or new_run_dir("drill"),
        ranks=ranks,
        faults=faults,
        seed=seed,
        kinds=tuple(each.strip() for each in kinds.split(",") if each.strip()),
        each=each,
        limit_s=limit_s,
    )
    stream = sys.stderr if as_json else sys.stdout
    result = drills.drill(options, lambda text: print(text, file=stream, flush=True))
    _answer(as_json, drills.as_dict(result), drills.as_lines(result))
    return EXIT_FAILED if result.problems else 0


@app.command()
def doctor(as_json: Json = False) -> int:
    """Say what works on this machine and with these switches, what does not, and why."""
    from resilient_train.launch.cli import doctor as doctors

    facts = doctors.gather()
    findings = doctors.judge(facts)
    result = doctors.as_dict(facts, findings)
    _answer(as_json, result, doctors.as_lines(findings))
    return 0 if result["ok"] else EXIT_FAILED


@app.command()
def report(run: RunDir, as_json: Json = False) -> int:
    """Say what a run went through, recovery by recovery; also writes RUN/trace.json (for ui.perfetto.dev)."""
    events = _read(run)
    story = read_run(events)
    target = run / TRACE_FILE
    try:
        write_trace(events, target)
    except OSError as error:
        # A report of somebody else's run, or of a full disk, is worth having without its trace.
        _complain(f"no trace: {error}", EXIT_FAILED)
        _answer(as_json, {**as_dict(story), "trace": None}, lines(story))
        return 0
    _answer(as_json, {**as_dict(story), "trace": str(target)}, [*lines(story), Line(f"trace: {target}")])
    return 0


@app.command()
def advise(
    run_dir: Annotated[Path | None, typer.Option(help="A run: its failures, steps and starts are read.")] = None,
    stall_s: Annotated[
        float | None, typer.Option(help="Training time that one save costs; default: the run's.")
    ] = None,
    step_s: Annotated[float | None, typer.Option(help="Time of a step; default: the run's.")] = None,
    restart_s: Annotated[float | None, typer.Option(help="Time of a restart; default: the run's start.")] = None,
    latency_s: Annotated[
        float | None, typer.Option(help="From a save's stall until it is on storage; default: the run's.")
    ] = None,
    in_flight: Annotated[int, typer.Option(help="How many saves may be on their way at once.")] = 1,
    detection_s: Annotated[float, typer.Option(help="From a fault until it is noticed.")] = 0.0,
    devices: Annotated[int | None, typer.Option(help="That the job trains on; default: the run's ranks.")] = None,
    mtbf_hours: Annotated[float | None, typer.Option(help="Between failures of one device; default: 50,000.")] = None,
    share: Annotated[float, typer.Option(help="Of the expected failures that need a checkpoint.")] = 1.0,
    failures: Annotated[int | None, typer.Option(help="Seen that needed a checkpoint; with --hours.")] = None,
    hours: Annotated[float | None, typer.Option(help="Of training in which --failures were seen.")] = None,
    ato_path: Annotated[Path | None, typer.Option(help="File of MindSpore's ATO; default: MS_ENABLE_TFT's.")] = None,
    present_steps: Annotated[int | None, typer.Option(help="The interval whose cost is asked for.")] = None,
    memory_stall_s: Annotated[float | None, typer.Option(help="Of a save in memory; default: the run's.")] = None,
    memory_share: Annotated[float, typer.Option(help="Of those failures that a memory checkpoint does for.")] = 0.9,
    norm: Annotated[
        bool, typer.Option("--norm", help="Not that, but thresholds of TRE, from the run's norms and losses.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Say how often to save, why, and what the present interval costs; or which norm can't be right."""
    if norm:
        from resilient_train.launch.cli import advise_norm

        found = advise_norm.thresholds(run_dir)
        _answer(as_json, advise_norm.as_dict(found), advise_norm.as_lines(found))
        return 0
    from resilient_train.launch.cli import advise as advices

    # The flags are named like the fields.
    given = {name: value for name, value in locals().items() if name in advices.AdviseOptions.__struct_fields__}
    advice = advices.advise(advices.AdviseOptions(**given))
    _answer(as_json, advices.as_dict(advice), advices.as_lines(advice))
    return 0


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a run.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Read a checkpoint (of a run: all of them) and say whether it is whole, and which file is broken."""
    from resilient_train.launch.cli import verify as verifying

    found = verifying.reports(path)
    _answer(as_json, verifying.as_dict(found), verifying.as_lines(found))
    return 0 if all(report.ok for report in found) else EXIT_FAILED


@app.command()
def inject(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] KIND",
            help=f"The run's directory (default: the newest in ./{RUNS}), and {', '.join(INJECTABLE)} or {_DEVICE}.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Whom to hit; default: drawn.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Draws the rank: the same seed, the same rank.")] = 0,
    target: Annotated[str, typer.Option(help=f"For uce: {', '.join(TARGETS)} (default: {TARGETS[0]}).")] = "",
    limit_s: Annotated[float, typer.Option(min=0, help="Longest wait for the job to train, and for the hit.")] = 60.0,
    at_once: Annotated[bool, typer.Option("--now", help="Do not wait until the job trains: hit it as it is.")] = False,
    library: Annotated[str | None, typer.Option(help="For device: acl, hccl, nccl or nvml.")] = None,
    error: Annotated[int | None, typer.Option(help="For device: the error (nvml: XID) that it reports.")] = None,
    memory: Annotated[list[str] | None, typer.Option("--range", help="For device: ADDRESS:BYTES that is lost.")] = None,
    ecc: Annotated[int | None, typer.Option(help="For device: the count of ECC errors (nvml).")] = None,
    call: Annotated[str | None, typer.Option(help="For device: a function; default: the one that is polled.")] = None,
    answer: Annotated[str | None, typer.Option(help="Its answer: normal, hang, garbage, crash or overrun.")] = None,
    returns: Annotated[int | None, typer.Option(help="The code that it returns, having done nothing.")] = None,
    latency_ms: Annotated[float | None, typer.Option(help="How long it takes.")] = None,
    heal: Annotated[bool | None, typer.Option("--heal", help="For device: first, all is well again.")] = None,
    as_json: Json = False,
) -> int:
    """Hit a rank of a running job and wait until it is hit; or change what its look-alike device library answers."""
    run, kind = _run_and_kind(words or [])
    options: dict[str, Any] = {"library": library, "error": error, "range": memory or None, "ecc": ecc, "call": call}
    options |= {"answer": answer, "returns": returns, "latency_ms": latency_ms, "heal": heal or None}
    given = {name: value for name, value in options.items() if value is not None}
    if kind == _DEVICE:
        if target:
            raise ConfigError("--target is for uce; a device has --range")
        result, text = _inject_device(run, rank, seed, given)
    else:
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} is for {_DEVICE}, not for {kind}")
        check_fault(kind, target)
        if not at_once:
            run = asking.wait_until_it_trains(run, asking.AnnouncedWait(limit_s, _tell))
        result, text = _inject_fault(run, rank, seed, Inject(kind, -1, target), limit_s)
    _answer(as_json, result, [Line(text)])
    return 0


def _run_and_kind(words: list[str]) -> tuple[Path | None, str]:
    kinds = (*INJECTABLE, _DEVICE)
    if not 1 <= len(words) <= 2:
        raise ConfigError(f"inject: give a run's directory (or none) and a kind: {', '.join(kinds)}")
    kind = words[-1]
    if kind not in kinds:
        raise ConfigError(f"inject: unknown kind {kind!r}: one of {', '.join(kinds)}{nearest(kind, kinds)}")
    return Path(words[0]) if len(words) == 2 else None, kind


def _drawn(run: Path, rank: int | None, seed: int) -> int:
    if rank is not None:
        return rank
    return random.Random(seed).choice(sorted(asking.ranks(run)))


def _inject_fault(
    run: Path | None, rank: int | None, seed: int, fault: Inject, limit_s: float
) -> tuple[dict[str, Any], str]:
    run = run or asking.newest_run()
    rank = _drawn(run, rank, seed)
    follower = asking.Follower(run)
    hit = asking.ask(run, Inject(fault.kind, rank, fault.target)).status
    if "order" in hit:
        order = asking.Ordered(rank, int(str(hit["incarnation"])), int(str(hit.pop("order"))))
        hit["step"] = follower.wait_for(order, limit_s).step
    result = {"run": str(run), "kind": fault.kind, "rank": rank}
    if fault.kind == "uce":
        result["target"] = fault.target or TARGETS[0]
    what = f"{fault.kind} ({result['target']})" if "target" in result else fault.kind
    text = f"{what} of rank {rank} (process {hit.get('pid')}) at step {hit.get('step')}: done, in {run}"
    return {**result, **hit}, text


def _inject_device(
    run: Path | None, rank: int | None, seed: int, options: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    from resilient_train.testing import device_faults
    from resilient_train.testing.fake_device import FakeDevice

    if "library" not in options:
        raise ConfigError(f"device: name the --library: {', '.join(device_faults.LIBRARIES)}")
    ranges = tuple(map(device_faults.parse_range, options.pop("range", ())))
    fault = device_faults.DeviceFault(ranges=ranges, **options)
    run = run or asking.newest_run()
    rank = _drawn(run, rank, seed)
    pids = asking.ranks(run)
    if rank not in pids:
        raise ConfigError(f"{run}: there is no running rank {rank}; those that run: {', '.join(map(str, pids))}")
    path = device_faults.control_path(pids[rank])
    device_faults.check_ranges(pids[rank], fault.ranges)
    readers = [each for each, pid in pids.items() if device_faults.reads(pid, path)]
    answers = msgspec.to_builtins(fault)
    sink = JsonLines(run / EVENTS_FILE)
    sink.write(now("injected", rank=rank, detail={"kind": _DEVICE, "at": "operator", **answers}))
    sink.close()
    device = FakeDevice(path)
    fault.apply(device, pids[rank])
    device.close()
    result = {"run": str(run), "kind": _DEVICE, "rank": rank, "pid": pids[rank], "readers": readers}
    shown = msgspec.json.encode(answers).decode()
    listed = ", ".join(map(str, readers))
    text = f"{shown}: set in {path}, which rank {rank} (process {pids[rank]}) reads; ranks that read it: {listed}"
    return {**result, "control": str(path), "answers": answers}, text


_Newest = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN]", help=f"The run's directory; default: the newest in ./{RUNS}.", show_default=False),
]


@app.command()
def status(
    run: _Newest = None,
    limit_s: Annotated[float, typer.Option(min=0, help="Longest wait for a job that is about to begin.")] = 30.0,
    as_json: Json = False,
) -> int:
    """Ask a running job how it is."""
    where, found = asking.find(run, asking.AnnouncedWait(limit_s, _tell))
    named = [Line(f"run: {where}")] if run is None else []
    _answer(as_json, found, [*named, *map(Line, status_text.told(found))])
    return 0


@app.command()
def pause(
    run: _Newest = None,
    at_step: Annotated[int | None, typer.Option(min=0, help="Before this step; default: the next one.")] = None,
    limit_s: Annotated[float, typer.Option(min=0, help="Longest wait for all ranks to stand.")] = 60.0,
    as_json: Json = False,
) -> int:
    """Have all ranks of a running job stand still before a step, until `resume`. With --at-step, does not wait."""
    found, _ = asking.find(run, asking.AnnouncedWait(limit_s, _tell))
    follower = asking.Follower(found)
    asking.ask(found, Pause(-1 if at_step is None else at_step))
    if at_step is not None:
        text = f"asked: all ranks will stop before step {at_step}, in {found}"
        _answer(as_json, {"run": str(found), "at_step": at_step, "paused": False, "step": None}, [Line(text)])
        return 0
    step = follower.wait_for_pause(limit_s).detail.get("step")
    text = f"paused before step {step}: all ranks stand, in {found}; `resilient-train resume {found}` lets them go on"
    _answer(as_json, {"run": str(found), "at_step": None, "paused": True, "step": step}, [Line(text)])
    return 0


@app.command()
def resume(run: _Newest = None, as_json: Json = False) -> int:
    """End a pause: all ranks go on. One that was asked for, and has not come, is taken back."""
    found = run or asking.newest_run()
    status = asking.ask(found, Unpause()).status
    if status["was"] == "PAUSED":
        text = f"going on with step {status['step']} after a pause of {status['paused_s']} s, in {found}"
    else:
        text = f"the pause is taken back; the job is {status['was']}, in {found}"
    _answer(as_json, {"run": str(found), **status}, [Line(text)])
    return 0


def _answer(as_json: bool, result: dict[str, Any], text: list[Line]) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        show(text)


def _read(run: Path) -> list[Event]:
    """The events of a run. Raises ConfigError if there are none to be had."""
    path = run / EVENTS_FILE
    if not run.is_dir():
        raise ConfigError(f"{run} is not a directory: give the run directory of a job (its --run-dir)")
    try:
        events = read_events(path)
    except FileNotFoundError:
        raise ConfigError(f"{run} has no {EVENTS_FILE}: it is not a run directory, or the job never started") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
    if not events:
        raise ConfigError(f"{path} holds not a single event")
    return events


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int, list[str]], None]]:
    """Shows how far a run is: a bar on a terminal, news line by line elsewhere; on stderr if stdout is for JSON."""
    stream = sys.stderr if quiet else sys.stdout
    if not stream.isatty():
        begun: set[str] = set()

        def tell(name: str, _done: int, total: int, news: list[str]) -> None:
            fresh = [] if name in begun else [f"{total} steps, {name} ..."]
            begun.add(name)
            for text in [*fresh, *(f"  {item}" for item in news)]:
                print(text, file=stream, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream)) as bars:
        tasks: dict[str, Any] = {}

        def advance(name: str, done: int, total: int, news: list[str]) -> None:
            if name not in tasks:
                for task in tasks.values():
                    bars.stop_task(task)
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)
            for text in news:
                bars.console.print(f"  {text}", highlight=False, markup=False)

        yield advance


if __name__ == "__main__":
    sys.exit(main())
