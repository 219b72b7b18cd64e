"""GGUF files of models whose layers differ, or keep states or latents, are the folders that they come from."""

import re

import pytest
import torch

from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.formats.gguf_folder import hf_folder
from tests.parity.harness import (
    hugging_face,
    is_run_by,
    load,
    logits_in_chunks,
    reference_logits,
    relative_difference,
    worker_config,
)
from tests.worker.models.formats.gguf_files import Written
from tests.worker.models.formats.gguf_hybrid_files import CONVERTED, in_blocks, write_hybrid
from tests.worker.models.layouts import differences_of

PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 40)]
TOLERANCE = 2e-5
"""Of the largest logit."""

FALCONS = {"falcon", "falcon, norms"}
"""What multiplies their parts, the converter has multiplied their weights by."""


GEMMAS = ("gemma4, shared keys", "gemma4, a mixture")
EXACT_ROOTS = {"hidden_size": 64, "hidden_size_per_layer_input": 64}
"""Embeddings are scaled by their roots, which a file's dtype rounds."""


def logits(leader: LeaderRunner) -> list[torch.Tensor]:
    assert is_run_by(leader, "native")
    return logits_in_chunks(leader, PROMPTS, chunk=16)


def differing(written: Written, size: int = 1) -> set[str]:
    """Parts of layers that are not those of the folder, bit by bit."""
    found = differences_of(hf_folder(written.file, "model"), written.folder, size)
    return {re.sub(r"\[\d+\]", "", path.removeprefix("layout.")) for path in found}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", sorted(CONVERTED.keys() - FALCONS))
def test_each_is_the_folder_that_it_comes_from(name, size, tmp_path):
    """But for the last bits of A_log, of which files have the exponential."""
    written = write_hybrid(name, tmp_path)
    assert differing(written, size) <= {"layers.state.a_log"}


@pytest.mark.parametrize("name", ["falcon, norms", "qwen3.5", "nemotron", "glm-4.7-flash", *GEMMAS])
def test_a_file_has_the_logits_of_hugging_face(name, tmp_path):
    written = write_hybrid(name, tmp_path)
    ours = logits(load(worker_config(written.file)))
    assert relative_difference(ours, reference_logits(hugging_face(written.folder), PROMPTS)) <= TOLERANCE


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5, a mixture", "granite, dense", "deepseek v3", *GEMMAS])
def test_a_file_in_blocks_is_what_it_is_dequantized(name, tmp_path):
    (tmp_path / "numbers").mkdir()
    (tmp_path / "blocks").mkdir()
    changes = EXACT_ROOTS if name == "gemma4, shared keys" else {"hidden_size": 64}
    numbers = write_hybrid(name, tmp_path / "numbers", change=in_blocks, **changes)
    blocks = write_hybrid(name, tmp_path / "blocks", "Q8_0", **changes)
    ours, theirs = (logits(load(worker_config(one.file, dtype="float32"))) for one in (blocks, numbers))
    assert all(map(torch.equal, ours, theirs))


class TestMistakes:
    """A converter's changes that are not undone show, each by its part of a layer."""

    def differing(self, name, part, change, where):
        return differing(write_hybrid(name, where, change=lambda own, one: change(one) if part in own else one))

    def test_value_heads_in_another_order(self, tmp_path):
        def turned(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor[: 2 * 4 * 32], tensor[2 * 4 * 32 :].roll(16, 0)])

        found = self.differing("qwen3.5", "attn_qkv", turned, tmp_path)
        assert found == {"layers.state.inputs.weights", "layers.state.a_log"}

    def test_columns_of_value_heads_in_another_order(self, tmp_path):
        found = self.differing("qwen3.5", "ssm_out", lambda one: one.roll(16, 1), tmp_path)
        assert found == {"layers.state.output.weights", "layers.state.a_log"}

    @pytest.mark.parametrize(
        ("part", "change", "shown"),
        [
            ("layer_output_scale", lambda one: one * 2, "layers.output_scale"),
            ("ffn_gate_up_exps", lambda one: one.roll(16, 1), "layers.beside.experts.experts.up.weights"),
            ("ffn_down_exps.scale", lambda one: one.flip(0), "layers.beside.experts.scales"),
        ],
    )
    def test_mistakes_in_a_mixture_of_gemma(self, part, change, shown, tmp_path):
        assert self.differing("gemma4, a mixture", part, change, tmp_path) == {shown}

    def test_a_changed_gate_shows(self, tmp_path):
        swapped = {"ffn_gate.": -1.0}
        found = self.differing("granite, dense", "ffn_gate.", lambda one: one * swapped["ffn_gate."], tmp_path)
        assert found == {"layers.mlp.up.weights", "layers.state.a_log"}

    def test_weights_of_keys_that_are_not_turned(self, tmp_path):
        found = self.differing("deepseek v3", "attn_k_b", lambda one: one.flip(1), tmp_path)
        assert found == {"layers.attention.absorb.weights"}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("granite, dense", {"granitehybrid.rope.scaling.finetuned": True}, "Bamba"),
        ("deepseek v3", {"deepseek2.attention.key_length": 16}, "absorbed form; convert it again"),
        ("deepseek v3", {"deepseek2.expert_gating_func": 3}, "has expert_gating_func 3"),
        ("qwen3.5", {"qwen35.ssm.group_count": 3}, "3 key heads and 8 value heads"),
        ("lfm2", {"lfm2.shortconv.l_cache": 0}, "shortconv.l_cache = 0"),
        ("mamba2", {"mamba2.ssm.time_step_rank": 7}, "in 7 heads of Mamba2"),
        ("gemma4, shared keys", {"gemma4.attention.sliding_window_pattern": [True] * 6}, "the last false"),
        ("gemma4, shared keys", {"gemma4.feed_forward_length": [48, 96, 48, 48, 48, 48]}, "which no Gemma 4 has"),
        ("gemma4, shared keys", {"gemma4.attention.key_length": 32}, "rotary factors"),
        ("gemma4, a mixture", {"gemma4.attention.head_count_kv": [2, 1, 3]}, "one number a kind"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(name, fields, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        hf_folder(write_hybrid(name, tmp_path, fields=fields).file, "model")
