"""A model split over ranks computes what the whole model computes."""

import multiprocessing

import pytest
import torch

from holdfast.worker.distributed.tensor_parallel import DistributedGroup, pick_port
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.layers.experts import Experts
from holdfast.worker.replica.rank import run_rank
from tests.parity.families import SERVED, VARIANTS
from tests.parity.harness import greedy_tokens, largest_difference, load, logits_in_chunks, on_ranks, worker_config

TOLERANCE = 1e-5


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", [*SERVED, *VARIANTS])
def test_split_models_have_the_logits_of_hugging_face(family, size, tiny_model, prompts, expected):
    config = worker_config(tiny_model(family), size)
    ours = on_ranks(config, lambda leader: logits_in_chunks(leader, prompts, chunk=40))
    assert largest_difference(ours, expected(family)) <= TOLERANCE


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe"])
def test_experts_that_stay_hugging_faces_are_split_too(family, size, tiny_model, prompts, expected, monkeypatch):
    """As on a GPU, where their grouped matmul is kept."""
    monkeypatch.setattr(Experts, "can_replace", lambda module: False)
    config = worker_config(tiny_model(family), size)
    ours = on_ranks(config, lambda leader: logits_in_chunks(leader, prompts, chunk=40))
    assert largest_difference(ours, expected(family)) <= TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "llama", "llama, one KV head"])
def test_split_models_draw_the_tokens_of_whole_ones(family, size, tiny_model, prompts):
    whole = greedy_tokens(load(worker_config(tiny_model(family))), prompts, num_new=16)
    config = worker_config(tiny_model(family), size)
    assert on_ranks(config, lambda leader: greedy_tokens(leader, prompts, num_new=16)) == whole


def test_each_rank_holds_its_own_heads_and_all_know_the_same_facts(tiny_model):
    from tests.fake_group import run_ranks

    config = worker_config(tiny_model("llama"), 4)
    runners = run_ranks(4, lambda group: ModelRunner.load(config, group, device=torch.device("cpu")))
    assert len({runner.info for runner in runners}) == 1
    # two KV heads on four ranks: one each, twice
    assert runners[0].info.kv_bytes_per_token == 2 * 1 * (8 + 8) * 4


def test_ranks_in_processes_of_their_own_draw_the_same_tokens(tiny_model, prompts):
    config = worker_config(tiny_model("llama"), 2)
    rendezvous = f"tcp://127.0.0.1:{pick_port()}"
    other = multiprocessing.get_context("spawn").Process(target=run_rank, args=(config, 1, rendezvous))
    other.start()
    group = DistributedGroup(0, 2, rendezvous, start_timeout_s=60)
    try:
        leader = LeaderRunner(ModelRunner.load(config, group, device=torch.device("cpu")), group)
        leader.keep_alive()
        tokens = greedy_tokens(leader, prompts, num_new=8)
        leader.close()
    finally:
        group.close()
        other.join(30)
        other.kill()
    assert other.exitcode == 0
    assert tokens == greedy_tokens(load(worker_config(tiny_model("llama"))), prompts, num_new=8)
