"""Threads of the native library end when nothing runs on them any more, in whatever order their users end."""

import subprocess
import sys

from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.tensor_parallel import SingleRank
from tests.worker.executors.cpu.native import library_or_skip, same_bits
from tests.worker.executors.cpu.runs import MAX_POSITIONS, Runner, layout_of, tokens
from tests.worker.executors.steps import Part, batch_of


def on_threads_of(runner: Runner) -> CpuExecutor:
    executor = CpuExecutor(runner.layout, SingleRank(), max_positions=MAX_POSITIONS, threads=runner.executor.pool)
    executor.allocate_cache(8, runner.block_size)
    return executor


def step_of(executor: CpuExecutor, runner: Runner):
    batch = batch_of([Part(0, tokens(9), list(range(3)))], runner.block_size)
    return executor.run(batch, with_logits=True).logits.clone()


def test_threads_stay_for_another_executor_that_has_not_ended():
    runner = Runner(layout_of("llama"))
    other, pool = on_threads_of(runner), runner.executor.pool
    expected = step_of(other, runner)
    runner.run(tokens(9))
    runner.executor.close()
    assert pool.handle is not None, "a decoder is open"
    assert same_bits(step_of(other, runner), expected)
    other.close()
    assert pool.handle is None


def test_a_pool_that_is_closed_before_its_executor():
    """As the garbage collector may end both."""
    runner = Runner(layout_of("llama"))
    runner.run(tokens(9))
    pool = runner.executor.pool
    pool.close()
    assert pool.handle is not None
    runner.executor.close()
    assert pool.handle is None


def test_a_pool_that_nothing_runs_on_ends_at_once():
    library_or_skip()
    pool = NativePool(2)
    pool.close()
    assert pool.handle is None
    pool.close()


ENDS = """
import gc
from holdfast.worker.executors.cpu.pool import NativePool
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.cpu.test_pool import on_threads_of, step_of

for turn in range(8):
    runner = Runner(layout_of("llama"))
    other = on_threads_of(runner)
    step_of(other, runner), runner.run(tokens(9))
    own, pool = runner.executor, runner.executor.pool
    found = [pool, own, other] if turn % 2 else [other, own, pool]
    for number, one in enumerate(found):
        one.ring = found[number - 1]
    del runner, other, own, pool, found, one
    gc.collect()
print("ended")
"""


def test_the_garbage_collector_ends_them_in_any_order():
    library_or_skip()
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == "ended\n", done.stderr[-2000:]
