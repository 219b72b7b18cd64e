import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.worker.config import CacheConfig, SchedulerConfig
from holdfast.worker.engine import model_runner
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner, follow
from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.executors.step_sampler import HeadOutput, Sampled
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.loading import load_model
from holdfast.worker.models.memory import PREFIX_CACHE_FACTOR
from holdfast.worker.step_plan import NO_ROWS, StepPlan
from tests.draw_params import changed, draw_params
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.parity.harness import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Sequences,
    greedy_tokens,
    logits_in_chunks,
    worker_config,
)

CPU = torch.device("cpu")
ANSWER = Sampled([7, 8], [], [])
PROMPTS = [[5, 9, 77, 31, 8, 64, 3], [100, 4, 4, 90]]
BYTES_PER_TOKEN = 2 * 2 * (32 + 16) * 4
"""Layers, KV heads, numbers of a head of 8 (keys are filled up to 32 and values to 16), bytes of a number."""


@pytest.fixture(scope="module", params=["native", "hf"])
def executor(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="module")
def leader(folder, executor) -> LeaderRunner:
    group = SingleRank()
    return LeaderRunner(ModelRunner.load(worker_config(folder, executor=executor), group, device=CPU), group)


def whole_prompts(leader: LeaderRunner, num_draws=(1, 1)) -> StepPlan:
    sequences = Sequences(leader, PROMPTS)
    scheduled = [sequences.scheduled(n, 0, len(PROMPTS[n]), num_draws[n]) for n in range(2)]
    return StepPlan(step_id=3, others=tuple(scheduled))


def test_the_facts_of_a_model_are_known_once_it_is_loaded(leader, folder, executor):
    info = leader._runner.info
    assert (info.model, info.path, info.model_type) == ("tiny-llama", str(folder), "llama")
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (128, 126, {2})
    assert (info.block_size, info.num_blocks) == (BLOCK_SIZE, NUM_BLOCKS)
    assert info.kv_bytes_per_token == BYTES_PER_TOKEN
    assert info.executor.startswith(executor)
    assert info.executor in info.numerics.split("/")
    assert (info.dtype, info.tensor_parallel_size) == ("float32", 1)
    assert info.row_invariant


def test_a_model_can_be_served_under_another_name(folder):
    config = worker_config(folder, served_model_name="mine", max_model_len=32)
    info = ModelRunner.load(config, SingleRank(), device=CPU).info
    assert (info.model, info.max_model_len) == ("mine", 32)


def test_loading_reports_its_progress(folder):
    seen: list[tuple[str, int, int]] = []
    ModelRunner.load(worker_config(folder), SingleRank(), lambda *progress: seen.append(progress), CPU)
    loads = [(done, total) for phase, done, total in seen if phase == "load"]
    assert loads == [(done, len(loads)) for done in range(1, len(loads) + 1)]
    assert [entry for entry in seen if entry[0] == "check"] == [("check", 0, 1), ("check", 1, 1)]


def test_the_check_leaves_a_clean_cache(folder, executor):
    group, config = SingleRank(), worker_config(folder, executor=executor)
    loaded = load_model(config, group, CPU, lambda *progress: None)
    cache = loaded.cache
    parts = [layer.pages for layer in cache._layers]
    written = []
    clear = cache.clear
    cache.clear = lambda blocks: (written.append([bool(part.any()) for part in parts]), clear(blocks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.worker.engine.model_runner.load_model", lambda *args: loaded)
        ModelRunner.load(config, group, device=CPU)
    assert all(written[-1]), "the check did write"
    assert not any(part.any() for part in parts)


def test_a_step_draws_as_many_tokens_as_it_is_asked_for(leader):
    result = leader.run(whole_prompts(leader, num_draws=(0, 3)))
    assert result.step_id == 3
    assert [len(tokens) for tokens in result.token_ids] == [0, 3]
    logits = leader.logits(whole_prompts(leader, num_draws=(0, 3)))
    assert logits.shape == (3, 126)
    assert logits.dtype == np.float32
    assert result.token_ids[1] == tuple(logits.argmax(-1).tolist())


def test_a_step_may_draw_nothing(leader):
    assert leader.run(whole_prompts(leader, num_draws=(0, 0))).token_ids == ((), ())


def test_a_device_may_draw_in_the_step_but_not_in_place_of_logits_that_are_asked_for(leader, monkeypatch):
    """It is told what only draws: not what has log-probabilities."""
    plan, batches = whole_prompts(leader), []
    warm = changed(plan.sequences[0].draw, temperature=0.5)
    drawn = replace(plan, decodes=NO_ROWS, others=tuple(replace(sequence, draw=warm) for sequence in plan.sequences))
    message = changed(warm, num_logprobs=1)

    def execute(batch):
        batches.append(batch)
        return HeadOutput(torch.zeros(2, 126), None) if batch.draws is None else HeadOutput(None, None, sampled=ANSWER)

    monkeypatch.setattr(leader._runner, "execute", execute)
    assert leader.run(drawn).token_ids == ((7,), (8,))
    assert batches[-1].draws() == [warm, warm]
    assert leader.logits(drawn).shape == (2, 126)
    assert batches[-1].draws is None
    leader.run(
        replace(drawn, decodes=NO_ROWS, others=tuple(replace(sequence, draw=message) for sequence in plan.sequences))
    )
    assert batches[-1].draws() is None


def test_a_row_has_the_same_bits_alone_and_in_a_batch(leader):
    for chunk in (1, 3, 128):
        together = logits_in_chunks(leader, PROMPTS, chunk)
        for prompt, rows in zip(PROMPTS, together, strict=True):
            assert torch.equal(rows, logits_in_chunks(leader, [prompt], 128)[0])


def test_seeded_draws_are_equal_alone_and_in_a_batch_of_33(leader, monkeypatch):
    warm = draw_params(seed=11, first_output_index=4, temperature=1.0, top_k=0, top_p=1.0)
    monkeypatch.setattr("tests.parity.harness.GREEDY", warm)
    crowd = [[7 + i] for i in range(32)]
    batched = greedy_tokens(leader, [PROMPTS[1], *crowd], num_new=1)[0]
    assert batched == greedy_tokens(leader, [PROMPTS[1]], num_new=1)[0]
    assert len({tuple(tokens) for tokens in greedy_tokens(leader, [[7]] * 3, num_new=1)}) == 1


def test_followers_run_every_step_until_they_are_told_to_stop(folder, executor):
    def live(group):
        runner = ModelRunner.load(worker_config(folder, 2, executor=executor), group, device=CPU)
        if group.rank > 0:
            return follow(runner, group)
        leader = LeaderRunner(runner, group)
        leader.keep_alive()
        first = leader.run(whole_prompts(leader))
        leader.keep_alive()
        second = leader.run(whole_prompts(leader))
        leader.close()
        assert first == second
        return first.token_ids

    tokens, nothing = run_ranks(2, live)
    assert [len(drawn) for drawn in tokens] == [1, 1]
    assert nothing is None


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=["leader", "follower", "both"])
def test_weights_that_some_ranks_alone_take_end_the_replica(failing, folder, monkeypatch):
    """If all refuse them, all go on with the old ones."""
    on_thread = threading.local()
    right = model_runner.reloaded_config

    def failing_stage(*args):
        if on_thread.rank in failing:
            raise ConfigurationError("this rank has not got the folder")
        return right(*args)

    monkeypatch.setattr(model_runner, "reloaded_config", failing_stage)

    def live(group):
        on_thread.rank = group.rank
        runner = ModelRunner.load(worker_config(folder, 2, executor="native"), group, device=CPU)
        leader = LeaderRunner(runner, group)
        expected = ConfigurationError if len(failing) == 2 else ReplicaError
        if group.rank > 0:
            return heard_by(lambda: follow(runner, group))
        before = leader.run(whole_prompts(leader))
        with pytest.raises(expected) as found:
            leader.reload(str(folder), "2")
        if len(failing) == 2:
            assert leader.run(whole_prompts(leader)) == before
            leader.close()
        return str(found.value)

    of_leader, of_follower = run_ranks(2, live)
    if len(failing) == 2:
        assert (of_leader, of_follower) == ("this rank has not got the folder", None)
    else:
        said = f"were refused on rank {failing.copy().pop()} of 2 alone"
        assert said in of_leader
        assert said in of_follower


def heard_by(call) -> str | None:
    try:
        call()
    except ReplicaError as error:
        return str(error)
    return None


def test_the_leader_has_the_logits_of_all_tokens(folder, executor):
    from holdfast.worker.executors.step_batch import StepBatch

    def execute(group):
        runner = ModelRunner.load(worker_config(folder, 2, executor=executor), group, device=CPU)
        plan = whole_prompts(LeaderRunner(runner, group))
        return runner.execute(StepBatch.of(plan)).logits

    logits, _ = run_ranks(2, execute)
    assert tuple(logits.shape) == (2, 126)


def test_control_messages_are_no_steps(leader):
    from holdfast.worker.engine.model_runner import Order, number_message
    from holdfast.worker.executors.step_batch import StepBatch

    assert StepBatch.of(whole_prompts(leader)).packed()[0] >= 1
    assert max(Order) < 1
    assert isinstance(number_message(0), np.ndarray)


def test_the_cache_has_the_size_that_is_set(folder, executor):
    cache = CacheConfig(kv_cache_memory=BYTES_PER_TOKEN * 16 * 5 + 100)
    config = worker_config(folder, executor=executor).model_copy(update={"cache": cache})
    assert ModelRunner.load(config, SingleRank(), device=CPU).info.num_blocks == 5


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_on_a_cpu_the_cache_has_what_can_be_in_use_and_some_times_as_much_for_prefixes(folder, keeps_prefixes):
    cache = CacheConfig(enable_prefix_caching=keeps_prefixes)
    update = {"cache": cache, "scheduler": SchedulerConfig(max_num_seqs=3)}
    config = worker_config(folder).model_copy(update=update)
    num_in_use = 3 * 128 // 16
    num_blocks = ModelRunner.load(config, SingleRank(), device=CPU).info.num_blocks
    assert num_blocks == num_in_use * (PREFIX_CACHE_FACTOR if keeps_prefixes else 1)


def test_blocks_that_are_no_whole_tiles_are_a_wrong_setting(folder):
    config = worker_config(folder, executor="hf").model_copy(update={"cache": CacheConfig(block_size=10, num_blocks=8)})
    with pytest.raises(ConfigurationError, match=r"cache.block_size = 10: on a CPU it must be a multiple of 16"):
        ModelRunner.load(config, SingleRank(), device=CPU)
