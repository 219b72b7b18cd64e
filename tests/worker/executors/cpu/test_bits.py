"""The bits of a row are the same in every class, chunk, block size and number of threads."""

from dataclasses import replace

import pytest
import torch

from tests.worker.executors.cpu.native import BF16, F16, F32, library_or_skip, other_classes, same_bits
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens

HEADS = {f"llama, heads of {size}": ("llama", (("head_dim", size),)) for size in (16, 64, 80, 96, 128, 256)}
CASES = {
    **HEADS,
    "windows, softcap": ("gemma2", (("sliding_window", 70),)),
    "sinks, clamped experts": ("gpt_oss", ()),
    "experts": ("mixtral", ()),
    "a mixture beside an MLP, norms of values": ("gemma4_text", (("sliding_window", 70),)),
    "inputs of layers' own, shared keys and values": ("gemma4_text, shared keys", (("sliding_window", 70),)),
    "groups of experts, a bias of choice": ("glm4_moe, groups", ()),
    "norms after rotation, a shared expert": ("hunyuan_v1_moe", ()),
    "queries that grow": ("ministral3", ()),
    "no positions in some layers": ("smollm3", ()),
    "some dimensions turn, pairs are neighbours": ("glm4", ()),
    "parallel, layer norms": ("stablelm, parallel", ()),
    "biases, no gate": ("starcoder2", ()),
    "a norm over all heads": ("olmo2", ()),
    "norms of each head": ("cohere, norms of each head", ()),
    "latents": ("glm4_moe_lite", ()),
    "latents of odd sizes, yarn": ("deepseek_v3, groups and yarn", ()),
    "latents of 512, whole queries": (
        "deepseek_v2, groups",
        (("kv_lora_rank", 512), ("qk_rope_head_dim", 64), ("q_lora_rank", None), ("v_head_dim", 96)),
    ),
    "one KV head": ("llama, one KV head", ()),
}
IDS = tokens(150)


def run(layout, chunks=(), **settings):
    runner = Runner(layout, **settings)
    logits = runner.run(IDS, chunks)
    runner.close()
    return logits


def expected(case, dtype):
    model, changes = CASES[case]
    layout = layout_of(model, dtype, changes)
    return layout, run(layout, name="avx2")


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_blocks_and_threads(case):
    layout, one_piece = expected(case, BF16)
    assert one_piece.isfinite().all()
    for chunks, block_size, threads in (
        ((1,), 32, 1),
        ((3,), 16, 2),
        ((7, 1), 64, 1),
        ((64, 2), 48, 3),
        ((33,), 16, 1),
    ):
        logits = run(layout, chunks, block_size=block_size, threads=threads)
        assert same_bits(logits, one_piece), (chunks, block_size, threads)


@pytest.mark.parametrize("case", CASES)
def test_instruction_classes(case):
    layout, one_piece = expected(case, BF16)
    for name in other_classes():
        assert same_bits(run(layout, name=name), one_piece), name
        assert same_bits(run(layout, (5, 1, 40), name=name, block_size=16), one_piece), name


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize(
    "case", ["llama, heads of 80", "windows, softcap", "sinks, clamped experts", "biases, no gate", "latents"]
)
def test_the_plain_dtypes(case, dtype):
    layout, one_piece = expected(case, dtype)
    for name in other_classes(dtype):
        library_or_skip(name)
        for chunks, block_size, threads in (((1, 20), 16, 1), ((3, 64), 48, 2)):
            logits = run(layout, chunks, name=name, block_size=block_size, threads=threads)
            assert same_bits(logits, one_piece), (name, chunks, block_size)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_a_token_is_chosen_without_logits(dtype):
    """The head's own choice is the first of the largest logits."""
    layout, logits = expected("sinks, clamped experts", dtype)
    runner = Runner(layout)
    blocks = runner.blocks(len(IDS))
    chosen = runner.chosen(IDS, blocks)
    runner.close()
    assert chosen == logits.argmax(1).tolist()


def test_equal_logits_give_the_first():
    layout, _ = expected("one KV head", F32)
    twice = torch.cat([layout.head.weights[0][:60], layout.head.weights[0][:60], layout.head.weights[0][:6]])
    runner = Runner(replace(layout, head=replace(layout.head, weights=(twice,))))
    chosen = runner.chosen(IDS, runner.blocks(len(IDS)))
    runner.close()
    assert max(chosen) < 60
