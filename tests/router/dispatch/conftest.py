"""A dispatch core with one replica: what most of its tests begin with."""

import pytest

from tests.router.core import Core, one_replica


@pytest.fixture
def core() -> Core:
    return one_replica()
