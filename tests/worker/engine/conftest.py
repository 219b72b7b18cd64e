"""An engine that runs, for tests that need no other."""

import pytest

from tests.worker.engine.engines import make_engine


@pytest.fixture
def engine_and_friends():
    engine, runner, recorder = make_engine()
    yield engine, runner, recorder
    engine.stop()
    assert runner.closed
