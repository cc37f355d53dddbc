"""Every command and every block of Python in the documentation is run, or its page says why it can't be."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from running import JOBS, LAUNCHER, launch, start
from saved_jobs import wait_for

from documented import PAGES, ROOT, Block, blocks, write_file
from resilient_train.child_job import clean_environ, launched
from resilient_train.demo import run as demos
from resilient_train.faults import parse_plan
from resilient_train.launch.cli.tool import main
from resilient_train.testing import drill as drills

ALL = [block for page in PAGES for block in blocks(page)]
TUTORIAL = ROOT / "docs" / "tutorial.md"
NEEDS_FORMAT = "checkpoint-format.md"
PYTHON = [b for b in ALL if b.language == "python" and not b.why_not and b.page != TUTORIAL]
SHELL = sorted({b.page for b in ALL if b.language in ("sh", "console") and b.page != TUTORIAL})
OTHER_TERMINAL = "in another terminal"
PLANS = "plans for --faults"
AS_SHOWN = "output as shown"
ASSIGNMENT = re.compile("[A-Z_]+=")
NOTES = (OTHER_TERMINAL, PLANS, AS_SHOWN)
COMMAND = re.compile(r"^\s*(\$ )?(resilient-(run|train)|torchrun|python3?|pip|make|srun|git|cd|tail) ")


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_nothing_is_left_out(block: Block) -> None:
    """A block is of a kind that is run; or the page says why not, for its readers too."""
    if block.note.startswith("not run"):
        assert len(block.why_not) > 15, "say why"
    else:
        assert block.language in ("python", "sh", "console", "text", "mermaid"), block.language
        assert block.note in (*NOTES, "") or block.note.startswith("file: "), block.note
    if block.language == "text":
        assert not any(COMMAND.match(line) for line in block.text.splitlines()), "a command: make it a block of sh"
    if block.language == "bash":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    if block.note == PLANS:
        assert all(parse_plan(line.partition("#")[0]) for line in block.text.splitlines())


def test_the_pages_have_blocks() -> None:
    """As many as a reader sees: the pattern that finds them misses none."""
    fences = sum(line.startswith("```") for page in PAGES for line in page.read_text().splitlines())
    assert len(ALL) == fences / 2 > 50


@pytest.mark.parametrize("block", [b for b in PYTHON if b.page.name != NEEDS_FORMAT], ids=lambda block: block.name)
def test_a_block_of_python(tmp_path: Path, block: Block) -> None:
    """It runs on two ranks, and if it trains, survives a kill."""
    (tmp_path / "block.py").write_text(block.text)
    # Where there is no loop there is nothing to be killed in.
    trains = not block.text.startswith("rt.Session(")
    flags = ("--faults", "kill rank=1 step=4") if trains else ()
    run = launch(tmp_path / "run", "documented.py", str(tmp_path / "block.py"), ranks=2, flags=flags)
    assert run.code == 0, run.explain()
    repaired = run.recoveries() + len(run.of("restart_all"))  # without replicas all go back
    assert repaired == trains + len(run.of("pausing")), run.explain()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of commands come from the test server."""

    @contextlib.contextmanager
    def launched(
        run_dir: Path, arguments: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen]:
        run_dir.mkdir(parents=True, exist_ok=True)
        ours = {name: value for name, value in (environ or {}).items() if name.startswith("RESILIENT_")}
        with start([*LAUNCHER, "--run-dir", str(run_dir), *arguments], **ours) as process:
            yield process

    monkeypatch.setattr(drills, "launched", launched)
    monkeypatch.setattr(demos, "launched", launched)


def under_torchrun(script: Path, ranks: int) -> tuple[bool, str]:
    """Whether the script ended well, and what it said: its ranks begin as torchrun's do, in forks of the test server.

    torchrun itself, in new interpreters: ``test_under_plain_torchrun_it_is_a_plain_loop``.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                start([sys.executable, str(script)], forked=True, RANK=str(rank), LOCAL_RANK=str(rank), **job)
            )
            for rank in range(ranks)
        ]
        said = "".join("".join(process.communicate(timeout=120)) for process in processes)
    return all(process.returncode == 0 for process in processes), said


class Shell:
    """Types the commands of a page, in ``folder``; what the page has below /tmp is there too."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def here(self, word: str) -> str:
        """A word of a page in this folder."""
        return re.sub(r"(?<![\w/])/tmp/", f"{self.folder}/", re.sub(r"\bRUN\b", "resilient_runs/a", word))

    def launcher(self, words: list[str]) -> list[str]:
        """Eight ranks are what a reader has; two show the same."""
        line = re.sub("^--nproc-per-node\n8$", "--nproc-per-node\n2", "\n".join(words[1:]), flags=re.MULTILINE)
        return [*LAUNCHER, *map(self.here, line.split("\n"))]

    def type(self, words: list[str]) -> str:
        """Runs a command to its end; returns its output. Fails unless it ends well."""
        environ = dict(word.split("=", 1) for word in itertools.takewhile(ASSIGNMENT.match, words))
        words = words[len(environ) :]
        match words[0]:
            case "resilient-run":
                with start(self.launcher(words), **environ) as process:
                    out, err = process.communicate(timeout=120)
                assert process.returncode == 0, (words, out, err)
                return out + err
            case "resilient-train":
                self._capsys.readouterr()
                code = main([self.here(word) for word in words[1:]])
                out, err = self._capsys.readouterr()
                assert code == 0, (words, out, err)
                return out
            case "make":
                recipe = self.run(["make", "-n", "-C", str(ROOT), "-o", "setup", *words[1:]])
                (words,) = (shlex.split(line) for line in recipe.splitlines() if "resilient-" in line)
                return self.type([Path(words[0]).name, *words[1:], "--steps", "8", "--ranks", "2"])
            case "torchrun":
                flag, ranks, script = words[1:]
                assert flag == "--nproc-per-node"
                well, said = under_torchrun(self.folder / script, int(ranks))
                assert well, (words, said)
                return said
            case "python":
                return self.run([sys.executable, *map(self.here, words[1:])])
        return self.run(["bash", "-c", " ".join(map(self.here, words))])

    def run(self, command: list[str]) -> str:
        plain = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        done = subprocess.run(
            command, cwd=self.folder, env=plain, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("page", SHELL, ids=lambda page: page.name)
def test_the_commands_of_a_page(
    tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RUN, and ``resilient_runs/a``, is a job of four ranks that trains and saves as long as the page is typed."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(JOBS / "documented_train.py", tmp_path / "train.py")
    shell, run_dir, enough = Shell(tmp_path, capsys), tmp_path / "resilient_runs/a", tmp_path / "enough"
    typed = [block for block in blocks(page) if block.language in ("sh", "console") and not block.why_not]
    job = [*LAUNCHER, "--nproc-per-node", "4", "--run-dir", str(run_dir), "train.py", "--until", str(enough)]
    with contextlib.ExitStack() as stack:
        if any("RUN" in block.text or "resilient_runs/a" in block.text for block in typed):
            process = stack.enter_context(start(job))
            wait_for(run_dir, process, "save_cost", 2)
        for block in typed:
            for words in block.commands():
                out = shell.type(words)
                if block.note == AS_SHOWN:
                    assert out == block.output()
        enough.touch()


@pytest.mark.usefixtures("served")
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Line by line. The typist at the second terminal waits for nothing.

    Fewer steps, and no sleep where nobody types, or nobody does so any more. `make newcomer` types it as it stands.
    """
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    said = ""
    typed = [block for block in blocks(TUTORIAL) if not block.why_not and block.language != "text"]
    for block, after in zip(typed, [*typed[1:], None], strict=True):
        if write_file(block, tmp_path):
            continue
        if block.note == OTHER_TERMINAL:
            continue  # typed beside the one before it
        in_background = after is not None and after.note == OTHER_TERMINAL
        for path in tmp_path.glob("*.py"):
            shorter = path.read_text().replace("steps(320)", "steps(128)").replace("range(20)", "range(2)")
            pace = "0 if __import__('os').path.exists('typed') else 0.1" if in_background else "0"
            path.write_text(re.sub(r"time\.sleep\(.*\)", f"time.sleep({pace})", shorter))
        (first, *rest) = block.commands()
        if not in_background:
            said = "".join(shell.type(words) for words in (first, *rest))
            continue
        with start(shell.launcher(first)) as process:
            for other in typed[typed.index(block) + 1 :]:
                if other.note != OTHER_TERMINAL:
                    break
                for words in other.commands():
                    shell.type(words)
            (tmp_path / "typed").touch()
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        assert err.count("training again after") == 2, err
    assert said.splitlines()[-1].startswith("recovers bit for bit: yes"), "its last step is the drill"
    assert "committed steps lost: 0" in shell.type(["resilient-train", "report", "/tmp/tutorial3"])
    digests = {
        re.search("digest ([0-9a-f]+)", shell.type(["resilient-train", "report", f"/tmp/{name}"]))[1]  # type: ignore[index]
        for name in ("tutorial", "tutorial2", "tutorial3")
    }
    assert len(digests) == 1, "not nearly the same: the same bits"


def test_the_block_that_reads_a_checkpoint_with_torch(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    run = launch(tmp_path / "run", "documented_train.py", "--steps", "11", ranks=2)
    assert run.code == 0, run.explain()
    (block,) = (block for block in PYTHON if block.page.name == NEEDS_FORMAT)
    checkpoint = run.run_dir / "checkpoints" / "step_10"
    state_dict = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            state_dict |= {name: torch.full_like(shard.get_tensor(name), 7) for name in shard.keys()}  # noqa: SIM118
    exec(block.text.replace("RUN/checkpoints/step_1200", str(checkpoint)), {"state_dict": state_dict})
    assert state_dict
    assert not any((tensor == 7).all() for tensor in state_dict.values() if tensor.numel() > 1)


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONG = ("fsdp2.py",)
"""A rank of these takes seconds to come to speed."""


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_pass_the_drill(tmp_path: Path, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = re.findall("--nproc-per-node ([0-9]+)", example.read_text())[0]
    flags = ["--run-dir", str(tmp_path / "drill"), "--ranks", ranks, "--kinds", "kill,hcce,uce"]
    script, faults = example, "4"
    if example.name in LONG:
        script, faults = tmp_path / example.name, "2"
        script.write_text(re.sub(r"^STEPS = \d+", "STEPS = 14", example.read_text(), flags=re.MULTILINE))
    code = main(["drill", *flags, "--faults", faults, "--", str(script)])
    said = capsys.readouterr().out
    assert code == 0, said
    assert said.splitlines()[-1].startswith("recovers bit for bit: yes")


def kept_in_a_run_directory() -> dict[str, re.Pattern[str]]:
    """What the page on commands lists: name -> which paths it means."""
    page = ROOT / "docs" / "reference" / "commands.md"
    rows = page.read_text().partition("## The run directory\n")[2].splitlines()
    names = [name for row in rows if row.startswith("| `") for name in re.findall("`([^`]+)`", row.split(" | ")[0])]
    return {
        name: re.compile(re.sub("<[^>]+>", "[0-9]+", re.escape(name)) + (".*" * name.endswith("/"))) for name in names
    }


def files_of(folder: Path) -> set[str]:
    """Relative paths; empty folders too, which end with a slash. What vanishes meanwhile is passed over."""
    found = set()
    for path, folders, files in os.walk(folder):
        below = os.path.relpath(path, folder)
        found |= {os.path.normpath(f"{below}/{file}") for file in files}
        found |= {f"{below}/"} if not folders and not files else set()
    return found


def test_the_list_of_what_a_run_directory_has(tmp_path: Path) -> None:
    """Of a job that saves, is killed and stopped and is begun again; while it runs, and afterwards."""
    run_dir, enough = tmp_path / "run", tmp_path / "enough"
    flags = ["--nproc-per-node", "2", "--faults", "kill rank=1 step=3; stop rank=0 step=8 phase=COMPUTE"]
    script = [str(JOBS / "documented_train.py"), "--until", str(enough)]
    with start([*LAUNCHER, "--run-dir", str(run_dir), *flags, *script], RESILIENT_DRILL_RECORDS="1") as process:
        wait_for(run_dir, process, "save_cost", 2)
        found = files_of(run_dir)
        enough.touch()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err.count("training again after") == 2, err
    found |= files_of(run_dir)
    with launched(run_dir, ["--nproc-per-node", "2", *script], clean_environ()) as again:
        assert again.wait(60) == 0
    found |= files_of(run_dir)
    listed = kept_in_a_run_directory()
    unknown = {path for path in found if not any(pattern.fullmatch(path) for pattern in listed.values())}
    assert not unknown, "the page on commands does not list it"
    gone = {name for name, pattern in listed.items() if not any(pattern.fullmatch(path) for path in found)}
    assert not gone, "the page on commands lists it, and nothing writes it"


OF_EVERY_DAY = [pytest.param(each, marks=pytest.mark.long if each.name in LONG else ()) for each in EXAMPLES]


@pytest.mark.parametrize("example", OF_EVERY_DAY, ids=lambda example: example.name)
def test_what_an_example_tells_to_try(tmp_path: Path, example: Path) -> None:
    """It begins with commands."""
    lines = [line.strip() for line in example.read_text().split('"""')[1].splitlines() if line.startswith("    ")]
    assert lines
    for way, *words, name in map(shlex.split, lines):
        assert name == f"examples/{example.name}"
        match way:
            case "torchrun":
                assert words[:-1] == ["--nproc-per-node"]
                well, said = under_torchrun(example, int(words[-1]))
            case "python":
                assert not words
                well, said = ended([sys.executable, str(example)], forked=True)
            case "resilient-run":
                well, said = ended([*LAUNCHER, "--run-dir", str(tmp_path / "run"), *words, str(example)])
        assert well, said
        assert ("training again after" in said) == (way == "resilient-run")
        assert said.count("the Session is a plain loop") == (way != "resilient-run")


def ended(command: list[str], *, forked: bool = False) -> tuple[bool, str]:
    """Whether it ended well, and what it said."""
    with start(command, forked=forked) as process:
        said = "".join(process.communicate(timeout=120))
    return process.returncode == 0, said
