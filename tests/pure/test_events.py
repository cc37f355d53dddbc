"""What stands in a file of events when some of them could not be written whole."""

import resource
from pathlib import Path

import pytest

from resilient_train.events import now, to_line
from resilient_train.launch.cli.asking import Follower
from resilient_train.observe.sinks import EVENTS_FILE, JsonLines, read_events


def test_a_line_that_a_full_disk_has_cut_costs_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / EVENTS_FILE
    follower = Follower(tmp_path)
    # Longer than what is said of the disk: the limit below is also that of the file in which pytest catches stderr.
    first = now("first", detail={"text": "x" * 1000})
    cut = now("cut", detail={"kind": "kill", "text": 'it says {"kind":"x"}'})
    last = now("last", detail={"kind": "stop"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    sink, other = JsonLines(path), JsonLines(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(to_line(first) + to_line(cut)) - 9, before[1]))
    try:
        sink.write(first)
        sink.write(cut)
        other.write(last)  # not one byte of it fits
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    other.write(last)
    assert (sink.dropped, other.dropped) == (1, 1)
    assert "events can't be written" in capfd.readouterr().err
    assert read_events(path) == [first, last]
    assert follower.read() == [first, last]
