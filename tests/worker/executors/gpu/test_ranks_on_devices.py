"""Several ranks whose devices exchange by themselves: graphs, draws of the leader, two steps in flight.

Ranks are processes that share memory. Each of them has to have run what the others have, in the same order.
"""

from functools import partial

import pytest
import torch

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.engine.model_runner import follow
from holdfast.worker.executors.gpu.executor import NUMERICS, GpuExecutor
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models import native_backend as backend
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.gpu import runs
from tests.worker.executors.gpu.forked_ranks import fork_ranks
from tests.worker.executors.gpu.test_executor import FakeDevice
from tests.worker.executors.gpu.test_two_steps import chain, model_of, served
from tests.worker.executors.models import config_of, layout_of, prepared
from tests.worker.executors.steps import Part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHARE_WORDS = 1 << 18
CONFIG = config_of("llama", num_attention_heads=8, num_key_value_heads=4)
"""8 heads, so that slices are whole at each size."""


def runner_of(group, **changes) -> runs.Runner:
    layout = layout_of(CONFIG, group, torch.bfloat16)
    share = group.share if group.size > 1 else None
    runner = runs.Runner(layout, group=group, share=share, launch=launch, capture=FakeDevice(), **changes)
    assert runner.executor.overlaps
    return runner


def steps_of(group):
    """Logits of a prompt and of steps that decode, once captured and once replayed, and best tokens."""
    runner, ids = runner_of(group), tokens(14)
    blocks = runner.blocks(14)
    prompt = runner.step(Part(0, ids[:10], blocks))
    decodes = [runner.step(Part(place, [ids[place]], blocks))[0] for place in (10, 11, 12)]
    best = [runner.best(Part(13, ids[13:], blocks)) for _ in range(2)]
    return torch.cat([*prompt, *decodes]), best, runner.capture.captures


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_graphs_give_the_bits_of_one(size):
    alone, best, captures = steps_of(SingleRank())
    for rank, (logits, best_of_rank, captures_of_rank) in enumerate(
        fork_ranks(size, steps_of, share_words=SHARE_WORDS)
    ):
        assert best_of_rank == best
        assert captures_of_rank == captures == 2
        assert torch.equal(logits, alone) if rank == 0 else not logits.numel()


PROMPTS = [tokens(count, seed) for seed, count in enumerate((4, 7, 2))]


def test_steps_of_two_ranks_are_launched_ahead():
    """Greedy ones: each rank finds the best tokens by itself."""
    in_turn = chain(runner_of(SingleRank()), PROMPTS, 6, ahead=False)
    ahead = partial(chain, prompts=PROMPTS, num_tokens=6, ahead=True)
    assert fork_ranks(2, lambda group: ahead(runner_of(group)), share_words=SHARE_WORDS) == [in_turn] * 2


def test_all_that_is_made_ready_at_load_runs_on_all_ranks_alike():
    """The leader's graphs of draws too, which others do not have; a step after it has the right bits."""

    def work(group):
        runner = runner_of(group, max_positions=1024)
        runner.executor.warm_up(1)
        return runner.run(tokens(9))

    assert torch.equal(*(fork_ranks(2, work, share_words=SHARE_WORDS)[:1]), work(SingleRank()))


def test_a_model_of_two_ranks_is_proved_by_the_leaders_logits(monkeypatch):
    """As at load on GPUs, with interpreters in their place; and a share of one rank that is wrong is found."""
    cuda = torch.device("cuda", 0)
    sizes = {"max_model_len": 64, "block_size": 16, "device": cuda}

    def work(group, breaks):
        def interpreted(layout, group, max_positions, device):
            if breaks and group.rank == 1:
                layout.head.weights[0].view(-1)[:64].fill_(3.0)
            cpu = torch.device("cpu")
            made = GpuExecutor(
                layout, group, max_positions=max_positions, device=cpu, max_rows=64, launch=launch, share=group.share
            )
            return made, NUMERICS

        monkeypatch.setattr(backend, "_executor", interpreted)
        made = backend.make_backend(prepared(layout_of(CONFIG, group, torch.bfloat16), group, **sizes), group, **sizes)
        return made if isinstance(made, str) else type(made).__name__

    assert fork_ranks(2, partial(work, breaks=False), share_words=SHARE_WORDS) == ["NativeBackend"] * 2
    for reason in fork_ranks(2, partial(work, breaks=True), share_words=SHARE_WORDS):
        assert "its logits are wrong" in reason


def test_an_engine_over_two_ranks_with_two_plans_tells_what_one_rank_with_steps_in_turn_does():
    """What the leader draws goes to the other rank on the device. Steps have grammars' settings, penalties, filters."""
    sizes = {"num_blocks": 32, "block_size": 16}

    def work(group):
        runner = runner_of(group, **sizes)
        if group.rank > 0:
            return follow(model_of(runner), group)
        return served(runner, ahead=True)

    in_turn, *_ = served(runner_of(SingleRank(), **sizes), ahead=False)
    (two_plans, num_ahead, num_sampled), _ = fork_ranks(2, work, share_words=SHARE_WORDS)
    assert two_plans == in_turn
    assert num_ahead > num_sampled > 0
