"""What a holder's clients are told when it does not answer."""

import os
from collections.abc import Callable

import pytest

from pure.silent_holder import silent_holder
from resilient_train.errors import HolderLostError
from resilient_train.state.vault.client import Vault
from resilient_train.state.vault.slots import Control, create


def adopt(vault: Vault) -> None:
    control = Control(create(0, 4096))
    try:
        vault.adopt(control)
    finally:
        control.close()


@pytest.mark.parametrize(
    "ask",
    [
        Vault.hear,
        Vault.inventory,
        Vault.finish,
        adopt,
        lambda vault: vault.submit("flush", []),
        lambda vault: vault.result(1),
        lambda vault: vault.open(0),
        lambda vault: vault.reserve(0, 4096),
        lambda vault: vault.pin(0, 1),
    ],
)
def test_a_holder_that_has_not_answered_is_lost_from_then_on(ask: Callable[[Vault], object]) -> None:
    """A late answer would be taken for that to the next question."""
    with silent_holder() as vault:
        with pytest.raises(HolderLostError, match="did not answer"):
            vault.inventory()
        for _ in range(2):
            with pytest.raises(HolderLostError):
                ask(vault)


def test_to_close_twice_closes_no_other_file() -> None:
    with silent_holder() as vault:
        passed, ours = os.pipe()
        vault._wire._descriptors.append(passed)
        vault.close()
        os.dup2(ours, passed)  # the number is given out again
        vault.close()
        os.fstat(passed)
        os.close(passed)
        os.close(ours)
