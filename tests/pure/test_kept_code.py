"""Which text of a source file a process reads: the first one's copy, or the file itself."""

import importlib
import importlib.util
import linecache
import os
import py_compile
import shutil
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from resilient_train.launch.fork.kept_code import KeptCode, begin, take_place


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


def late(folder: Path) -> KeptCode:
    """Of a process that takes another one's place."""
    return KeptCode(folder, lambda: True)


def imported(kept: KeptCode, name: str, *folders: Path) -> str | None:
    """Found and read: the file."""
    where = found(kept, name, *folders)
    if where is None or where[0] is None:
        return None
    read(kept, where[0], name)
    return where[0]


def read(kept: KeptCode, path: str, module: str = "train") -> str:
    """As an import does it."""
    kept.ask(module, path)
    return kept.text(path).decode()


def found(kept: KeptCode, name: str, *folders: Path) -> tuple[str | None, list[str] | None] | None:
    """The file, and the folders of a package."""
    importlib.invalidate_caches()
    spec = kept.find_spec(name, [*map(str, folders)])
    if spec is None:
        return None
    within = spec.submodule_search_locations
    return spec.origin, None if within is None else [*within]


@pytest.mark.parametrize("begins", ["script", "module"])
@pytest.mark.parametrize("ago_s", [50, -50])
def test_the_script_as_a_module_has_the_same_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str, ago_s: float
) -> None:
    """``pkg.train`` beside ``__main__``, also where it is imported late. It was taken for a reload."""
    path = written(tmp_path / "train.py", "a = 1")
    monkeypatch.setitem(sys.modules, "__main__", main := ModuleType("__main__"))
    first = KeptCode(folder)
    assert (first.text(path).decode() if begins == "script" else read(first, path, "a_script")) == "a = 1"
    main.__file__ = path
    written(tmp_path / "train.py", "a = 2", ago_s=ago_s)
    monkeypatch.setitem(sys.modules, "a_script", ModuleType("a_script"))
    assert read(first, path, "a_script") == "a = 1"
    written(tmp_path / "train.py", "a = 3", ago_s=ago_s - 1)
    assert read(first, path, "a_script") == "a = 3", "importlib.reload"


@pytest.mark.parametrize("ago_s", [0, 50], ids=["written", "copied with its time"])
def test_a_file_that_the_job_writes_anew_is_a_module_of_another_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ago_s: float
) -> None:
    """``spec_from_file_location(f"rule_{n}", path)``; the repository ships the first text."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    path = written(tmp_path / "rule.py", "a = 0")
    first = KeptCode(folder)
    assert read(first, path, "json") == "a = 0"
    for number, name in enumerate(("re", "not_in_sys_modules", "sys"), 1):
        written(tmp_path / "rule.py", f"a = {number}", ago_s=ago_s - number)
        assert read(first, path, name) == f"a = {number}"
        os.utime(path, ns=(0, 0))
        assert read(KeptCode(folder), path, name) == f"a = {number}"  # a new process, for which it is no news
        written(tmp_path / "rule.py", f"a = {number}", ago_s=ago_s - number)
    assert capsys.readouterr().err.count("is read once more, as the module re,") == 1


@pytest.mark.parametrize("main", [None, object()], ids=["gone", "an object"])
def test_a_script_that_is_no_module_any_more(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: object
) -> None:
    """``sys.modules[__name__] = Settings()``: each later import ended in a TypeError."""
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert read(KeptCode(folder), written(tmp_path / "late.py", "a = 1"), "json") == "a = 1"


def test_copies_are_no_files_of_python(folder: Path, tmp_path: Path) -> None:
    """A script may look for all of them below the folder that it lies in, where the run directory is as well."""
    read(KeptCode(folder), written(tmp_path / "train.py", "a = 1"))
    assert [each.name for each in tmp_path.rglob("*.py")] == ["train.py"]
    assert [each.read_text() for each in tmp_path.rglob("*.kept")] == ["a = 1"]


def test_a_working_directory_that_is_gone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    kept = KeptCode(folder)
    written(tmp_path / "there.py", "a = 1")
    assert imported(kept, "there", tmp_path, Path()) == str(tmp_path / "there.py")


def test_a_text_that_is_read_anew_takes_the_place_of_the_copy(folder: Path, tmp_path: Path) -> None:
    """A new process of another rank than the one that writes the file has what the others have."""
    written_before, written_by_job = (str(tmp_path / each) for each in ("before.py", "job.py"))
    written(tmp_path / "before.py", "a = 1")
    first = KeptCode(folder)
    written(tmp_path / "job.py", "a = 1", ago_s=-1)
    assert [read(first, each) for each in (written_before, written_by_job)] == ["a = 1"] * 2
    for path in (written_before, written_by_job):
        written(Path(path), "a = 22", ago_s=-2)
        assert read(first, path) == "a = 22"
        os.utime(path, ns=(0, 0))
        assert read(KeptCode(folder), path) == "a = 22"


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


@pytest.mark.parametrize("became", ["gone", "a package", "a package that is older", "folders", "another folder's"])
def test_a_module_stays_what_it_was(folder: Path, tmp_path: Path, became: str) -> None:
    """A link that leads to another release leads to files that are older than the job."""
    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second):
        each.mkdir()
    path = written(second / "helper.py", "a = 1")
    assert imported(KeptCode(folder), "helper", first, second) == path
    (second / "helper.py").unlink()
    if became == "another folder's":
        written(first / "helper.py", "a = 2")
    elif became != "gone":
        (second / "helper").mkdir()
        if became != "folders":
            file = Path(written(second / "helper" / "__init__.py", "a = 2"))
        if became == "a package that is older":
            os.utime(file, ns=(0, 0))
    assert found(late(folder), "helper", first, second) == (path, None)


def test_a_package_stays_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "helper").mkdir()
    path = written(tmp_path / "helper" / "__init__.py", "a = 1")
    assert imported(KeptCode(folder), "helper", tmp_path) == path
    shutil.rmtree(tmp_path / "helper")
    written(tmp_path / "helper.py", "a = 2")
    assert found(late(folder), "helper", tmp_path) == (path, [str(tmp_path / "helper")])


@pytest.mark.parametrize("names", [("__init__", "data"), ("data",)], ids=["package", "namespace"])
def test_a_package_that_is_gone_is_found_with_its_modules(folder: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / "pkg").mkdir()
    for name in names:
        written(tmp_path / "pkg" / f"{name}.py", "a = 1")
    first = KeptCode(folder)
    imported(first, "pkg", tmp_path)
    imported(first, "pkg.data", tmp_path / "pkg")
    shutil.rmtree(tmp_path / "pkg")
    spec = found(late(folder), "pkg", tmp_path)
    assert spec is not None
    assert spec[1] == [str(tmp_path / "pkg")]
    assert found(late(folder), "pkg.data", tmp_path / "pkg") == (str(tmp_path / "pkg" / "data.py"), None)


def test_a_namespace_may_get_more_folders(folder: Path, tmp_path: Path) -> None:
    """What the job writes into another one on the path is found too, by all."""
    folders = [tmp_path / "base", tmp_path / "made"]
    (folders[0] / "plug").mkdir(parents=True)
    assert found(KeptCode(folder), "plug", *folders) == (None, [str(folders[0] / "plug")])
    (folders[1] / "plug").mkdir(parents=True)
    both = [str(each / "plug") for each in folders]
    assert found(late(folder), "plug", *folders) == (None, both)
    shutil.rmtree(folders[0])
    found_late = found(late(folder), "plug", *folders)
    assert found_late is not None
    assert sorted(found_late[1] or ()) == both


def test_what_the_job_writes_comes_to_stand_before_it(folder: Path, tmp_path: Path) -> None:
    """A module is made by rank 0 behind the start, in a folder that comes first. All import it then."""
    made, base = tmp_path / "made", tmp_path / "base"
    for each in (made, base):
        each.mkdir()
    written(base / "plan.py", "a = 1")
    zero, one = KeptCode(folder), KeptCode(folder)
    assert imported(zero, "plan", made, base) == str(base / "plan.py")
    path = written(made / "plan.py", "a = 2", ago_s=-1)
    for each in (zero, one, late(folder)):
        assert imported(each, "plan", made, base) == path


def test_to_ask_for_a_module_is_not_to_import_it(folder: Path, tmp_path: Path) -> None:
    made, base = tmp_path / "made", tmp_path / "base"
    for each in (made, base):
        each.mkdir()
    written(base / "plan.py", "a = 1")
    assert found(KeptCode(folder), "plan", made, base) is not None
    path = written(made / "plan.py", "a = 2", ago_s=-1)
    for each in (KeptCode(folder), late(folder)):
        assert imported(each, "plan", made, base) == path


def test_a_module_that_no_path_leads_to_is_kept_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of an editable installation: a finder behind Python's own maps names to files."""
    path = written(tmp_path / "helper.py", "a = 1")
    first = KeptCode(folder)
    assert found(first, "helper", tmp_path / "none") is None, "others are asked by Python"
    read(first, path, "helper")
    assert found(KeptCode(folder), "helper", tmp_path / "none") is None

    class Editable:
        def find_spec(self, name: str, *_: object) -> object:
            there = name == "helper" and Path(own).exists()
            return importlib.util.spec_from_file_location(name, own) if there else None

    kept = late(folder)
    monkeypatch.setattr(sys, "meta_path", [kept, *sys.meta_path, Editable()])
    own = written(tmp_path / "of_this_rank.py", "a = 3")
    assert found(kept, "helper", tmp_path / "none") == (own, None)
    Path(own).unlink()
    Path(path).unlink()
    assert found(kept, "helper", tmp_path / "none") == (path, None)


def test_a_loader_of_somebody_elses_is_left_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change the text of what is imported."""
    path = written(tmp_path / "helper.py", "a = 1")

    class Loader(SourceFileLoader):
        pass

    class Finder:
        def find_spec(self, name: str, *_: object) -> object:
            return importlib.util.spec_from_file_location(name, path, loader=Loader(name, path))

    kept = KeptCode(folder)
    monkeypatch.setattr(sys, "meta_path", [kept, Finder()])
    assert found(kept, "helper", tmp_path / "none") is None
    kept.ask("helper", path, plainly=False)
    assert kept.text(path) == b"a = 1"
    assert late(folder).find_spec("helper", [str(tmp_path / "none")]) is None


@pytest.mark.parametrize("name", ["caf\udce9", "a\0b"])
def test_odd_names_and_folders(folder: Path, tmp_path: Path, name: str) -> None:
    for kept in (KeptCode(folder), late(folder)):
        assert found(kept, name, tmp_path / "caf\udce9") is None


def test_who_imports_again_finds_what_there_is(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "helper.py", "a = 1")
    kept = late(folder)
    assert imported(kept, "helper", tmp_path) == path
    (tmp_path / "helper.py").unlink()
    (tmp_path / "helper").mkdir()
    package = written(tmp_path / "helper" / "__init__.py", "a = 2")
    assert found(kept, "helper", tmp_path) == (package, [str(tmp_path / "helper")])


def test_a_late_process_that_looks_elsewhere_is_told_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``sys.path.insert(0, str(Path(__file__).resolve().parent))``, and the link leads to another release."""
    for name, text in (("old", "a = 1"), ("same", "a = 1"), ("new", "a = 2")):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "helper.py", text)
    assert imported(KeptCode(folder), "helper", tmp_path / "old")
    for kept, name in ((KeptCode(folder), "new"), (late(folder), "same")):
        assert found(kept, "helper", tmp_path / name) is not None
    assert not capsys.readouterr().err
    assert found(late(folder), "helper", tmp_path / "new") is not None
    assert "imports helper from" in capsys.readouterr().err


def test_bytecode_of_another_text_is_not_used(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two releases whose files have one time and one size, as archives that can be made again have them."""
    path = written(tmp_path / "helper_of_two.py", "a = 1")
    os.utime(path, ns=(10**18, 10**18))
    read(KeptCode(folder), path)
    written(tmp_path / "helper_of_two.py", "a = 5")
    os.utime(path, ns=(10**18, 10**18))
    py_compile.compile(path)
    kept = KeptCode(folder)
    for name in ("get_data", "path_stats"):
        monkeypatch.setattr(SourceFileLoader, name, getattr(SourceFileLoader, name))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(str(tmp_path))
    kept.install()
    module = importlib.import_module("helper_of_two")
    del sys.modules["helper_of_two"]
    assert module.a == 1


def test_one_that_has_waited_in_the_script_counts_from_its_first_step(folder: Path, tmp_path: Path) -> None:
    """What was written while it stood by was not written by its job's ranks for it to read."""
    known, other = (written(tmp_path / f"{name}.py", "w = 1") for name in ("known", "other"))
    first = KeptCode(folder)
    assert (read(first, known, "known"), read(first, other, "other")) == ("w = 1", "w = 1")
    standby = late(folder)
    assert read(standby, known, "known") == "w = 1"
    for path in (known, other):
        written(Path(path), "w = 25", ago_s=-1.0)
    linecache.clearcache()
    assert linecache.getline(known, 1) == "w = 25\n"
    linecache.clearcache()
    later = time.time_ns() + 10**10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [*sys.meta_path, standby])
        patch.setattr(time, "time_ns", lambda: later)
        take_place()
    assert read(standby, other, "other") == "w = 1"
    linecache.checkcache(known)
    assert linecache.getline(known, 1).strip() == "w = 1", "whoever asks for the text of what was imported above"
