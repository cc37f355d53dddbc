"""Functions that hand out weights before the loop: whose results a new process can do without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch import nn  # noqa: E402

from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.own_objects import of_objects  # noqa: E402
from resilient_train.frameworks.torch.storages import registered  # noqa: E402
from resilient_train.frameworks.torch.weight_loading import Filled, filled, spoil  # noqa: E402

pytestmark = pytest.mark.torch


def called_by(module: str, source: str, **given: Any) -> Any:
    """What ``ask`` finds where it is called by a function ``run`` of that module."""
    names: dict[str, Any] = {"__name__": module, **given}
    exec(source, names)
    return names


def as_loading(function: str, variable: str, thing: Any, ask: Callable[[], Any], module: str = "") -> Any:
    module = module or "torch.distributed.checkpoint.state_dict"
    names = called_by(module, f"def {function}({variable}):\n    return ask()", ask=ask)
    return names[function](thing)


def test_the_model_that_is_filled_must_be_registered_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    found = as_loading("_load_model_state_dict", "model", model, filled)
    assert found.kind == "Sequential"
    assert found.is_in(registered(Objects((model,), ())))
    assert not found.is_in(registered(Objects((model[0],), ())))
    assert not found.is_in(frozenset())
    held = registered(Objects((model,), ()))
    del model
    assert (found.kind, found.is_in(held)) == ("", False), "what came of it is not known any more"


def test_the_optimizer_that_is_filled_must_be_registered() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = as_loading("_load_optim_state_dict", "optim", optimizer, filled)
    assert found.is_in(registered(Objects((model,), (optimizer,))))
    assert not found.is_in(registered(Objects((model,), ())))


def test_what_the_script_does_itself_fills_nothing() -> None:
    assert filled() is None
    assert as_loading("load", "model", nn.Linear(1, 1), filled) is None
    assert as_loading("_load_model_state_dict", "model", nn.Linear(1, 1), filled, module="my.state_dict") is None


@pytest.mark.parametrize("module", ["accelerate.utils.fsdp_utils", "axolotl.monkeypatch.accelerate.fsdp2"])
def test_accelerates_function_is_known_wherever_it_is(module: str) -> None:
    model = nn.Linear(1, 1)
    found = as_loading("fsdp2_load_full_state_dict", "model", model, filled, module=module)
    assert found.is_in(registered(Objects((model,), ())))


def test_of_a_tensor_that_is_handed_out_nobody_knows_what_it_is_for_unless_torch_fills_a_model() -> None:
    def placed() -> Any:
        return as_loading("distribute_tensor", "t", None, filled, module="torch.distributed.tensor._api")

    found = placed()
    assert found == Filled(None)
    assert (found.kind, found.is_in(frozenset())) == ("", False)
    model = nn.Linear(1, 1)
    assert as_loading("_load_model_state_dict", "model", model, placed).kind == "Linear"


def test_names_that_torch_sends_along_are_no_weights() -> None:
    """They are objects, and a new process needs them."""

    def told(ask: Callable[[], Any]) -> Any:
        def objects() -> Any:
            names: dict[str, Any] = {"__name__": "torch.distributed.distributed_c10d", "ask": ask}
            source = "def broadcast():\n    return ask()\n\ndef broadcast_object_list():\n    return broadcast()"
            exec(compile(source, dist.distributed_c10d.__file__, "exec"), names)
            return names["broadcast_object_list"]()

        return as_loading("_load_model_state_dict", "model", nn.Linear(1, 1), objects)

    assert told(of_objects) is True
    assert told(filled) is None
    assert of_objects() is False
    assert as_loading("broadcast_object_list", "thing", None, of_objects, module="my.objects") is False


def test_what_a_process_has_not_got_is_no_number() -> None:
    numbers = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)]
    spoil(numbers)
    assert [bool(each.isnan().all()) for each in numbers] == [True, True, False]


def test_torch_has_these_functions() -> None:
    """In a process of its own: to import them takes a second."""
    source = (
        "import inspect\n"
        "from torch.distributed.checkpoint import state_dict\n"
        "from torch.distributed.tensor import _api, distribute_tensor\n"
        "for name, has in (('_load_model_state_dict', 'model'), ('_load_optim_state_dict', 'optim')):\n"
        "    code = inspect.unwrap(getattr(state_dict, name)).__code__\n"
        "    assert code.co_name == name and has in code.co_varnames + code.co_cellvars, name\n"
        "assert inspect.unwrap(distribute_tensor).__globals__['__name__'] == 'torch.distributed.tensor._api'\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, env=dict(os.environ))
