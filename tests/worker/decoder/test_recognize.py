"""The layout of each family, run by the reference executor, computes what Hugging Face computes."""

import pytest
import torch

from holdfast.worker.decoder.layout import DecoderLayout
from holdfast.worker.decoder.recognize import recognize
from holdfast.worker.decoder.reference import Reference
from tests.worker.decoder.models import TOKENS, config_of, expected_logits, on_ranks, parallelized

TOLERANCE = 1e-5
"""Of the largest logit."""

FAMILIES = ["llama", "llama, one KV head", "llama, tied", "llama, wide heads and biases", "qwen2", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_has_the_logits_of_hugging_face(family):
    config = config_of(family)
    layout = recognize(parallelized(config), size=1)
    assert isinstance(layout, DecoderLayout), layout
    expected = expected_logits(config)
    with torch.inference_mode():
        ours = Reference(layout).run_model(TOKENS)
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_of_a_layout_have_the_logits_of_hugging_face(family, size):
    config = config_of(family)
    expected = expected_logits(config)

    def run(group):
        layout = recognize(parallelized(config, group), size)
        assert isinstance(layout, DecoderLayout), layout
        return Reference(layout, group).run_model(TOKENS)

    for ours in on_ranks(size, run):
        assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()
