from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.models.parallel_plan import Cut, ParallelPlan, Segment

CONFIG = SimpleNamespace(model_type="some_model", num_attention_heads=4, num_key_value_heads=2)
RULES = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "model.layers.*.mlp.experts.down_proj": "rowwise",
}
LAYER = "model.layers.11."


def rows_of(cut: Cut, length: int, size: int) -> list[list[int]]:
    return [cut.take(torch.arange(length), rank, size).tolist() for rank in range(size)]


def test_columns_are_cut_in_rank_order():
    cut = ParallelPlan(CONFIG, RULES, 2).cut(LAYER + "self_attn.q_proj.weight", (8, 3), 2)
    assert cut == Cut(0, (Segment(8, 2),))
    assert rows_of(cut, 8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_are_cut_along_the_inputs_and_their_bias_stays_whole():
    plan = ParallelPlan(CONFIG, RULES, 2)
    assert plan.cut(LAYER + "self_attn.o_proj.weight", (3, 8), 2) == Cut(1, (Segment(8, 2),))
    assert plan.cut(LAYER + "self_attn.o_proj.bias", (3,), 2) is None
    assert plan.cut(LAYER + "mlp.experts.down_proj", (5, 3, 8), None) == Cut(2, (Segment(8, 2),))


def test_each_of_two_packed_matrices_is_cut():
    cut = ParallelPlan(CONFIG, RULES, 2).cut(LAYER + "mlp.gate_up_proj.weight", (8, 3), None)
    assert rows_of(cut, 8, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_kv_heads_are_repeated_where_there_are_more_ranks():
    cut = ParallelPlan(CONFIG, RULES, 4).cut(LAYER + "self_attn.k_proj.weight", (4, 3), 2)
    assert rows_of(cut, 4, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert cut.share == 0.5


def test_fused_heads_are_cut_by_heads():
    rules = {"model.layers.*.self_attn.qkv_proj": "fused_heads"}
    cut = ParallelPlan(CONFIG, rules, 4).cut(LAYER + "self_attn.qkv_proj.weight", (4 + 2 + 2, 3), 1)
    assert rows_of(cut, 8, 4) == [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]


def test_what_no_rule_names_is_whole():
    assert ParallelPlan(CONFIG, RULES, 2).cut(LAYER + "input_layernorm.weight", (8,), None) is None


def test_one_rank_cuts_nothing():
    assert ParallelPlan(CONFIG, RULES, 1).cut(LAYER + "self_attn.q_proj.weight", (8, 3), 2) is None


@pytest.mark.parametrize(("style", "splits"), [("colwise", True), ("colwise_gather_output", False)])
def test_gathered_keys_are_computed_by_all_ranks(style, splits):
    assert ParallelPlan(CONFIG, {"model.layers.*.self_attn.k_proj": style}, 2).splits_attention is splits


@given(st.integers(0, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_together_the_ranks_hold_everything(log_size, chunk_lengths, data):
    size = 2**log_size
    counts = [2 ** data.draw(st.integers(0, log_size)) for _ in chunk_lengths]
    cut = Cut(0, tuple(Segment(length * n, n) for length, n in zip(chunk_lengths, counts, strict=True)))
    total = sum(segment.length for segment in cut.segments)
    shares = rows_of(cut, total, size)
    assert {row for share in shares for row in share} == set(range(total))
    assert {len(share) for share in shares} == {round(cut.share * total)}
