"""The path of one plain request: optional features stay behind a test that it does not enter."""

import pytest

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from scripts.request_trace import offline

pytestmark = pytest.mark.slow

MAX_FUNCTIONS, MAX_FILES = 317, 55  # 315 and 55; a turn of the loop more or less runs one or two others
MAX_RETURNS = 4  # after texts, from the engine's outbox, after the submission, and from the inbox to the engine's turn


def test_one_warm_offline_request_runs_no_more_functions_than_it_may_and_returns_to_few_rooms():
    trace = offline(located(WorkerConfig(model=ModelConfig(), cache=CacheConfig(num_blocks=200))))
    assert len(trace.functions) <= MAX_FUNCTIONS, sorted(trace.functions)
    assert len(trace.files) <= MAX_FILES, sorted(trace.files)
    assert trace.returns() <= MAX_RETURNS, trace.calls
