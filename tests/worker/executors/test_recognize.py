"""The layout of each family, run by the reference executor, computes what Hugging Face computes."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch

from holdfast.worker.executors.layout import DecoderLayout, Linear
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.recognize import Unrecognized, recognize
from holdfast.worker.models.reference import Reference
from holdfast.worker.models.weights import ATTENTION
from tests.parity.families import NOT_SPLIT, SERVED
from tests.worker.executors.models import (
    MODELS,
    TOKENS,
    config_of,
    expected_logits,
    hugging_face,
    on_ranks,
    parallelized,
    share_of,
)

TOLERANCE = 1e-5
"""Of the largest logit."""


def test_every_family_of_the_table_is_tried():
    assert FAMILIES.keys() <= {config_of(name).model_type for name in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_a_layout_has_the_logits_of_hugging_face(model):
    config = config_of(model)
    layout = recognize(parallelized(config), size=1)
    assert isinstance(layout, DecoderLayout), layout
    expected = expected_logits(config)
    with torch.inference_mode():
        ours = Reference(layout).run_model(TOKENS)
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_shares_of_a_layout_have_the_logits_of_hugging_face(model, size):
    config = config_of(model)
    expected = expected_logits(config)

    def run(group):
        layout = recognize(parallelized(config, group), size)
        return layout if isinstance(layout, Unrecognized) else Reference(layout, group).run_model(TOKENS)

    for ours in on_ranks(size, run):
        if model in NOT_SPLIT:
            assert NOT_SPLIT[model] in ours.reason
        else:
            assert isinstance(ours, torch.Tensor), ours
            assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


VIEWED = [("llama", 1), ("llama", 2), ("starcoder2", 2), ("gpt_neox", 2), ("phi3", 1), ("mixtral", 1), ("gpt_oss", 1)]


@pytest.mark.parametrize(("model", "size"), VIEWED)
def test_weights_are_views_of_what_was_loaded(model, size):
    config = config_of(model)

    def run(group):
        loaded = hugging_face(config, ATTENTION, torch.bfloat16)
        memory = {parameter.untyped_storage().data_ptr() for parameter in loaded.parameters()}
        layout = recognize(share_of(loaded, group), size)
        weights = [layout.embedding, *(weight for linear in linears(layout) for weight in linear.weights)]
        return len(weights), {weight.untyped_storage().data_ptr() for weight in weights} - memory

    for num_weights, copies in on_ranks(size, run):
        assert num_weights > 8
        assert not copies


def linears(part: object) -> Iterator[Linear]:
    """All linears of a layout."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, tuple):
        yield from (linear for item in part for linear in linears(item))
    elif is_dataclass(part):
        yield from (linear for field in fields(part) for linear in linears(getattr(part, field.name)))


@pytest.mark.parametrize("family", sorted(SERVED.keys() - FAMILIES.keys()))
def test_other_families_are_not_recognized(family):
    found = recognize(parallelized(config_of(family)), size=1)
    assert isinstance(found, Unrecognized)
    assert found.reason


def test_what_a_layout_cannot_say_is_not_recognized():
    found = recognize(parallelized(config_of("qwen2", hidden_act="quick_gelu")), size=1)
    assert isinstance(found, Unrecognized)
    assert "its activation is" in found.reason
    module = parallelized(config_of("qwen2"))
    module.base_model.rotary_emb.rope_type = "spiral"
    found = recognize(module, size=1)
    assert isinstance(found, Unrecognized)
    assert "its rotary angles are of kind spiral" in found.reason
    found = recognize(parallelized(config_of("olmo", clip_qkv=2.0)), size=1)
    assert isinstance(found, Unrecognized)
    assert found.reason
