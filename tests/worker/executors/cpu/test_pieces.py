"""Pieces of encoders' steps, each on one thread: the states of a step as a whole, also while the next one waits."""

from dataclasses import replace

import numpy as np
import pytest

from tests.worker.executors.cpu.native import BF16, F32
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.cpu.test_encoders import encoder
from tests.worker.executors.models import ENCODER_MODELS
from tests.worker.executors.steps import Part, batch_of

SEQUENCES = [tokens(1 + 37 * number % 41, seed=number) for number in range(24)]
KINDS = {
    "all": lambda length: range(length),
    "first": lambda length: range(1),
    "last": lambda length: range(length - 1, length),
}


def pooled_batch(runner, sequences, kind):
    """A step that wants the states of some rows of each sequence, and no logits."""
    lengths = [len(one) for one in sequences]
    batch = batch_of([Part(0, ids, runner.blocks(len(ids))) for ids in sequences], runner.block_size)
    firsts = np.cumsum(lengths) - lengths
    rows = [first + row for first, length in zip(firsts, lengths, strict=True) for row in KINDS[kind](length)]
    none = np.zeros(len(lengths), dtype=np.int64)
    return replace(batch, num_draws=none, logits_rows=none[:0], pooled_rows=np.array(rows, dtype=np.int64))


def states(runner, sequences, kind):
    """What a step leaves of its wanted rows, and the layers that it has counted."""
    before = runner.executor.layers_done()
    output = runner.executor.run(pooled_batch(runner, sequences, kind), with_logits=False)
    return output.pooled.copy(), runner.executor.layers_done() - before


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ENCODER_MODELS)
def test_pieces_have_the_states_of_the_whole(model, kind, dtype):
    layout = encoder(model, dtype)
    found = {}
    for threads in (1, 2, 3):
        runner = Runner(layout, threads=threads)
        runner.fill(np.nan)
        found[threads], num_layers = states(runner, SEQUENCES, kind)
        assert (num_layers > len(layout.layers)) is (threads > 1), "a step of one thread is not cut"
        runner.close()
    assert np.isfinite(found[1]).all()
    for threads in (2, 3):
        assert found[threads].tobytes() == found[1].tobytes(), threads


def test_a_step_that_pieces_would_not_share_out_is_run_together():
    layout = encoder("bert")
    runner = Runner(layout, threads=2)
    for sequences in ([tokens(300)], [tokens(200), tokens(20), tokens(20)]):
        assert states(runner, sequences, "all")[1] == len(layout.layers)
    runner.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("model", ["bert", "modernbert"])
def test_two_steps_in_flight_have_their_own_states(model, threads):
    """The second step has more rows than the first has made room for."""
    runner = Runner(encoder(model, F32), threads=threads)
    executor = runner.executor
    assert executor.overlaps
    steps = [SEQUENCES[:9], SEQUENCES, SEQUENCES[3:15]]
    alone = [states(runner, some, "all")[0] for some in steps]
    runner.close()
    runner = Runner(encoder(model, F32), threads=threads, num_blocks=128)
    executor = runner.executor
    batches = [pooled_batch(runner, some, "all") for some in steps]
    launched = [executor.launch(batch, with_logits=False) for batch in batches[:2]]
    found = [executor.collect(launched[0]).pooled]
    launched.append(executor.launch(batches[2], with_logits=False))
    found += [executor.collect(one).pooled for one in launched[1:]]
    assert [one.tobytes() for one in found] == [one.tobytes() for one in alone]
    runner.close()


def test_a_decoder_runs_its_steps_in_turn():
    runner = Runner(layout_of("llama"))
    assert not runner.executor.overlaps
    runner.close()
