"""The roofline against numbers worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from holdfast.worker.models.roofline import (
    DEVICES,
    EXCHANGE_S,
    GRAPH_LAUNCH_S,
    HOST_S,
    SECOND_WAIT_S,
    ModelShape,
    kv_bytes_per_token,
    step_of,
    weight_bytes,
)

LLAMA_8B = ModelShape(
    num_layers=32, hidden=4096, inner=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256
)
H200 = DEVICES["h200"]


def test_weights_of_llama_8b():
    """8.03e9 parameters: 32 layers of 218,103,808, and two tables of 525,336,576; norms are left out."""
    assert weight_bytes(LLAMA_8B) == 2 * (32 * 218_103_808 + 2 * 525_336_576)


def test_a_decode_step_reads_weights_and_cache_once():
    """64 sequences of 1,024 tokens: 15.01 GB of weights, 64 * 1,024 * 128 KiB = 8.59 GB of keys and values."""
    step = step_of(LLAMA_8B, H200, num_sequences=64, num_tokens=1, context=1024)
    by_name = {kernel.name: kernel for kernel in step.kernels}
    assert by_name["attention"].num_bytes == 32 * (2 * 64 * 1024 * 8 * 128 * 2 + 2 * 64 * 4096 * 2)
    linears = sum(by_name[name].num_bytes for name in ("qkv", "output", "gate and up", "down", "head"))
    assert 15.01e9 < linears < 15.01e9 * 1.07, "and what goes in and out of linears, the parts of sums included"
    assert by_name["down"].flops == 32 * 2 * 64 * 14336 * 4096
    assert 4.92e-3 < step.kernel_s < 5.6e-3


def test_keys_and_values_in_fp8_take_a_byte_each_and_one_for_a_row():
    """128 KiB a token become 66,048 bytes: 32 layers of 16 rows of 129."""
    small = replace(LLAMA_8B, kv_in_fp8=True)
    assert (kv_bytes_per_token(LLAMA_8B), kv_bytes_per_token(small)) == (128 << 10, 32 * 16 * 129)
    assert kv_bytes_per_token(small, tp=4) == 32 * 4 * 129
    plain, less = (step_of(shape, H200, num_sequences=64, num_tokens=1, context=1024) for shape in (LLAMA_8B, small))
    names = {"attention": 64 * 1024, "heads": 64}  # tokens that are read, and written
    for one, other in zip(plain.kernels, less.kernels, strict=True):
        assert one.num_bytes - other.num_bytes == names.get(one.name, 0) * 32 * 16 * (256 - 129)
        assert one.flops == other.flops


def test_one_sequence_is_bound_by_its_weights():
    step = step_of(LLAMA_8B, H200, num_sequences=1, num_tokens=1, context=1024)
    assert step.kernel_s == pytest.approx(15.15e9 / 4.8e12, rel=0.01)
    launches = 32 * 9 + 5
    assert step.launch_s == pytest.approx(launches * GRAPH_LAUNCH_S)
    assert step.seconds == pytest.approx(step.kernel_s + step.launch_s + HOST_S)


def test_a_prompt_is_bound_by_arithmetic():
    """2,048 tokens through 6.98e9 parameters of layers: 28.6e12 operations, and attention's 1.1e12."""
    step = step_of(LLAMA_8B, H200, num_sequences=1, num_tokens=2048, context=2048)
    flops = sum(kernel.flops for kernel in step.kernels)
    assert flops == pytest.approx(2 * 2048 * 32 * 218_103_808 + 32 * 4 * 4096 * 2048 * 2049 / 2 + 2 * 525_336_576)
    assert 28.9e-3 < step.kernel_s < 40e-3


def test_ranks_share_the_work_and_exchange_sums():
    """Float32 sums of 4,096 for each of 8 tokens, twice a layer, of each of 3 others; the embedding's likewise, and
    what is told of the best of 32 blocks of logits.
    """
    alone, shared = (step_of(LLAMA_8B, H200, num_sequences=8, num_tokens=1, context=1024, tp=tp) for tp in (1, 4))
    assert shared.exchanged_bytes == (2 * 32 + 1) * 3 * 8 * 4096 * 4 + 3 * 8 * 32 * 16
    assert shared.in_graph
    assert alone.kernel_s / 4.2 < shared.kernel_s < alone.kernel_s / 3.7
    assert alone.exchange_s == 0


QWEN3_30B = ModelShape(
    num_layers=48,
    hidden=2048,
    inner=768,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    num_experts=128,
    experts_per_token=8,
)


def test_weights_of_a_mixture():
    """Qwen3-30B-A3B has 30.53e9 parameters; a shared expert adds 3 linears and a gate to each layer."""
    layer = 2048 * (2 * 32 + 2 * 4) * 128 + 128 * 3 * 2048 * 768 + 2048 * 128
    assert weight_bytes(QWEN3_30B) == 2 * (48 * layer + 2 * 2048 * 151936) == pytest.approx(2 * 30.53e9, rel=1e-3)
    more = replace(QWEN3_30B, shared_inner=5632)
    assert weight_bytes(more) - weight_bytes(QWEN3_30B) == 2 * 48 * 2048 * (3 * 5632 + 1)


def test_a_step_of_a_mixture_reads_the_experts_that_are_chosen():
    """One row: 8 of 128. 64 rows: 128 (1 - (120 / 128)^64) = 125.94. Operations: 8 experts for each row."""
    one, many = (step_of(QWEN3_30B, H200, num_sequences=count, num_tokens=1, context=1024) for count in (1, 64))
    downs = [next(kernel for kernel in step.kernels if kernel.name == "down") for step in (one, many)]
    assert downs[0].num_bytes == pytest.approx(48 * (8 * 768 * 2048 * 2 + 8 * 768 * 2 + 8 * 8 * 2048 * 4))
    assert QWEN3_30B.experts_read(64) == pytest.approx(125.94, abs=0.01)
    assert downs[1].flops == 48 * 2 * 64 * 8 * 768 * 2048
    assert sum(kernel.launches for kernel in one.kernels) == 48 * 13 + 5
    shared = step_of(replace(QWEN3_30B, shared_inner=5632), H200, num_sequences=1, num_tokens=1, context=1024)
    assert sum(kernel.launches for kernel in shared.kernels) == 48 * 16 + 5


def test_the_shape_of_a_mixture_is_read_from_its_config():
    config = SimpleNamespace(
        num_hidden_layers=2,
        hidden_size=8,
        intermediate_size=16,
        moe_intermediate_size=4,
        shared_expert_intermediate_size=12,
        num_attention_heads=2,
        vocab_size=10,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )
    shape = ModelShape.of(config)
    assert (shape.inner, shape.num_experts, shape.experts_per_token, shape.shared_inner) == (4, 6, 3, 12)
    del config.moe_intermediate_size, config.shared_expert_intermediate_size
    shape = ModelShape.of(config)
    assert (shape.inner, shape.shared_inner) == (16, 0)


def test_sums_that_do_not_depend_on_the_number_of_ranks_have_a_price():
    """32 tokens of 4,096 values, twice in each of 32 layers. Of 4 ranks each writes and reads one slice more than one,
    and receives 3 float32 sums; by a plain all-reduce, one and a half of bfloat16. Of 128 tokens it is one and a half
    of float32.
    """
    values = 2 * 32 * 32 * 4096
    alone, shared, longer = (
        step_of(LLAMA_8B, H200, num_sequences=32 * rows, num_tokens=1, context=1024, tp=tp).sums
        for tp, rows in ((1, 1), (4, 1), (4, 4))
    )
    assert (alone.slice_bytes, alone.link_bytes, alone.plain_seconds(H200)) == (2 * 7 * values * 4, 0, 0)
    assert alone.seconds(H200) == pytest.approx(2 * 7 * values * 4 / 4.8e12)
    assert (shared.slice_bytes, shared.link_bytes) == (2 * values * 4, 3 * values * 4)
    assert longer.link_bytes == 1.5 * (4 * values) * 4
    assert (longer.wait_s, shared.wait_s) == (64 * (EXCHANGE_S + SECOND_WAIT_S), 64 * EXCHANGE_S)
    assert shared.plain_link_bytes == 1.5 * values * 2
    assert shared.plain_seconds(H200) == pytest.approx(64 * EXCHANGE_S + 3 * values / 450e9)
    assert shared.seconds(H200) == pytest.approx(64 * EXCHANGE_S + 12 * values / 450e9 + 8 * values / 4.8e12)


def test_other_kinds_of_models_are_refused():
    with pytest.raises(ValueError, match="intermediate_size"):
        ModelShape.of(SimpleNamespace(num_hidden_layers=2, hidden_size=8))
    config = SimpleNamespace(
        num_hidden_layers=2,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        vocab_size=10,
        model_type="mixtral",
        num_local_experts=4,
    )
    config.mlp_only_layers = [1]
    with pytest.raises(ValueError, match="mixtral has layers of several kinds"):
        ModelShape.of(config)
    del config.num_local_experts
    assert ModelShape.of(config) == ModelShape(
        num_layers=2, hidden=8, inner=16, num_heads=2, num_kv_heads=2, head_dim=4, vocab_size=10
    )
    with pytest.raises(ValueError, match="tensor_parallel_size = 3"):
        step_of(ModelShape.of(config), H200, num_sequences=1, num_tokens=1, context=1, tp=3)


@pytest.mark.parametrize("device", DEVICES)
def test_codes_of_four_bits_at_one_row_take_little_more_than_their_bytes(device):
    """With half of a bit for scales, and the head in 8 bits; keys, values and what goes between kernels included."""
    small = replace(LLAMA_8B, weight_bits=4.5, head_bits=8.0)
    assert weight_bytes(small) == 32 * 218_103_808 * 4.5 / 8 + 525_336_576 * 3
    step = step_of(small, DEVICES[device], num_sequences=1, num_tokens=1, context=1024)
    by_codes = (32 * 218_103_808 * 4 / 8 + 525_336_576) / DEVICES[device].bytes_per_s
    assert by_codes < step.kernel_s < 1.3 * by_codes
