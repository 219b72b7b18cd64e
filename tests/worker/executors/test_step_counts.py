"""What a step costs in counts, on a fixed load: calls into the library, calls of Python functions, copies and tensors.

Times are for benchmarks. A count that grows is seen here, on any machine.
"""

from array import array
from collections import Counter

import pytest
import torch

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.executors.cpu.library import runnable_classes
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.step_plan import BlockTables, DecodeColumns, DecodeRows, StepPlan
from tests.counting import Counted
from tests.draw_params import draw_params

pytestmark = pytest.mark.skipif(not runnable_classes(), reason="the native executor does not run here")

GREEDY = draw_params(seed=0, first_output_index=0, temperature=0.0, top_k=0, top_p=1.0)


@pytest.fixture(scope="module")
def leader() -> LeaderRunner:
    config = located(WorkerConfig(model=ModelConfig(executor="native"), cache=CacheConfig(num_blocks=128)))
    group = SingleRank()
    return LeaderRunner(ModelRunner.load(config, group, device=torch.device("cpu")), group)


def decodes(count: int) -> StepPlan:
    columns = DecodeColumns(range(count), [20] * count, [5] * count, [GREEDY] * count)
    tables = [(2 * i, 2 * i + 1) for i in range(count)]
    rows = DecodeRows(columns, 0, [7] * count, BlockTables(tables, [array("q", table) for table in tables]))
    return StepPlan(step_id=1, decodes=rows)


def calls_of(leader: LeaderRunner, plan: StepPlan) -> Counter[str]:
    """Calls of functions in one step: of Python's by name and in all, and of those written in C in all."""
    leader.run(plan)  # what is made once is made
    with Counted() as calls:
        leader.run(plan)
    return calls


def test_a_greedy_step_is_one_call_of_the_executor_and_makes_no_logits(leader):
    calls = calls_of(leader, decodes(8))
    assert calls["_begin"] == calls["run_segments"] == 1
    assert calls["ask_for_logits"] == 0
    warm = decodes(1)
    assert leader._runner.execute(leader._ordered(warm)).logits is None


def test_calls_hardly_grow_with_the_rows_of_a_step_and_not_with_the_layers_of_a_model(leader):
    one, many = calls_of(leader, decodes(1)), calls_of(leader, decodes(33))
    assert one["all of Python"] <= 36
    assert one["all of C"] <= 30
    assert many["all of Python"] - one["all of Python"] <= 4
    assert many["all of C"] - one["all of C"] <= 4
    assert many["run_segments"] == 1
