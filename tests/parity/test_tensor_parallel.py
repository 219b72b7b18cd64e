"""A model split over ranks computes what the whole model computes."""

import pytest
import torch

from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.models.experts import Experts
from tests.parity.families import NATIVE_ALONE, SERVED, VARIANTS, executor_of
from tests.parity.harness import (
    greedy_tokens,
    in_processes,
    is_run_by,
    load,
    logits_in_chunks,
    on_ranks,
    relative_difference,
    worker_config,
)

TOLERANCE = 1e-5
"""Of the largest logit."""
SAME_BITS = (
    "cohere",
    "gemma3_text",
    "gemma4_text, shared keys",
    "gpt_oss",
    "llama",
    "llama, one KV head",
    "mixtral",
    "phi3",
    "qwen2_moe",
    "starcoder2",
)


EVERY_TIME = (
    *("cohere2", "deepseek_v3", "gemma3_text", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "llama"),
    *("gemma4_text, shared keys", "llama, one KV head", "mixtral", "olmo2", "phi3", "qwen2_moe", "starcoder2"),
)
"""One of each way to split. The layouts of all families are split every time in
`worker/models/test_families.py`."""
IN_ALL_WAYS = ("gpt_oss",)
BITS_EVERY_TIME = ("gemma4_text, shared keys", "gpt_oss")


def executors(family: str, size: int) -> list[str]:
    """What a family is tried on: what serves it, and the HF backend where that is not the same, on two ranks."""
    is_tried = size == 2 and family not in NATIVE_ALONE
    return sorted({executor_of(family, size), *(["hf"] if is_tried else [])})


def is_usual(family: str, size: int, executor: str) -> bool:
    """Tried every time: split in two, on what serves the family; and a few in all ways."""
    is_served_so = (size, executor) == (2, executor_of(family, 2))
    return family in IN_ALL_WAYS or (family in EVERY_TIME and is_served_so)


SPLIT = [
    pytest.param(*case, marks=[] if is_usual(*case) else pytest.mark.slow)
    for case in ((f, size, e) for f in (*SERVED, *VARIANTS) for size in (2, 4) for e in executors(f, size))
]


@pytest.mark.parametrize(("family", "size", "executor"), SPLIT)
def test_split_models_have_the_logits_of_hugging_face(family, size, executor, tiny_model, prompts, expected):
    def work(leader: LeaderRunner) -> list[torch.Tensor]:
        assert is_run_by(leader, executor)
        return logits_in_chunks(leader, prompts, chunk=40)

    config = worker_config(tiny_model(family), size, executor="hf" if executor == "hf" else "auto")
    assert relative_difference(on_ranks(config, work), expected(family)) <= TOLERANCE


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in BITS_EVERY_TIME else pytest.mark.slow) for one in SAME_BITS]
)
def test_split_decoder_programs_have_the_bits_of_whole_ones(family, tiny_model, prompts):
    folder = tiny_model(family)
    whole = logits_in_chunks(load(worker_config(folder, executor="native")), prompts, chunk=40)
    for size in (2, 4):
        config = worker_config(folder, size, executor="native")
        split = on_ranks(config, lambda leader: logits_in_chunks(leader, prompts, chunk=40))
        assert all(map(torch.equal, split, whole)), size


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("apertus", "llama", "opt", "phi3"))]
)
def test_hugging_faces_modules_have_the_bits_of_whole_ones(family, tiny_model, prompts):
    """Those without experts."""
    folder = tiny_model(family)
    whole = logits_in_chunks(load(worker_config(folder, executor="hf")), prompts, chunk=40)
    for size in (2, 4):
        config = worker_config(folder, size, executor="hf")
        split = on_ranks(config, lambda leader: logits_in_chunks(leader, prompts, chunk=40))
        assert all(map(torch.equal, split, whole)), size


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gpt_oss", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mixtral", "qwen2_moe"))]
)
def test_experts_that_stay_hugging_faces_are_split_too(family, size, tiny_model, prompts, expected, monkeypatch):
    """As those are whose form is not the common one."""
    monkeypatch.setattr(Experts, "can_replace", lambda module: False)
    config = worker_config(tiny_model(family), size, executor="hf")
    ours = on_ranks(config, lambda leader: logits_in_chunks(leader, prompts, chunk=40))
    assert relative_difference(ours, expected(family)) <= TOLERANCE


@pytest.mark.parametrize(
    ("size", "executor"),
    [(2, "native"), *(pytest.param(4, one, marks=pytest.mark.slow) for one in ("native", "hf"))],
)
@pytest.mark.parametrize(
    "family",
    ["llama, one KV head", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3_text", "gpt_oss", "llama"))],
)
def test_split_models_draw_the_tokens_of_whole_ones(family, size, executor, tiny_model, prompts):
    whole = greedy_tokens(load(worker_config(tiny_model(family), executor=executor)), prompts, num_new=16)
    config = worker_config(tiny_model(family), size, executor=executor)
    assert on_ranks(config, lambda leader: greedy_tokens(leader, prompts, num_new=16)) == whole


@pytest.mark.parametrize("executor", ["native", "hf"])
def test_each_rank_holds_its_own_heads_and_all_know_the_same_facts(executor, tiny_model):
    """The cache fills up keys to 32 dimensions and values to 16."""
    from tests.fake_group import run_ranks

    config = worker_config(tiny_model("llama"), 4, executor=executor)
    runners = run_ranks(4, lambda group: ModelRunner.load(config, group, device=torch.device("cpu")))
    assert len({runner.info for runner in runners}) == 1
    # two KV heads on four ranks: one each, twice
    assert runners[0].info.kv_bytes_per_token == 2 * 1 * (32 + 16) * 4


@pytest.mark.slow  # every time in test_serving.py, and in test_mixture.py
@pytest.mark.parametrize("executor", ["native", "hf"])
def test_ranks_in_processes_of_their_own_draw_the_same_tokens(executor, tiny_model, prompts):
    config = worker_config(tiny_model("llama"), 2, executor=executor)
    with in_processes(config) as leader:
        tokens = greedy_tokens(leader, prompts, num_new=8)
    assert tokens == greedy_tokens(load(worker_config(tiny_model("llama"), executor=executor)), prompts, num_new=8)
