"""Frames over TCP, and who may send them.

The controller greets every connection with a number drawn for it. Where both ends have a secret, a Hello proves that by
a keyed digest of the number and of the rank it is for: so neither a stranger's nor a recorded Hello counts.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from pathlib import Path

import msgspec

from resilient_train.errors import ConfigError
from resilient_train.integrations.mindio.frames import (
    AnyOrder,
    FromProcessor,
    ProcessorHello,
    ProcessorWelcome,
    TrainingOver,
)

VARIABLE = "RESILIENT_TFT_SECRET_FILE"
GREETING_BYTES = 4 << 10
FRAME_BYTES = 1 << 20
_KEY_BYTES = 32
_SILENT_MS = 6000
"""As long as MindIO's: three heartbeats of 2 s. What the kernel sees of a host that is gone."""


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """The controller's first frame."""

    number: bytes


FromController = Challenge | ProcessorWelcome | TrainingOver | AnyOrder
from_processor: msgspec.msgpack.Decoder[FromProcessor] = msgspec.msgpack.Decoder(FromProcessor)
from_controller: msgspec.msgpack.Decoder[FromController] = msgspec.msgpack.Decoder(FromController)


def proof(secret: bytes, number: bytes, rank: int, world_size: int) -> bytes:
    """What a ProcessorHello has to carry; empty where there is no secret."""
    if not secret:
        return b""
    return hashlib.blake2b(number + f"{rank}/{world_size}".encode(), key=secret, digest_size=_KEY_BYTES).digest()


def is_proven(secret: bytes, number: bytes, hello: ProcessorHello) -> bool:
    """Whether who says this knows the secret."""
    return hmac.compare_digest(hello.proof, proof(secret, number, hello.rank, hello.world_size))


def read_secret(path: str) -> bytes:
    """The secret in that file; empty for no path. Raises ConfigError for a file that others may read, or too short."""
    if not path:
        return b""
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1 << 10).strip()
    except OSError as error:
        raise ConfigError(f"{VARIABLE}={path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{VARIABLE}={path}: others may read it (mode {mode:o}); chmod 600 {path}")
    if len(text) < 16:
        raise ConfigError(f"{VARIABLE}={path}: has {len(text)} bytes; write 16 or more, for example 32 random ones")
    return hashlib.blake2b(text, digest_size=_KEY_BYTES).digest()


def check_bind(address: str, secret: bytes) -> None:
    """Raises ConfigError where strangers could reach the port, and nothing tells them from ranks."""
    ip = _ip(address)
    if ip.is_unspecified:
        raise ConfigError(
            f"the controller is to listen at {address}: name one address of this host (MindIO wants it too)"
        )
    if not ip.is_loopback and not secret:
        raise ConfigError(f"the controller is to listen at {address}, where other hosts reach it; give {VARIABLE}")


def is_loopback(address: str) -> bool:
    """Whether only this host reaches it. Raises ConfigError for an address that is none."""
    return _ip(address).is_loopback


def _ip(address: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(socket.gethostbyname(address))
    except OSError as error:
        raise ConfigError(f"the controller is to listen at {address}: {error.strerror}") from None


def notice_silence(endpoint: socket.socket) -> None:
    """A host that is gone without a word ends the connection within seconds."""
    endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
