"""Makes the backend ``resilient`` known to torch.distributed, now or when torch is imported, and never imports torch.

Under our agent, what torch would make with gloo is a resilient group as well, in ``init_process_group``, ``new_group``
and what calls it (a DeviceMesh): a script needs no other change than the import. Where no backend is asked for, torch
takes that of the machine's accelerator, if it has one. It goes on telling the backend that was asked for.
(``RESILIENT_WRAP_BACKEND=0`` switches that off; ``RESILIENT_HCCL=1`` has it so for "hccl" as well, ``RESILIENT_NCCL=1``
for "nccl", and for what torch takes by itself where there is a GPU.)
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from resilient_train import config, standby_stage

_TARGET = "torch.distributed"
_BACKEND = "resilient"
_OVER_HCCL = "resilient_hccl"
_OVER_NCCL = "resilient_nccl"
_OVER_BOTH = "resilient_gloo_nccl"
_TOLD = {_BACKEND: "cpu:gloo", _OVER_HCCL: "npu:hccl", _OVER_NCCL: "cuda:nccl", _OVER_BOTH: "cpu:gloo,cuda:nccl"}
"""What torch says of a group that stands in another's place, by the backend that makes it."""
_RANK_PLACE = 4
"""Of the parameters of ``init_process_group`` behind its first, ``rank`` is this one."""
_for_forks = False
_connects_late: ContextVar[bool] = ContextVar("_connects_late", default=False)
"""In an ``init_process_group`` that needs nothing of what is in torch's store."""


def register_when_imported() -> None:
    """Registers at once if torch.distributed is imported already, else right after it will be."""
    module = sys.modules.get(_TARGET)
    if module is not None and hasattr(module, "Backend"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(distributed: Any) -> None:
    if not distributed.is_available() or _BACKEND.upper() in distributed.Backend._plugins:  # noqa: SLF001 - torch has no public list that is right here
        return

    for name, uses in _TOLD.items():
        devices = [part.partition(":")[0] for part in uses.split(",")]
        creator = functools.partial(_create, name)
        distributed.Backend.register_backend(name, creator, extended_api=True, devices=devices)
    # From 2.15 on torch hooks its recorder into groups that do not record by themselves; in ours the library does.
    recording: set[str] = getattr(distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.update(_TOLD)
    if _for_forks or config.read_link() is not None:
        _wrap(distributed)


def _create(name: str, options: Any, backend_options: Any) -> Any:
    """Torch asks for a group of that backend."""
    from resilient_train.frameworks.torch.communication.process_group import ResilientGroup, create
    from resilient_train.frameworks.torch.communication.transports.hccl import HcclGroup
    from resilient_train.frameworks.torch.communication.transports.nccl import GlooAndNcclGroup, NcclGroup

    kinds: dict[str, type[ResilientGroup]] = {
        _BACKEND: ResilientGroup,
        _OVER_HCCL: HcclGroup,
        _OVER_NCCL: NcclGroup,
        _OVER_BOTH: GlooAndNcclGroup,
    }
    return create(options, backend_options, kind=kinds[name])


def wrap_for_forks() -> None:
    """This process imports torch for others: what it becomes is known only when ``init_process_group`` is called.

    To be called before torch is imported: a module may take the function by its name.
    """
    global _for_forks
    _for_forks = True


def _wrap(distributed: Any) -> None:
    _wrap_init(distributed, distributed.distributed_c10d)
    _wrap_helper(distributed.distributed_c10d)
    _wrap_store(sys.modules["torch.distributed.rendezvous"])


def _wrap_init(distributed: Any, c10d: Any) -> None:
    original = distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        ours = (backend or "").lower() == _BACKEND or (_is_ours() and _is_for_gloo(backend, c10d))
        if standby_stage.stage is not None and ours and not config.init_barrier_wanted():
            given = len(args) >= _RANK_PLACE or kwargs.get("rank", -1) != -1
            if not given:
                kwargs["rank"] = 0  # until it is known; a group of ours can learn it later
        before = _connects_late.set(ours and _joins())
        try:
            return original(backend, *args, **kwargs)
        finally:
            _connects_late.reset(before)

    distributed.init_process_group = init_process_group
    c10d.init_process_group = init_process_group


def _wrap_store(rendezvous: Any) -> None:
    """The agent's store is connected to by one function of torch's."""
    original = rendezvous._create_c10d_store  # noqa: SLF001 - torch is pinned, see tests/pure/test_torch_private.py
    # From 2.14 on the agent's store is only what listens where the agent says; before, what is anywhere.
    serves = getattr(rendezvous, "_agent_store_serves", lambda *_: rendezvous._torchelastic_use_agent_store())  # noqa: SLF001 - likewise

    @functools.wraps(original)
    def create_c10d_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        connect = functools.partial(original, hostname, port, *args, **kwargs)
        if not _connects_late.get() or not serves(hostname, port):
            return connect()
        from resilient_train.frameworks.torch.communication.late_store import LateStore

        return LateStore(connect)

    rendezvous._create_c10d_store = create_c10d_store  # noqa: SLF001 - likewise


def _wrap_helper(c10d: Any) -> None:
    """Every group is made by one function of torch's, whoever wants it."""
    original = c10d._new_process_group_helper  # noqa: SLF001 - torch is pinned, see tests/pure/test_torch_private.py
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        asked = given["backend"]
        ours = _stands_for(asked, c10d) if _is_ours() else None
        late = _late_store(given["store"])
        if late is not None and _BACKEND not in (ours, asked):
            given["store"], late = late.connected(), None  # whoever makes this group looks for its members there
        group, store = original(**{**given, "backend": c10d.Backend(ours) if ours is not None else asked})
        if store is None:
            return group, store
        world = c10d._world  # noqa: SLF001 - likewise
        if late is not None:  # torch's own PrefixStore of it would lack some verbs
            store = late.prefixed(f"{given['group_name']}/")
            world.pg_map[group] = asked, store
        if ours is not None:
            group.show_as_asked()
            world.pg_map[group] = asked, store
            world.pg_backend_config[group] = _TOLD[ours]
        return group, store

    c10d._new_process_group_helper = new_process_group_helper  # noqa: SLF001 - likewise


def _is_for_gloo(backend: str | None, c10d: Any) -> bool:
    """Whether a group that is asked for so uses gloo alone."""
    return _stands_for(backend, c10d) == _BACKEND


def _stands_for(backend: str | None, c10d: Any) -> str | None:
    """The backend of ours that makes a group which is asked for so; None: torch's own is to make it.

    Not asked ("undefined" is torch's), the accelerator decides.
    """
    backend = (backend or "undefined").lower()  # as torch does; ours is asked first
    if backend == "undefined":
        try:
            uses = dict(c10d.BackendConfig(c10d.Backend("undefined")).get_device_backend_map())
        except ValueError:  # an accelerator for which torch knows no backend; it says so itself
            return None
    elif ":" in backend:
        uses = {device: library for device, _, library in (part.partition(":") for part in backend.split(","))}
    else:
        uses = {"": backend}
    libraries = set(uses.values())
    if libraries == {"gloo"}:
        return _BACKEND
    if uses in ({"": "hccl"}, {"npu": "hccl"}):
        return _OVER_HCCL if config.rebuilds_hccl() else None
    if uses in ({"": "nccl"}, {"cuda": "nccl"}):
        return _OVER_NCCL if config.rebuilds_nccl() else None
    if uses == {"cpu": "gloo", "cuda": "nccl"}:
        return _OVER_BOTH if config.rebuilds_nccl() else None
    return None


def _joins() -> bool:
    """Whether this process is to take a rank's place: others listen to it only when it says so to the agent."""
    link = config.read_link() if standby_stage.stage is None else None
    return standby_stage.stage is not None or (link is not None and link.joining)


def _late_store(store: Any) -> Any:
    module = sys.modules.get("resilient_train.frameworks.torch.communication.late_store")
    return module.behind(store) if module is not None else None


def _is_ours() -> bool:
    """Whether a group that is made now is to be one that can be rebuilt."""
    if standby_stage.stage is not None:
        return standby_stage.stage.wraps
    return config.read_link() is not None and config.wraps_backend()


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for torch.distributed, steps aside, and registers when its module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """The real loader, and a registration after it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._real.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
