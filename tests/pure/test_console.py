"""A console that is slow, stopped or gone costs nothing but its text."""

import os
from collections.abc import Iterator

import pytest

from resilient_train.launch.agent.console import Console

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            continue  # the test did


def test_what_fits_is_written_at_once(pipe: Pipe) -> None:
    console = Console(pipe[1])
    console.write(b"one\n")
    assert os.read(pipe[0], 100) == b"one\n"
    assert not console.behind


def test_a_stopped_reader_gets_the_rest_later_and_in_order(pipe: Pipe) -> None:
    console = Console(pipe[1])
    text = b"".join(b"%06d\n" % number for number in range(40_000))
    console.write(text)
    assert console.behind, "more than a pipe holds"
    read = b""
    while len(read) < len(text):
        read += os.read(pipe[0], 1 << 16)
        console.flush()
    assert read == text
    assert not console.behind


def test_a_reader_that_has_gone(pipe: Pipe) -> None:
    console = Console(pipe[1])
    os.close(pipe[0])
    console.write(b"nobody reads this\n")
    assert not console.behind
    console.write(b"nor this\n")
    console.drain(10)


def test_no_more_is_kept_than_a_mebibyte_and_one_write(pipe: Pipe) -> None:
    console = Console(pipe[1])
    for _ in range(40):
        console.write(bytes(100_000))
    assert len(console._pending) < (1 << 20) + 100_000


def test_draining_a_stopped_reader_ends(pipe: Pipe) -> None:
    console = Console(pipe[1])
    console.write(bytes(300_000))
    console.drain(0.01)
    assert console.behind
