"""A proof accepts what is right in every dtype, on one rank and on two, and finds each planted mistake."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.worker.distributed.tensor_parallel import SingleRank
from holdfast.worker.executors.layout import Attention, DecoderLayout, Experts, Layer, Norm, QueryScale
from holdfast.worker.models.proof import Proof, prove
from holdfast.worker.models.recognize import recognize
from holdfast.worker.models.reference import Reference
from tests.worker.executors.models import MODELS, config_of, on_ranks, parallelized

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MAX_LEN = 32
"""The rotary angles of some models depend on the length beyond."""


def proof_of(module: Any, change: Callable[[DecoderLayout], DecoderLayout] = lambda layout: layout) -> Proof:
    """Of the reference as an executor, both with a changed layout."""
    layout = recognize(module, size=1)
    assert isinstance(layout, DecoderLayout), layout
    changed = change(layout)
    executor = Reference(changed, rounds=changed.dtype == BF16)
    return prove(module, changed, executor, SingleRank(), max_len=MAX_LEN)


OF_EACH_DTYPE = ("gemma3_text", "gpt_oss", "llama", "mixtral", "phi3", "qwen3", "starcoder2")
"""Proved in bfloat16 every time, and in float16 with the slow tests; all models in float32 every time."""
RIGHT = [
    pytest.param(model, dtype, marks=[] if dtype == F32 or is_usual else pytest.mark.slow)
    for model in MODELS
    for dtype, is_usual in ((F32, True), (BF16, model in OF_EACH_DTYPE), (F16, False))
]


@pytest.mark.parametrize(("model", "dtype"), RIGHT)
def test_a_right_executor_is_proved(model, dtype):
    proof = proof_of(parallelized(config_of(model), dtype=dtype))
    assert proof.reason is None
    assert max(proof.layer_error, proof.model_error) < 1.0


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("model", ["llama", "gemma3_text", "gpt_oss", "mixtral", "phi3", "starcoder2"])
def test_ranks_prove_their_shares_together(model, dtype):
    config = config_of(model)

    def run(group):
        module = parallelized(config, group, dtype)
        layout = recognize(module, group.size)
        return prove(module, layout, Reference(layout, group, rounds=dtype == BF16), group, max_len=MAX_LEN)

    proofs = on_ranks(2, run)
    assert [proof.reason for proof in proofs] == [None, None]


def test_a_proof_leaves_the_model_as_it_was():
    module = parallelized(config_of("gemma3_text"), dtype=BF16)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    types = {name: sorted(vars(part)) for name, part in module.named_modules()}
    proof_of(module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert {tensor.dtype for tensor in module.state_dict().values()} == {BF16}
    assert types == {name: sorted(vars(part)) for name, part in module.named_modules()}


# --- mistakes in a layout ---


def every_layer(change: Callable[[Layer], Layer]) -> Callable[[DecoderLayout], DecoderLayout]:
    return lambda layout: replace(layout, layers=tuple(change(layer) for layer in layout.layers))


def every_attention(change: Callable[[Attention], Attention]) -> Callable[[DecoderLayout], DecoderLayout]:
    return every_layer(lambda layer: replace(layer, attention=change(layer.attention)))


def every_mixture(**changes: Any) -> Callable[[DecoderLayout], DecoderLayout]:
    def changed(layer: Layer) -> Layer:
        return replace(layer, mlp=replace(layer.mlp, **changes)) if isinstance(layer.mlp, Experts) else layer

    return every_layer(changed)


def without_offset(norm: Norm) -> Norm:
    return replace(norm, weight=norm.weight - 1.0)


def narrower(attention: Attention) -> Attention:
    window = attention.sliding_window
    return replace(attention, sliding_window=None if window is None else window - 1)


def other_style(layout: DecoderLayout) -> DecoderLayout:
    rotaries = tuple(replace(rotary, interleaved=not rotary.interleaved) for rotary in layout.rotaries)
    return replace(layout, rotaries=rotaries)


def other_base(layout: DecoderLayout) -> DecoderLayout:
    rotaries = tuple(replace(r, inverse_frequencies=r.inverse_frequencies**1.001) for r in layout.rotaries)
    return replace(layout, rotaries=rotaries)


def one_layer_swapped(layout: DecoderLayout) -> DecoderLayout:
    return replace(layout, layers=(layout.layers[0], layout.layers[0], *layout.layers[2:]))


MISTAKES: dict[str, tuple[str, Callable[[DecoderLayout], DecoderLayout], str]] = {
    "norm offset": (
        "gemma",
        every_layer(lambda layer: replace(layer, mlp_norm=without_offset(layer.mlp_norm))),
        "layer 0 is not what its layout says",
    ),
    "offset of the last norm": ("gemma2", lambda layout: replace(layout, norm=without_offset(layout.norm)), "logits"),
    "epsilon": (
        "qwen3",
        every_layer(lambda layer: replace(layer, mlp_norm=replace(layer.mlp_norm, eps=1e-5))),
        "layer 0 is not what its layout says",
    ),
    "window off by one": ("mistral", every_attention(narrower), "sliding_window 4, not 3"),
    "window in the wrong layers": (
        "gemma3_text",
        every_attention(lambda attention: replace(attention, sliding_window=4)),
        "the attention of layer 1 has sliding_window None",
    ),
    "rotary style": ("llama", other_style, "layer 0 is not what its layout says"),
    "rotary style, partial": ("glm4", other_style, "layer 0 is not what its layout says"),
    "rotary base": ("llama", other_base, "the rotary angles of layer 0 differ"),
    "rotary where there is none": (
        "smollm3",
        every_attention(lambda attention: replace(attention, rotary=0)),
        "layer 1 is not what its layout says",
    ),
    "attention scale": (
        "granite",
        every_attention(lambda attention: replace(attention, scaling=attention.head_dim**-0.5)),
        "has scaling",
    ),
    "residual scale": (
        "granite",
        every_layer(lambda layer: replace(layer, residual_scale=1.0)),
        "layer 0 is not what its layout says",
    ),
    "embedding scale": ("granite", lambda layout: replace(layout, embedding_scale=1.0), "logits"),
    "logit scale": ("cohere2", lambda layout: replace(layout, logit_scale=1.0), "logits"),
    "logit softcap": ("gemma3_text, softcap", lambda layout: replace(layout, logit_softcap=None), "logits"),
    "attention softcap": (
        "gemma2",
        every_attention(lambda attention: replace(attention, softcap=None)),
        "has softcap 50.0, not None",
    ),
    "sinks": ("gpt_oss", every_attention(lambda attention: replace(attention, sinks=None)), "has sinks"),
    "weights of experts": (
        "qwen3_moe",
        every_layer(lambda layer: replace(layer, mlp=replace(layer.mlp, normalized=not layer.mlp.normalized))),
        "layer 0 is not what its layout says",
    ),
    "parallel": (
        "stablelm, parallel",
        every_layer(lambda layer: replace(layer, parallel=False)),
        "layer 0 is not what its layout says",
    ),
    "scale of a layer": (
        "gemma4_text, dense",
        every_layer(lambda layer: replace(layer, output_scale=1.0)),
        "layer 0 is not what its layout says",
    ),
    "norm of values": (
        "gemma4_text, dense",
        every_attention(lambda attention: replace(attention, value_norm=None)),
        "layer 0 is not what its layout says",
    ),
    "input of a router": (
        "gemma4_text",
        every_layer(lambda layer: replace(layer, beside=replace(layer.beside, router_norm=layer.beside.norm))),
        "layer 0 is not what its layout says",
    ),
    "norms of a mixture and an MLP exchanged": (
        "gemma4_text",
        every_layer(
            lambda layer: replace(
                layer,
                beside=replace(layer.beside, out_norm=layer.beside.mlp_out_norm, mlp_out_norm=layer.beside.out_norm),
            )
        ),
        "layer 0 is not what its layout says",
    ),
    "bias of choice": ("minimax_m2", every_mixture(selection_bias=None), "layer 0 is not what its layout says"),
    "groups of experts": ("glm4_moe, groups", every_mixture(num_groups=1), "layer 1 is not what its layout says"),
    "scale of experts": ("glm4_moe", every_mixture(scales=None), "layer 1 is not what its layout says"),
    "norms before rotation": (
        "hunyuan_v1_dense",
        every_attention(lambda attention: replace(attention, norms_after_rotation=False)),
        "layer 0 is not what its layout says",
    ),
    "query scale": (
        "ministral3",
        every_attention(lambda attention: replace(attention, query_scale=None)),
        "layer 0 is not what its layout says",
    ),
    "the weights of another layer": ("llama", one_layer_swapped, "logits"),
}
"""By name: a model, the mistake, and what is said of it."""


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_layout_or_of_the_executor_is_found(name, dtype):
    model, change, words = MISTAKES[name]
    module = parallelized(config_of(model), dtype=dtype)
    layout = recognize(module, size=1)
    executor = Reference(change(layout), rounds=dtype == BF16)
    found = prove(module, layout, executor, SingleRank(), max_len=MAX_LEN).reason
    # less than what rounding to the model's dtype does
    subtle = name in ("rotary base", "epsilon", "attention softcap") and dtype == BF16
    assert subtle or found is not None
    assert subtle or "wrong by" in found
    assert words in str(proof_of(module, change).reason)


def test_a_query_scale_that_begins_beyond_the_first_positions_is_proved_at_the_last():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3}
    module = parallelized(config_of("ministral3", rope_parameters={**rope, "original_max_position_embeddings": 20}))
    assert proof_of(module).reason is None
    for beta, length in ((0.31, 20), (0.3, 32)):
        other = QueryScale(beta=beta, length=length)
        reason = proof_of(module, every_attention(lambda attention, scale=other: replace(attention, query_scale=scale)))
        assert "at its last positions" in str(reason.reason), (beta, length)


def test_an_executor_that_gives_no_numbers_is_found():
    module = parallelized(config_of("llama"))
    layout = recognize(module, size=1)

    class Broken(Reference):
        def run_layer(self, index, x, positions=None):
            return super().run_layer(index, x, positions) * torch.nan

    assert prove(module, layout, Broken(layout), SingleRank(), max_len=MAX_LEN).reason is not None


def test_a_mistake_on_one_rank_is_found_on_all():
    config = config_of("llama")

    def run(group):
        module = parallelized(config, group)
        layout = recognize(module, group.size)
        if group.rank == 1:
            layout = every_attention(lambda attention: replace(attention, scaling=1.0))(layout)
        return prove(module, layout, Reference(layout, group), group, max_len=MAX_LEN).reason

    first, second = on_ranks(2, run)
    assert "on another rank" in first
    assert "has scaling" in second
