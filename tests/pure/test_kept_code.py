"""Which text of a source file a process reads: the first one's copy, or the file itself."""

import os
import shutil
import time
from pathlib import Path

import pytest

from resilient_train.launch.fork.kept_code import KeptCode, begin


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    made = begin(tmp_path / "run")
    assert made is not None
    return made


def written(path: Path, text: str, *, ago_s: float = 100.0) -> str:
    path.write_text(text)
    then_ns = time.time_ns() - int(ago_s * 1e9)
    os.utime(path, ns=(then_ns, then_ns))
    return str(path)


def read(kept: KeptCode, path: str) -> str:
    """As an import does it."""
    kept._imported(path)
    return kept.text(path).decode()


def test_a_second_module_of_the_same_file_has_the_same_text(folder: Path, tmp_path: Path) -> None:
    """``pkg.train`` beside ``__main__``. It was taken for a reload, which has another text."""
    path = written(tmp_path / "train.py", "a = 1")
    assert read(KeptCode(folder), path) == "a = 1"
    written(tmp_path / "train.py", "a = 2", ago_s=50)
    later = KeptCode(folder)
    assert [read(later, path), read(later, path)] == ["a = 1"] * 2
    written(tmp_path / "train.py", "a = 33", ago_s=-1)
    assert read(later, path) == "a = 33", "a reload"


def test_what_was_written_since_the_first_process_began_is_kept_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is edited once more, or the clock of the file system is ahead."""
    path = written(tmp_path / "late.py", "a = 1", ago_s=-1000)
    assert read(KeptCode(folder), path) == "a = 1"
    written(tmp_path / "late.py", "a = 2", ago_s=50)
    assert read(KeptCode(folder), path) == "a = 1"
    written(tmp_path / "late.py", "a = 3", ago_s=-1000)
    assert read(KeptCode(folder), path) == "a = 3"
    assert "late.py was written since this process began" in capsys.readouterr().err


@pytest.mark.parametrize("became", ["gone", "a package"])
def test_a_module_stays_what_it_was(folder: Path, tmp_path: Path, became: str) -> None:
    path = written(tmp_path / "helper.py", "a = 1")
    assert KeptCode(folder).find_spec("helper", [str(tmp_path)]) is None
    read(KeptCode(folder), path)
    (tmp_path / "helper.py").unlink()
    if became == "a package":
        (tmp_path / "helper").mkdir()
        (tmp_path / "helper" / "__init__.py").write_text("a = 2")
    spec = KeptCode(folder).find_spec("helper", [str(tmp_path)])
    assert spec is not None
    assert (spec.origin, spec.submodule_search_locations) == (path, None)


@pytest.mark.parametrize("names", [("__init__", "data"), ("data",)], ids=["package", "namespace"])
def test_a_package_that_is_gone_is_found_with_its_modules(folder: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / "pkg").mkdir()
    for name in names:
        read(KeptCode(folder), written(tmp_path / "pkg" / f"{name}.py", "a = 1"))
    shutil.rmtree(tmp_path / "pkg")
    spec = KeptCode(folder).find_spec("pkg", [str(tmp_path)])
    assert spec is not None
    assert spec.submodule_search_locations == [str(tmp_path / "pkg")]
    module = KeptCode(folder).find_spec("pkg.data", spec.submodule_search_locations)
    assert module is not None
    assert module.origin == str(tmp_path / "pkg" / "data.py")


def test_another_folder_that_comes_first_is_not_passed_by(folder: Path, tmp_path: Path) -> None:
    """Both have a module of that name, and somebody has read the second one's."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "utils.py", "a = 1")
    read(KeptCode(folder), str(tmp_path / "second" / "utils.py"))
    entries = [str(tmp_path / "first"), str(tmp_path / "second")]
    assert KeptCode(folder).find_spec("utils", entries) is None
    (tmp_path / "second" / "utils.py").unlink()
    spec = KeptCode(folder).find_spec("utils", entries[1:])
    assert spec is not None
    assert spec.origin == str(tmp_path / "second" / "utils.py")


def test_what_has_stood_there_since_the_job_began_is_found_as_usual(folder: Path, tmp_path: Path) -> None:
    """With its own loader, as libraries have that change the text of what is imported; and a package beside a file."""
    read(KeptCode(folder), written(tmp_path / "plain.py", "a = 1"))
    assert KeptCode(folder).find_spec("plain", [str(tmp_path)]) is None
    (tmp_path / "both").mkdir()
    written(tmp_path / "both" / "__init__.py", "a = 2")
    time.sleep(0.02)  # times of files come in ticks
    (folder / ".resilient_train").chmod(0o600)  # as if the job began now
    read(KeptCode(folder), written(tmp_path / "both.py", "a = 1"))
    assert KeptCode(folder).find_spec("both", [str(tmp_path)]) is None
