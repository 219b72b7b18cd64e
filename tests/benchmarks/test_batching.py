"""The benchmark of the batching policies: all that it names run, and give the same tokens."""

from benchmarks.batching import BASELINES, POLICIES, make_load, report, run
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.model_info import ModelInfo
from tests.pseudo_model import PseudoRunner

INFO = ModelInfo(
    model="pseudo",
    path="",
    model_type="pseudo",
    max_model_len=320,
    vocab_size=500,
    eos_token_ids=frozenset(),
    dtype="float32",
    tensor_parallel_size=1,
    block_size=16,
    num_blocks=64,
    kv_bytes_per_token=1,
    row_invariant=True,
)


def test_all_policies_serve_a_load_with_the_same_tokens():
    load = make_load(12, INFO.vocab_size, seed=0)
    runner = PseudoRunner(INFO.num_blocks, INFO.block_size, INFO.vocab_size)
    outcomes = {policy: [run(policy, runner, INFO, load, max_num_seqs=4)] for policy in POLICIES}
    tokens = [outcome.tokens for (outcome,) in outcomes.values()]
    assert tokens == [tokens[0]] * 4
    assert outcomes["continuous"][0].num_steps < outcomes["bucketed"][0].num_steps
    assert report(outcomes, INFO).row_count == 4


def test_no_setting_names_a_baseline():
    choices = SchedulerConfig.model_json_schema()["properties"]["policy"]["enum"]
    assert set(POLICIES) == {*choices, *BASELINES}
    assert not set(choices) & BASELINES.keys()
