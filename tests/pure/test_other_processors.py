"""The native code for the processors of Ascend's hosts: compiled for them, and its sums run by an emulator.

Here nothing has such a processor, so no time is measured. What an emulator lacks (futex_waitv, process_vm_readv, forks
of a process with threads) is compiled only.
"""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from resilient_train.state.nan import LARGEST

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
SIZES = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 16384, 16449, 65537, 300_001)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (COMPILER and EMULATOR), reason="needs: apt install g++-aarch64-linux-gnu qemu-user"),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it, with each warning an error."""
    folder = tmp_path_factory.mktemp("aarch64")
    cross = ("CMAKE_SYSTEM_NAME=Linux", "CMAKE_SYSTEM_PROCESSOR=aarch64", f"CMAKE_CXX_COMPILER={COMPILER}")
    ninja = f"CMAKE_MAKE_PROGRAM={Path(sys.executable).parent / 'ninja'}"
    cmake = str(Path(sys.executable).parent / "cmake")
    options = [f"-D{each}" for each in (*cross, ninja, "RESILIENT_TESTS=ON")]
    for words in (["-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *options], ["--build", str(folder)]):
        done = subprocess.run([cmake, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def answer(build: Path, data: bytes, *words: str) -> str:
    assert EMULATOR
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(build / "numbers"), *words]
    return subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout.decode()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("instructions", ["neon", "portable"])
def test_digests(build: Path, instructions: str) -> None:
    data = random.Random(1).randbytes(max(SIZES))
    told = answer(build, data, "hash", instructions, *map(str, SIZES)).split()
    assert told == [xxhash.xxh3_128_hexdigest(data[:size]) for size in SIZES]


@pytest.mark.parametrize("name", LARGEST)
def test_nan(build: Path, name: str) -> None:
    """At each place of a room, and nowhere."""
    size, largest = LARGEST[name]
    room = 4096 + 8 * size
    places = [*range(0, room, 128), room - size, None]
    rooms = [bytearray(largest.to_bytes(size, "little") * (room // size)) for _ in places]
    for each, place in zip(rooms, places, strict=True):
        if place is not None:
            each[place : place + size] = (largest + 1 | 1 << 8 * size - 1).to_bytes(size, "little")
    told = answer(build, b"".join(rooms), "nan", str(size), str(largest), str(room))
    assert told == "1" * (len(places) - 1) + "0"
