"""What chance does to a checkpoint, and what manifests may wrongly say. Each kind of damage names the file at fault."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from pure.checkpoint_rig import names
from resilient_train.state.checkpoint.manifest import MANIFEST, FileEntry, Manifest, decode, encode
from resilient_train.state.digest import digest_of

OLD, NEW = 90, 120


class Case:
    """One checkpoint that is to be damaged, beside an older whole one."""

    def __init__(self, folder: Path, seed: int, templates: dict[int, Path]) -> None:
        self.draw = random.Random(seed)
        self.shards = self.draw.choice(sorted(templates))
        self.folder = folder
        shutil.copytree(templates[self.shards], folder, symlinks=True)
        self.path = folder / f"step_{NEW}"

    def manifest(self) -> Manifest:
        return decode((self.path / MANIFEST).read_bytes())

    def any_file(self) -> str:
        return self.draw.choice(names(self.path))

    def part(self, prefix: str = "") -> str:
        return self.draw.choice(sorted(n for n in names(self.path) if n.startswith(prefix) and n != MANIFEST))

    def image(self) -> str:
        return self.part("shard-")

    def change(self, name: str, content: bytes) -> str:
        """Writes the file and leaves the manifest as it was."""
        (self.path / name).write_bytes(content)
        return name

    def sign(self, name: str, content: bytes) -> str:
        """Writes the file, and a manifest that agrees."""
        self.change(name, content)
        self.rewrite(lambda e: e if e.name != name else FileEntry(name, len(content), digest_of(content), e.writer))
        return name

    def rewrite(self, entry: Callable[[FileEntry], FileEntry] = lambda entry: entry, **fields: object) -> str:
        """A manifest with other contents and a right digest."""
        files = tuple(entry(each) for each in self.manifest().files)
        return self.change(MANIFEST, encode(msgspec.structs.replace(self.manifest(), **{"files": files} | fields)))

    def content(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def replace(self, name: str) -> Path:
        (self.path / name).unlink()
        return self.path / name


def bit_flip(case: Case) -> str:
    name = case.any_file()
    content = bytearray(case.content(name))
    bit = case.draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    return case.change(name, bytes(content))


def header_bit_flip(case: Case) -> str:
    """In the JSON or the length in front, signed: only the meaning is left to tell."""
    name = case.image()
    content = bytearray(case.content(name))
    bit = case.draw.randrange(8 * 8)
    content[bit // 8] ^= 1 << bit % 8
    return case.sign(name, bytes(content))


def truncated(case: Case) -> str:
    name = case.any_file()
    return case.change(name, case.content(name)[: case.draw.randrange(len(case.content(name)))])


def truncated_and_signed(case: Case) -> str:
    name = case.part()
    return case.sign(name, case.content(name)[: case.draw.randrange(len(case.content(name)))])


def empty(case: Case) -> str:
    return case.change(case.any_file(), b"")


def empty_and_signed(case: Case) -> str:
    return case.sign(case.part(), b"")


def longer(case: Case) -> str:
    name = case.any_file()
    return case.change(name, case.content(name) + case.draw.randbytes(case.draw.randrange(1, 5000)))


def zeros_in_place_of_a_page(case: Case) -> str:
    name = case.any_file()
    content = bytearray(case.content(name))
    at = case.draw.randrange(0, len(content), 4096)
    content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    if bytes(content) == case.content(name):
        content[at] = 1
    return case.change(name, bytes(content))


def missing(case: Case) -> str:
    name = case.any_file()
    (case.path / name).unlink()
    return name


def missing_and_not_listed(case: Case) -> str:
    name = case.part()
    (case.path / name).unlink()
    return case.rewrite(files=tuple(entry for entry in case.manifest().files if entry.name != name))


def swapped(case: Case) -> str:
    kind = case.draw.choice(["shard-", "rank-", "tree-"])
    first, second = case.draw.sample(sorted(n for n in names(case.path) if n.startswith(kind)), 2)
    one, other = case.content(first), case.content(second)
    case.change(second, one)
    return case.change(first, other)


def swapped_and_signed(case: Case) -> str:
    kind = case.draw.choice(["shard-", "rank-", "tree-"])
    first, second = case.draw.sample(sorted(n for n in names(case.path) if n.startswith(kind)), 2)
    one, other = case.content(first), case.content(second)
    case.sign(second, one)
    return case.sign(first, other)


def file_of_another_step(case: Case) -> str:
    name = case.part()
    return case.sign(name, (case.folder / f"step_{OLD}" / name).read_bytes())


def manifest_of_another_step(case: Case) -> str:
    return case.change(MANIFEST, (case.folder / f"step_{OLD}" / MANIFEST).read_bytes())


def other_step_in_the_manifest(case: Case) -> str:
    return case.rewrite(step=case.draw.choice([NEW + 1, OLD, 0, -1, 1 << 62]))


def wrong_world(case: Case) -> str:
    world = case.draw.choice([n for n in (0, -1, 1, 2, 3, 5, 8, 1 << 40) if n != case.shards])
    return case.rewrite(world_size=world)


def wrong_groups(case: Case) -> str:
    groups = [[0] * case.shards, list(range(1, case.shards + 1)), [-1, *range(1, case.shards)], []]
    return case.rewrite(replica_groups=tuple((rank,) for rank in case.draw.choice(groups)))


def wrong_shards(case: Case) -> str:
    return case.rewrite(shards=case.draw.choice([0, -1, case.shards + 1, case.shards - 1, 1 << 40]))


def without_what_it_must_have(case: Case) -> str:
    rank = case.draw.choice([0, case.shards, -1])
    files = tuple(entry for entry in case.manifest().files if not entry.name.startswith(f"rank-{rank}-"))
    return case.rewrite(without_own_state=(rank,), files=files)


def kind_of_another_directory(case: Case) -> str:
    return case.rewrite(kind="ttp")


def old_version(case: Case) -> str:
    return case.rewrite(version=case.draw.choice([0, 2, -1, 1 << 40]))


def other_format(case: Case) -> str:
    return case.rewrite(format=case.draw.choice(["", "dcp", "resilient_train"]))


def names_outside(case: Case) -> str:
    """A name in the manifest that leads elsewhere, where a file with the right bytes lies."""
    victim = case.part()
    shutil.copy(case.path / victim, case.folder / "outside")
    false = case.draw.choice(
        [
            "../outside",
            str(case.folder / "outside"),
            f"./{victim}",
            f"../step_{NEW}/{victim}",
            "",
            ".",
            "..",
            victim + "\0",
            "/dev/zero",
        ]
    )
    return case.rewrite(lambda e: e if e.name != victim else msgspec.structs.replace(e, name=false))


def listed_twice(case: Case) -> str:
    files = list(case.manifest().files)
    files[case.draw.randrange(len(files))] = case.draw.choice(files[1:])
    if len({entry.name for entry in files}) == len(files):
        files[0] = files[1]
    return case.rewrite(files=tuple(files))


DAMAGE = [
    bit_flip,
    bit_flip,
    bit_flip,
    header_bit_flip,
    truncated,
    truncated_and_signed,
    empty,
    empty_and_signed,
    longer,
    zeros_in_place_of_a_page,
    missing,
    missing_and_not_listed,
    swapped,
    swapped_and_signed,
    file_of_another_step,
    manifest_of_another_step,
    other_step_in_the_manifest,
    wrong_world,
    wrong_groups,
    wrong_shards,
    without_what_it_must_have,
    kind_of_another_directory,
    old_version,
    other_format,
    names_outside,
    listed_twice,
]
