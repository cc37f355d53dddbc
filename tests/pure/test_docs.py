"""What the documentation says of names: links, settings, events, commands, frames, files. Blocks are run elsewhere."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import typer

from resilient_train.config import PREFIX, Settings
from resilient_train.launch.cli.tool import app
from resilient_train.protocol import messages

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
NOT_WRITTEN = {".venv", "build", ".git"}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
VARIES = re.compile(r"\.\.\.|\b[NM]\b|\bDIR\b|\bLOG\b|\d+|failed|ValueError: |\[|\]|'|\(|a set,|allreduce|RESILIENT_")
NOT_OURS = ("Connection closed by peer", "MemoryError", "too many open files")
WRITERS = ("now", "Event", "Note", "_note", "note", "_event", "event", "_trouble")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|cpp|hpp|md|jsonl|toml|txt|c|h))`")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def slugs(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
    heads = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()) for line in lines if line.startswith("#")
    ]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """The cells of the first table under a heading, without its head."""
    body = text_of(page).split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)
    assert table is not None
    for line in table[0].splitlines()[2:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), target
        if anchor:
            assert anchor in slugs(other), f"{target}#{anchor}"


@cache
def our_files() -> tuple[str, ...]:
    """Of the whole repository, by their paths in it."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = set(folders) - NOT_WRITTEN
        found += [os.path.relpath(Path(folder, file), ROOT) for file in files]
    return tuple(found)


@cache
def trees() -> tuple[ast.Module, ...]:
    """The sources, parsed."""
    return tuple(ast.parse(path.read_text()) for path in SOURCES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    """Of this repository: with a folder in front, or one of our sources by its bare name."""
    if page.name == "CHANGELOG.md" or "decisions" in page.parts:  # they tell of what was
        return
    for name in FILE.findall(page.read_text()):
        if name.endswith((".py", ".cpp", ".hpp")) and "/" in name:
            assert any(path.endswith(f"/{name}") or path == name for path in our_files()), name


def test_settings() -> None:
    written = {row[0].strip("`"): row[1] for row in rows("docs/reference/settings.md", "## `RESILIENT_*`")}
    usual = Settings()
    assert set(written) == {PREFIX + name.upper() for name in Settings.__struct_fields__}
    for name in Settings.__struct_fields__:
        value, told = getattr(usual, name), written[PREFIX + name.upper()].strip("`")
        if isinstance(value, str):
            assert not value or told == value, name
        else:
            assert float(told) == float(value), name


def noted() -> set[str]:
    """The kinds of events that the sources write: first arguments of what writes them."""
    found: set[object] = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in WRITERS:
                first = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "kind")]
                either = [[each.body, each.orelse] if isinstance(each, ast.IfExp) else [each] for each in first]
                found |= {each.value for several in either for each in several if isinstance(each, ast.Constant)}
    return {kind for kind in found if isinstance(kind, str) and re.fullmatch(r"[a-z_]+", kind)}


def test_events() -> None:
    documented = {row[0].strip("`") for row in rows("docs/reference/events.md", "## Kinds")}
    assert noted() - documented == set(), "written, and not documented"
    text = "\n".join(path.read_text() for path in SOURCES)
    assert {kind for kind in documented if f'"{kind}"' not in text} == set(), "documented, and never written"


def test_commands() -> None:
    page = text_of("docs/reference/commands.md")
    command = typer.main.get_command(app)
    for name, sub in command.commands.items():  # type: ignore[attr-defined]
        row = re.search(rf"^\| `{name}[ `].*$", page, flags=re.MULTILINE)
        assert row is not None, name
        if name in ("advise", "inject"):  # the page says that --help lists them
            continue
        for option in sub.params:
            flag = next((each for each in option.opts if each.startswith("--")), None)
            assert flag is None or flag == "--json" or flag in row[0], (name, flag)


def test_flags_of_the_launcher() -> None:
    from resilient_train.launch.cli.run import _parser

    page = text_of("docs/reference/commands.md")
    ours = next(group for group in _parser()._action_groups if group.title == "resilient_train")
    for action in ours._group_actions:
        assert action.option_strings[0] in page, action.option_strings


@cache
def strings() -> tuple[str, ...]:
    """All that the sources may say; what is filled in is left out of it."""
    return tuple(all_strings())


def all_strings() -> Iterator[str]:
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("page", ["docs/how-to/debug-a-recovery.md", "docs/reference/errors.md"])
def test_messages_that_are_looked_up(page: str) -> None:
    """Whoever looks a message up must find it as it is said: what stands first in a row, between what varies."""
    known = strings()
    for row in re.findall(r"^\| (`.*?) \| ", text_of(page), flags=re.MULTILINE):
        for quoted in re.findall(r"`([^`]+)`", row):
            message = re.sub(r"^\w+Error: ", "", quoted)
            for part in VARIES.split(message):
                words = part.strip(" .,:;()[]")
                assert len(words) < 10 or words in NOT_OURS or any(words in each for each in known), quoted


def test_frames() -> None:
    """The protocol's page lists them all, each at the side that sends it."""
    said = re.search(
        r"Rank to agent: (.*?)Agent to rank: (.*?)An operator's", text_of("docs/protocol.md"), flags=re.DOTALL
    )
    assert said is not None
    from_rank, from_agent = (set(re.findall(r"\b[A-Z]\w+", part)) for part in said.groups())
    operators = {"Query", "Inject", "Pause", "Unpause"}
    assert from_rank == {each.__name__ for each in get_args(messages.FromRank)} - operators
    assert from_agent == {each.__name__ for each in get_args(messages.FromAgent)} - {"Reply"}


def test_the_index_names_each_page() -> None:
    pages = {
        f"{folder}/{page.name}" for folder in ("how-to", "reference") for page in (ROOT / "docs" / folder).iterdir()
    }
    assert pages <= {target for target, _ in LINK.findall(text_of("docs/index.md"))}


def test_the_list_of_decisions_has_their_titles() -> None:
    listed = dict(
        re.findall(r"^\| \[\d+\]\(([\w-]+\.md)\) \| (.*) \|$", text_of("docs/decisions/README.md"), re.MULTILINE)
    )
    pages = (ROOT / "docs" / "decisions").glob("0*.md")
    assert listed == {page.name: page.read_text().split("\n", 1)[0].partition(". ")[2] for page in pages}


def test_a_change_is_told_once() -> None:
    lines = text_of("CHANGELOG.md").splitlines()
    heads = [line for line in lines if line.startswith("* ") and len(line) > 60]
    double = {head for head in heads if sum(other.startswith(head.rstrip(".")) for other in heads) > 1}
    assert not double
