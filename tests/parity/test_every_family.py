"""Every causal language model of the installed transformers, as a tiny random model: served as Hugging Face computes
it, or refused by its name, for a reason that says what Holdfast lacks.
"""

import re
from pathlib import Path

import pytest

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.models.checks import check_config
from tests.parity.harness import (
    hugging_face,
    load,
    logits_in_chunks,
    reference_logits,
    relative_difference,
    worker_config,
)
from tests.parity.tiny_families import causal_families, default_config, tiny_model

TOLERANCE = 1e-5
NUM_PARTS = 8

INNER_WORDS = re.compile(r"object has no attribute|object is not|view size|unexpected keyword|0 modules|\bself\b")
"""Words of Python and of torch, which tell a user nothing of the model."""

NOT_MADE = {
    "blt": "its config takes no small sizes of its parts",
    "cohere_compass_text": "transformers cannot run it by its defaults",
    "cpmant": "its config takes no small sizes",
    "dbrx": "transformers cannot run it by its defaults",
    "gemma4_assistant": "its default config is refused by transformers",
    "git": "its vision model takes no small sizes",
    "phi4_multimodal": "its vision and audio models take no small sizes",
    "roc_bert": "its pronunciation table takes no small size",
    "xlnet": "its config takes no limit of positions",
    "xlstm": "its heads take no small sizes",
    "xmod": "it wants a language to be set",
}
"""Families of which no tiny model is made here, and whose config alone is no reason to refuse them."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_family_is_served_exactly_or_refused_by_name(part, prompts, tmp_path):
    verdicts = {
        family: verdict(family, prompts, tmp_path / family)
        for family in causal_families()[part::NUM_PARTS]
        if family not in NOT_MADE
    }
    wrong = {family: words for family, words in verdicts.items() if words not in ("served", "refused")}
    assert not wrong
    assert "served" in verdicts.values()
    assert "refused" in verdicts.values()


def verdict(family: str, prompts: list[list[int]], folder: Path) -> str:
    """`served`, `refused`, or what is wrong."""
    try:
        model = tiny_model(family)
        if model is None:
            check_config(default_config(family))
            return "no tiny model can be made, and its config is not refused"
        model.save_pretrained(folder)
        leader = load(worker_config(folder))
        ours = logits_in_chunks(leader, prompts, chunk=7)
        difference = relative_difference(ours, reference_logits(hugging_face(folder), prompts))
        return "served" if difference <= TOLERANCE else f"its logits differ by {difference:.1e}"
    except UnsupportedModelError as refusal:
        return f"inner words: {refusal.reason}" if INNER_WORDS.search(refusal.reason) else "refused"
    except Exception as error:  # that is what is looked for
        return f"{type(error).__name__}: {error}"
