"""What an enemy does to a checkpoint: special files, and contents that the manifest's digests agree with."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from pure.checkpoint_damage import NEW, Case
from resilient_train.state.checkpoint.manifest import MANIFEST, TreeFile
from resilient_train.state.image import LENGTH


def symbolic_link(case: Case) -> str:
    """To a file with the right bytes: it may be exchanged at any time."""
    name = case.any_file()
    shutil.copy(case.path / name, case.folder / "outside")
    case.replace(name).symlink_to(
        case.draw.choice(["../outside", case.folder / "outside", name, "nowhere", "/dev/zero"])
    )
    return name


def whole_directory_linked(case: Case) -> str:
    case.path.rename(case.folder / "elsewhere")
    case.path.symlink_to("elsewhere")
    return "."


def file_in_place_of_the_directory(case: Case) -> str:
    shutil.rmtree(case.path)
    case.path.write_bytes(b"")
    return "."


def fifo(case: Case) -> str:
    """Whoever opens it for reading waits for a writer, for ever."""
    name = case.any_file()
    os.mkfifo(case.replace(name))
    return name


def special_file(case: Case) -> str:
    name = case.any_file()
    place = case.replace(name)
    if case.draw.random() < 0.5:
        place.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            here = Path.cwd()
            os.chdir(case.path)  # the path of a socket is short
            try:
                listener.bind(name)
            finally:
                os.chdir(here)
    return name


def foreign_image(case: Case) -> str:
    """Torch's reader would take its tensors too."""
    shutil.copy(case.path / case.image(), case.path / "shard-9-of-9.safetensors")
    return "shard-9-of-9.safetensors"


def huge_header(case: Case) -> str:
    name = case.image()
    length = case.draw.choice([1 << 63, (1 << 64) - 1, 100_000_001, len(case.content(name)) - 7, 0, 1])
    return case.sign(name, LENGTH.pack(length) + case.content(name)[8:])


def with_header(case: Case, edit: Callable[[dict], None], name: str = "") -> str:
    name = name or case.image()
    content = case.content(name)
    (length,) = LENGTH.unpack(content[:8])
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode().ljust(length)
    return case.sign(name, LENGTH.pack(len(text)) + text + content[8 + length :])


def tensor_of(header: dict, case: Case) -> str:
    return case.draw.choice([name for name in header if name != "__metadata__"])


def false_tensor(case: Case) -> str:
    def edit(header: dict) -> None:
        entry = header[tensor_of(header, case)]
        field, value = case.draw.choice(
            [
                ("dtype", "F7"),
                ("dtype", None),
                ("shape", None),
                ("shape", [-1]),
                ("shape", [1 << 64]),
                ("shape", [2.5]),
                ("shape", [1] * 100),
                ("data_offsets", [0]),
                ("data_offsets", [5, 3]),
                ("data_offsets", [0, 1 << 62]),
                ("data_offsets", [[], {}]),
                ("more", 1),
            ]
        )
        entry[field] = value

    return with_header(case, edit)


def piece_elsewhere(case: Case) -> str:
    """A shard that says its rows lie where another's do: each file is right, together they are not."""

    def edit(header: dict) -> None:
        info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        info["model.0.weight"]["saved_offsets"][0] = 0
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)

    with_header(case, edit, f"shard-{case.shards - 1}-of-{case.shards}.safetensors")
    return "."


def larger_than_its_pieces(case: Case) -> str:
    def edit(header: dict) -> None:
        info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        info["model.0.weight"]["global_shape"][0] += 1
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)

    if case.draw.random() < 0.5:
        name = case.image()
        with_header(case, edit, name)
        return "shards"
    for shard in range(case.shards):
        with_header(case, edit, f"shard-{shard}-of-{case.shards}.safetensors")
    return "."


def tensor_renamed(case: Case) -> str:
    def edit(header: dict) -> None:
        name = tensor_of(header, case)
        header[name + "x"] = header.pop(name)

    return with_header(case, edit)


def duplicated_key(case: Case) -> str:
    name = case.draw.choice([case.image(), MANIFEST])
    content = case.content(name)
    if name == MANIFEST:
        return case.change(MANIFEST, content.replace(b'"step"', b'"step": 7,\n  "step"', 1))
    (length,) = LENGTH.unpack(content[:8])
    text = content[8 : 8 + length].rstrip()
    doubled = text[:-1] + b"," + text[1:]
    return case.sign(name, LENGTH.pack(len(doubled)) + doubled + content[8 + length :])


def false_json(case: Case) -> str:
    content = case.draw.choice(
        [b"{}", b"[]", b"null", b"[" * 100_000, b'{"format": ' * 50_000, b"\xff" * 100, b"9" * 5000, b'{"version": 1}']
    )
    return case.change(MANIFEST, content)


def another_way_to_write_it(case: Case) -> str:
    """The same values in other bytes: then the digest would not cover all of the file."""
    manifest = json.loads(case.content(MANIFEST))
    return case.change(MANIFEST, case.draw.choice([json.dumps(manifest).encode(), case.content(MANIFEST) + b" "]))


def huge_manifest(case: Case) -> str:
    """Sparse: it costs nothing to make, and memory to read."""
    with (case.path / MANIFEST).open("r+b") as file:
        file.truncate(1 << 40)
    return MANIFEST


def huge_part(case: Case) -> str:
    name = case.part()
    with (case.path / name).open("r+b") as file:
        file.truncate(1 << 40)
    case.rewrite(lambda e: e if e.name != name else msgspec.structs.replace(e, size_bytes=1 << 40))
    return name


def false_rest(case: Case) -> str:
    name = case.part(case.draw.choice(["rank-", "tree-"]))
    false = [
        b"\x91" * 100_000,
        b"\xc1",
        b"\x80",
        b"\x81\xa1x\x01",
        msgspec.msgpack.encode({"step": NEW}),
        b"\xdf\xff\xff\xff\xff",
    ]
    return case.sign(name, case.draw.choice(false))


def tree_of_tensors_that_are_not_there(case: Case) -> str:
    name = case.part("tree-")
    tree = msgspec.msgpack.decode(case.content(name), type=TreeFile)
    return case.sign(name, msgspec.msgpack.encode(msgspec.structs.replace(tree, names=("ghost",))))


def never_committed(case: Case) -> str:
    """Only under its final name does it count, whole as it may be."""
    case.path.rename(case.folder / f"step_{NEW}_tmp")
    return ""


def half_deleted(case: Case) -> str:
    case.path.rename(case.folder / f"step_{NEW}_gone")
    return ""


FORGERIES = [
    symbolic_link,
    whole_directory_linked,
    file_in_place_of_the_directory,
    fifo,
    special_file,
    foreign_image,
    huge_header,
    false_tensor,
    piece_elsewhere,
    larger_than_its_pieces,
    tensor_renamed,
    duplicated_key,
    false_json,
    another_way_to_write_it,
    huge_manifest,
    huge_part,
    false_rest,
    tree_of_tensors_that_are_not_there,
    never_committed,
    half_deleted,
]
