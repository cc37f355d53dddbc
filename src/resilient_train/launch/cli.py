"""``resilient-train``: looks at runs, hits them, and demonstrates what happens then.

Exit codes: 0 it worked, 1 it did not, 2 the command was wrong; then one line on stderr says what. Results go to
stdout, as one JSON object with ``--json``.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from resilient_train.child import new_run_dir
from resilient_train.errors import ConfigError, ProtocolError, ResilientError
from resilient_train.events import Event
from resilient_train.faults import FROM_OUTSIDE, nearest
from resilient_train.observe.report import Line, as_dict, lines, show
from resilient_train.observe.sinks import EVENTS_FILE, read_events
from resilient_train.observe.timeline import read_run
from resilient_train.observe.trace import TRACE_FILE, write_trace
from resilient_train.protocol.messages import Hello, Inject, Query, Reply
from resilient_train.transport import Channel

try:
    import typer
except ImportError:  # this module is a command and nothing else: without its parser there is nothing to import it for
    sys.stderr.write("resilient-train: typer is not installed; pip install 'resilient-train[cli]'\n")
    raise SystemExit(2) from None

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
_SOCKET = "agent-0.sock"
_REPLY_TIMEOUT_S = 10.0

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
    sys.stderr.write(f"resilient-train: {' '.join(text.split())}\n")
    return code


@app.callback()
def _about() -> None:
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

    options = run.Options(run_dir=run_dir or new_run_dir("demo"), steps=steps, ranks=ranks, faults=faults)
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
    limit_s: Annotated[float, typer.Option(help="Time for the undisturbed run.")] = 3600.0,
    run_dir: Annotated[Path | None, typer.Option(help="Where to write; must be new or empty.")] = None,
    as_json: Json = False,
) -> int:
    """Run your own script undisturbed and with faults, and say what was recovered, how, and whether bit for bit."""
    from resilient_train.testing import drill as drills

    options = drills.Options(
        command=tuple(command or ()),
        run_dir=run_dir or new_run_dir("drill"),
        ranks=ranks,
        faults=faults,
        seed=seed,
        kinds=tuple(each.strip() for each in kinds.split(",") if each.strip()),
        limit_s=limit_s,
    )
    stream = sys.stderr if as_json else sys.stdout
    result = drills.drill(options, lambda text: print(text, file=stream, flush=True))
    _answer(as_json, drills.as_dict(result), drills.as_lines(result))
    return EXIT_FAILED if result.problems else 0


@app.command()
def doctor(as_json: Json = False) -> int:
    """Say what works on this machine and with these switches, what does not, and why."""
    from resilient_train.launch import doctor as doctors

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
def inject(
    run: RunDir,
    rank: Annotated[int, typer.Option(min=0, help="Whom to hit.", show_default=False)],
    kind: Annotated[str, typer.Option(help=f"How: {', '.join(FROM_OUTSIDE)}.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Hit a rank of a running job: kill is SIGKILL, stop is SIGSTOP."""
    if kind not in FROM_OUTSIDE:
        raise ConfigError(f"--kind {kind!r} is not one of {', '.join(FROM_OUTSIDE)}{nearest(kind, FROM_OUTSIDE)}")
    _ask(run, Inject(kind, rank))
    _answer(as_json, {"kind": kind, "rank": rank}, [Line(f"{kind} of rank {rank}: done")])
    return 0


@app.command()
def status(run: RunDir, as_json: Json = False) -> int:
    """Ask a running job how it is."""
    reply = _ask(run, Query())
    _answer(as_json, reply.status, [Line(f"{key}: {_plain(value)}") for key, value in reply.status.items()])
    return 0


def _plain(value: object) -> str:
    """A value of a status for a person: text as it is, a table's rows each on a line, other things as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
        rows = ("  ".join(f"{key} {_plain(entry)}" for key, entry in item.items()) for item in value)
        return "".join(f"\n  {row}" for row in rows)
    return msgspec.json.encode(value).decode()


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


def _ask(run: Path, question: Inject | Query) -> Reply:
    """Asks the agent of a running job. Raises ConfigError if none runs there, or if it refuses the question."""
    path = run / _SOCKET
    if not path.exists():
        raise ConfigError(f"no job is running in {run}: there is no {path}")
    try:
        channel = Channel(str(path), timeout_s=_REPLY_TIMEOUT_S)
    except OSError as error:
        raise ConfigError(f"no job is running in {run}: {path}: {error}") from None
    try:
        channel.send(Hello(role="operator"))
        channel.send(question)
        reply = channel.receive(_REPLY_TIMEOUT_S)
    finally:
        channel.close()
    if reply is None:
        raise ProtocolError(f"the agent at {path} did not answer within {_REPLY_TIMEOUT_S:.0f} s")
    if not isinstance(reply, Reply):
        raise ProtocolError(f"the agent at {path} answered with {type(reply).__name__}, not Reply")
    if reply.error:
        raise ConfigError(f"the agent refused: {reply.error}")
    return reply


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int, list[str]], None]]:
    """Shows how far a run is: a bar on a terminal, news line by line elsewhere; on stderr if stdout is for JSON."""
    stream = sys.stderr if quiet else sys.stdout
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        terminal = False
    else:
        terminal = stream.isatty()
    if not terminal:
        begun: set[str] = set()

        def tell(name: str, _done: int, total: int, news: list[str]) -> None:
            fresh = [] if name in begun else [f"{total} steps, {name} ..."]
            begun.add(name)
            for text in [*fresh, *(f"  {item}" for item in news)]:
                print(text, file=stream, flush=True)

        yield tell
        return
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
