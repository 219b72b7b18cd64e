"""A check at load accepts a right executor in every dtype, on one rank and on two, and finds each planted mistake."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from holdfast.worker.executors.layout import Attention, DecoderLayout, Layer
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.proof import Proof, ask_reference, check
from holdfast.worker.models.reference import Reference
from tests.worker.executors.models import config_of, layout_of, on_ranks

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MAX_LEN = 32


def proof_of(layout: DecoderLayout, executor: Reference, group=None) -> Proof:
    group = group or SingleRank()
    with torch.inference_mode():
        return check(executor, ask_reference(layout, group, max_len=MAX_LEN), group)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("model", ["gemma3_text", "gpt_oss", "llama", "mixtral", "phi3", "qwen3", "starcoder2"])
def test_a_right_executor_is_accepted(model, dtype):
    layout = layout_of(config_of(model), dtype=dtype)
    proof = proof_of(layout, Reference(layout, rounds=True))
    assert proof.reason is None
    assert max(proof.layer_error, proof.model_error) < 1.0


def every_layer(change: Callable[[Layer], Layer]) -> Callable[[DecoderLayout], DecoderLayout]:
    return lambda layout: replace(layout, layers=tuple(map(change, layout.layers)))


def every_attention(change: Callable[[Attention], Attention]) -> Callable[[DecoderLayout], DecoderLayout]:
    return every_layer(lambda layer: replace(layer, attention=change(layer.attention)))


MISTAKES: dict[str, tuple[str, Callable[[DecoderLayout], DecoderLayout]]] = {
    "window off by one": (
        "mistral",
        every_attention(lambda one: replace(one, sliding_window=one.sliding_window - 1)),
    ),
    "residual scale": ("granite", every_layer(lambda layer: replace(layer, residual_scale=1.0))),
    "sinks": ("gpt_oss", every_attention(lambda one: replace(one, sinks=None))),
    "logit softcap": ("gemma3_text, softcap", lambda layout: replace(layout, logit_softcap=None)),
    "the weights of another layer": ("llama", lambda layout: replace(layout, layers=(layout.layers[0],) * 2)),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_executor_is_found(name, dtype):
    model, change = MISTAKES[name]
    layout = layout_of(config_of(model), dtype=dtype)
    assert "wrong by" in str(proof_of(layout, Reference(change(layout), rounds=True)).reason)


def test_an_executor_that_gives_no_numbers_is_found():
    class Broken(Reference):
        def run_layer(self, index, x, positions=None):
            return super().run_layer(index, x, positions) * torch.nan

    layout = layout_of(config_of("llama"))
    assert proof_of(layout, Broken(layout)).reason is not None


def test_a_mistake_on_one_rank_is_found_on_all():
    config = config_of("llama")

    def run(group):
        layout = layout_of(config, group)
        is_wrong = group.rank == 1
        change = every_attention(lambda one: replace(one, scaling=1.0 if is_wrong else one.scaling))
        return proof_of(layout, Reference(change(layout), group), group).reason

    assert all("layer 0 is wrong" in str(reason) for reason in on_ranks(2, run))
