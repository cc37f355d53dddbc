"""torch's tensors as the trees of ``state/tree.py`` see them, and the objects that such trees are taken from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import msgspec
import torch

from resilient_train.errors import ConfigError, ProtocolError, StateError
from resilient_train.state.transfer import Span, view
from resilient_train.state.tree import Path, Slot, TensorKind, are_kept, flatten, unflatten

PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
"""Types of values that nobody can change."""
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NAMES = {value: name for name, value in _DTYPES.items()}
_OWN = (torch.Tensor, torch.nn.Parameter)
"""Nearly all are of one of these classes: so it is soon told that they are nothing else."""


def _constant(name: str) -> Any:
    if name in _DTYPES:
        return _DTYPES[name]
    try:
        return torch.device(name)
    except RuntimeError:
        raise ProtocolError(f"{name!r} is neither a dtype nor a device") from None


TENSORS = TensorKind(
    is_tensor=lambda value: isinstance(value, torch.Tensor),
    describe=lambda tensor: (*_told(tensor), strides_of(tensor), not tensor.is_cpu),
    is_constant=lambda value: isinstance(value, (torch.dtype, torch.device)),
    name_constant=str,
    constant=_constant,
)


BITS = TENSORS._replace(describe=lambda tensor: (*_told(tensor), (), False))
"""The same, but for digests of ranks that are compared: what a script has built, it may have laid out otherwise."""


def _told(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bool]:
    return _NAMES[tensor.dtype], tuple(tensor.shape), is_sharded(tensor)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where its elements lie, if not in the order of their indices; not where that could not be had again: parts of a
    large one, several at one place, a DTensor's part (which lies as its parameter's does).
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous() or is_sharded(tensor):
        return ()
    return tuple(tensor.stride()) if are_kept(tensor.stride(), tensor.shape) else ()


def laid_out(slot: Slot, device: torch.device | str = "cpu") -> torch.Tensor:
    """New memory for what the slot tells of."""
    if slot.strides:
        return torch.empty_strided(slot.shape, slot.strides, dtype=dtype_of(slot.dtype), device=device)
    return torch.empty(slot.shape, dtype=dtype_of(slot.dtype), device=device)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that ``str(dtype)`` named. Raises ProtocolError for a foreign name."""
    if name not in _DTYPES:
        raise ProtocolError(f"{name!r} is no dtype of this torch")
    return _DTYPES[name]


def is_sharded(tensor: torch.Tensor) -> TypeGuard[Any]:
    """Whether it is a DTensor: of its elements this rank holds a part, or a copy, in another tensor."""
    return type(tensor) not in _OWN and hasattr(tensor, "__create_chunk_list__")


def gradients_of(models: Iterable[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Of all parameters that have one, by name."""
    named = [(name, parameter.grad) for model in models for name, parameter in model.named_parameters()]
    return [(name, gradient) for name, gradient in named if gradient is not None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor on this rank."""
    if is_sharded(tensor):  # `to_local()` says the same in fifty times the time
        held: torch.Tensor = tensor._local_tensor.detach()
        return held
    return tensor.detach()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same, and the tensor itself where it is none of DTensor's."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def version_of(tensor: torch.Tensor) -> int:
    """Torch counts how often a tensor was written in place; a DTensor's memory and the DTensor are written by turns."""
    version: int = tensor._version + (tensor._local_tensor._version if is_sharded(tensor) else 0)
    return version


def is_plainly_dense(tensor: torch.Tensor) -> bool:
    """Its bytes lie in one piece, and mean what they say: those of a conjugate (``conj()``) are the other's."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its bytes lie in one piece in this process's memory, else a copy that does.

    Of a DTensor: what this rank holds of it.
    """
    if type(tensor) in _OWN and tensor.is_cpu and is_plainly_dense(tensor):
        return tensor.detach()
    return local(tensor).to("cpu").resolve_conj().resolve_neg().contiguous()


def span_of(tensor: torch.Tensor) -> Span:
    """The bytes of a dense tensor. Raises StateError for a tensor that has elements and no memory of its own: copies
    and digests of it would be of nothing.
    """
    assert is_plainly_dense(tensor)
    address, size = tensor.data_ptr(), tensor.nbytes
    if size and not address:
        raise StateError(
            f"a {type(tensor).__qualname__} of shape {tuple(tensor.shape)} has no memory of its own to copy or to "
            "compare: its state can't be carried to another process"
        )
    return Span(address, size)


def pack(tree: Any) -> bytes:
    """A (small) tree and its tensors in one piece of bytes. Raises StateError."""
    payload, tensors = flatten(tree, TENSORS)
    for path, tensor in tensors.items():
        if is_sharded(tensor):
            raise StateError(f"state at {'.'.join(map(str, path))!r} is a DTensor, which is no rank's own")
    kept = [dense(tensor) for tensor in tensors.values()]
    return msgspec.msgpack.encode(
        (payload, [bytes(view(span_of(tensor))) if tensor.numel() else b"" for tensor in kept])
    )


def accelerator() -> torch.device:
    """Where a tensor of this rank's lies that does not lie on the host."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def unpack(packed: bytes, *, placed: bool = False) -> Any:
    """The inverse of ``pack``, on the host; ``placed``: where it lay. Raises ProtocolError."""
    try:
        payload, blobs = msgspec.msgpack.decode(packed, type=tuple[bytes, list[bytes]])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a packed state: {error}") from None

    def place(_path: Path, slot: Slot) -> torch.Tensor:
        tensor = laid_out(slot._replace(strides=()))
        span = span_of(tensor)
        if len(blobs[slot.number]) != span.size:
            raise ProtocolError("a packed tensor has another size than its shape says")
        if span.size:
            view(span)[:] = blobs[slot.number]
        device = accelerator() if placed and slot.on_device else tensor.device
        return laid_out(slot, device).copy_(tensor) if slot.strides else tensor.to(device)

    return unflatten(payload, TENSORS, place)


_PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


def _pair_of(thing: Any, what: str = "what is registered") -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How state is taken out of it, and put back. Raises ConfigError where that can't be."""
    for take, put in _PAIRS:
        taking, putting = getattr(thing, take, None), getattr(thing, put, None)
        if callable(taking) and callable(putting):
            return taking, putting
    kind = type(thing)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise ConfigError(
        f"{what} is a {name} without state_dict() and load_state_dict(): give a class both (one derived from dict or "
        "list, where it is one of these), as docs/how-to/loops.md shows"
    )


def check_has_state(what: str, thing: Any) -> None:
    """Raises ConfigError for a thing out of which state can't be taken, or into which it can't be put back."""
    _pair_of(thing, what)


def state_of(thing: Any) -> Any:
    """``state_dict()``, or ``get_state()`` of a torch.Generator. Raises ConfigError for a thing that has no pair."""
    return _pair_of(thing)[0]()


def restore_object(thing: Any, state: Any) -> None:
    """The inverse of ``state_of``."""
    _pair_of(thing)[1](state)
