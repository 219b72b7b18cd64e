"""An engine over a pseudo-model, for tests of what is around it."""

import pytest

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.pseudo_model import PseudoRunner
from tests.worker.replica.link_peer import BLOCK_SIZE, INFO, NUM_BLOCKS


@pytest.fixture
def engine():
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=INFO.max_model_len,
        eos_token_ids=INFO.eos_token_ids,
    )
    engine = Engine(scheduler, PseudoRunner(NUM_BLOCKS, BLOCK_SIZE), idle_s=0.05)
    engine.start()
    yield engine
    engine.stop()
