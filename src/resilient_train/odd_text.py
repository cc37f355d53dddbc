"""Text that is not UTF-8.

Linux lets names of files, arguments and variables be any bytes. Python has those that are no UTF-8 as lone surrogates
(PEP 383), which no encoder takes: neither JSON's nor msgpack's.
"""

from __future__ import annotations

from typing import Any

import msgspec


def is_text(value: str) -> bool:
    """Whether it is UTF-8's: a name of a file may be decoded to halves of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def escaped(message: Any) -> Any:
    r"""``message`` in built-in types, such characters as ``\udce9``: for people to read, not for a program to use."""
    return _escaped(msgspec.to_builtins(message, builtin_types=(bytes,)))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list | tuple) else value
