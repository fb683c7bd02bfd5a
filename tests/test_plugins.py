"""Every dynamics and coupling that the package finds, through the checks that users have for their own."""

from collections.abc import Callable

import pytest

from hookean import coupling, dynamics, testing

CHECKS = [check for plugin in [*dynamics.ALL.values(), *coupling.ALL.values()] for check in testing.checks_of(plugin)]


@pytest.mark.parametrize("check", CHECKS)
def test_a_plugin_passes(check: Callable[[], None]) -> None:
    check()
