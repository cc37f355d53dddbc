"""The blocks of a Markdown page, with what is said of them in the HTML comment right above: see ``CONTRIBUTING.md``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(?:<!-- (?P<note>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """``note`` is the comment's text, empty if there is none."""

    page: Path
    line: int
    language: str
    text: str
    note: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def why_not(self) -> str:
        """Why it is not run; empty if it is."""
        return self.note.removeprefix("not run:").strip() if self.note.startswith("not run:") else ""

    def commands(self) -> Iterator[list[str]]:
        """The words of each command, without comments; of a ``console``, the lines behind a ``$``."""
        joined = self.text.replace("\\\n", " ")
        for line in joined.splitlines():
            if self.language == "console" and not line.startswith("$ "):
                continue
            if words := shlex.split(line.removeprefix("$ "), comments=True):
                yield words

    def output(self) -> str:
        """What a ``console`` shows behind its (only) command."""
        _, _, rest = self.text.replace("\\\n", " ").partition("\n")
        return rest


def blocks(page: Path) -> list[Block]:
    """In their order."""
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["note"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def write_file(block: Block, folder: Path) -> bool:
    """Does what a note that begins with ``file:`` says. False: it says nothing of a file.

    ``file: NAME``; ``file: NAME, a copy of OTHER with this in front of: LINE``; ``file: NAME, with this from there on:
    LINE``. A line is named by how it begins.
    """
    found = re.fullmatch(
        r"file: (\S+?)(?:, a copy of (\S+))?(?:,? with this (in front of|from there on): (.+))?", block.note
    )
    if found is None:
        return False
    name, other, how, begin = found.groups()
    if how is None:
        (folder / name).write_text(block.text)
        return True
    lines = (folder / (other or name)).read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith(begin))
    rest = lines[at:] if how == "in front of" else []
    (folder / name).write_text("".join([*lines[:at], block.text, *rest]))
    return True
