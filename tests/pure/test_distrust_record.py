"""What a launcher writes down of what is wrong, for the one after it."""

from pathlib import Path

import pytest

from resilient_train.errors import ConfigError
from resilient_train.launch.agent.distrust_record import FILE, Distrusted, DistrustRecord

BOTH = Distrusted(in_memory=9, on_storage=9)


def test_the_next_one_reads_it(tmp_path: Path) -> None:
    record = DistrustRecord(tmp_path)
    assert record.held == Distrusted()
    record.write(BOTH)
    assert DistrustRecord(tmp_path).held == BOTH
    record.write(Distrusted(on_storage=9))
    assert DistrustRecord(tmp_path).held == Distrusted(on_storage=9)
    record.write(Distrusted())
    assert not list(tmp_path.iterdir())
    assert DistrustRecord(tmp_path).held == Distrusted()


def test_one_that_was_cut_while_it_wrote(tmp_path: Path) -> None:
    """The file is there as it was, or as it is to be."""
    DistrustRecord(tmp_path).write(BOTH)
    (tmp_path / FILE).with_suffix(".tmp").write_bytes(b"{")
    record = DistrustRecord(tmp_path)
    assert record.held == BOTH
    record.write(Distrusted(in_memory=3))
    assert [each.name for each in tmp_path.iterdir()] == [FILE]


def test_nothing_is_written_where_it_is_known(tmp_path: Path) -> None:
    record = DistrustRecord(tmp_path)
    record.write(BOTH)
    (tmp_path / FILE).unlink()
    record.write(BOTH)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"in_memory": "x"}'])
def test_one_that_is_damaged_is_no_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"distrusted.json says which saved states are wrong, and can't be read"):
        DistrustRecord(tmp_path)
