"""GGUF models are what they are dequantized: the same layouts in every field and bit."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest
import torch

from holdfast.worker.executors.finite import NotFiniteError
from holdfast.worker.models.damaged_weights import damaged
from holdfast.worker.models.formats.gguf_architecture import Architecture
from holdfast.worker.models.formats.gguf_architectures import ARCHITECTURES
from holdfast.worker.models.formats.gguf_block_names import BLOCKS
from holdfast.worker.models.formats.gguf_folder import hf_folder
from holdfast.worker.models.formats.gguf_tensors import dequantized
from tests.worker.models.formats.gguf_files import Written, kind_of, write_model
from tests.worker.models.layouts import differences_of


def made(written: Written) -> Path:
    return hf_folder(written.file, "model")


def differences_on(written: Written, size: int, dtype: str = "auto") -> list[str]:
    """Between what is read of the file and of the folder of its numbers."""
    return differences_of(made(written), written.folder, size, dtype)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_in_another_dtype_numbers_are_rounded_once(tmp_path, family):
    written = write_model(family, tmp_path, "Q4_1", dtype=torch.float32)
    assert differences_on(written, 1, "float32") == []


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
        ("granite", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("cohere", {"use_qk_norm": False}),
        ("ernie4_5_moe", {"moe_layer_start_index": 0}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
        ("gpt_oss", {"num_local_experts": 3}),
        ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
        ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True}),
        ("nemotron", {"head_dim": 32}),
        ("seed_oss", {"attention_out_bias": True}),
        ("stablelm", {"qk_layernorm": False, "use_parallel_residual": True}),
        ("starcoder2", {"use_bias": False}),
    ],
)
def test_turns_of_families(tmp_path, family, changes):
    assert differences_on(write_model(family, tmp_path, "Q4_0", **changes), 2) == []


@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_text_models_of_models_that_see(tmp_path, family, architecture):
    fields = {f"{architecture}.rope.dimension_sections": [2, 3, 3, 0]}
    written = write_model(family, tmp_path, "Q4_0", architecture=architecture, fields=fields)
    assert differences_on(written, 2) == []


def test_mistral_small_3_is_mistral(tmp_path):
    written = write_model("mistral", tmp_path, "Q4_0", architecture="mistral3")
    assert differences_on(written, 2) == []


def test_queries_keys_and_values_as_one_tensor(tmp_path):
    """As the first files of Phi-2 have them."""
    written = write_model("phi", tmp_path, "Q4_0", fused=True, num_key_value_heads=2)
    assert "blk.0.attn_qkv.weight" in {tensor.name for tensor in gguf.GGUFReader(written.file).tensors}
    assert differences_on(written, 2) == []


def test_windows_that_a_file_does_not_list_are_the_family_s(tmp_path):
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    changes = {"num_hidden_layers": 4, "layer_types": layers}
    written = write_model(
        "cohere2", tmp_path, "Q4_0", fields={"cohere2.attention.sliding_window_pattern": 4}, **changes
    )
    assert differences_on(written, 1) == []


def test_a_split_file_is_one_model(tmp_path):
    written = write_model("llama", tmp_path, "Q4_1", parts=5)
    assert not written.file.exists()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    for part in (parts[0], parts[-1], tmp_path):
        written.file = part
        assert differences_on(written, 1) == []


def test_a_folder_with_one_file_is_that_model(tmp_path):
    written = write_model("qwen3", tmp_path, "Q8_0")
    (tmp_path / "mmproj-model.gguf").touch()
    assert hf_folder(tmp_path, "model") == hf_folder(written.file, "model")


def test_factors_of_rotary_frequencies_are_llama_3s(tmp_path):
    """As llama.cpp's converter computes them for Llama 3.1."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    changes = {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    written = write_model("llama", tmp_path, "F32", rope_parameters=rope, factors=True, **changes)
    assert differences_on(written, 1) == []


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_the_package_says(kind):
    """All codes, and scales that are any float16."""
    values, num_bytes = BLOCKS[kind]
    assert gguf.GGML_QUANT_SIZES[kind_of(kind)] == (values, num_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, (256, num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(blocks, kind_of(kind)))
    found = dequantized(kind, torch.from_numpy(blocks))
    assert (found.view(torch.int32).eq(expected.view(torch.int32)) | (found.isnan() & expected.isnan())).all()


def test_blocks_by_hand():
    """Written out from ggml's description, for what the package and the code above might have in common."""
    half = np.array([0.5, -2.0], dtype=np.float16).view(np.uint8)
    nibbles = np.arange(16, dtype=np.uint8) | (np.arange(16, dtype=np.uint8)[::-1] << 4)
    block = torch.from_numpy(np.concatenate([half, nibbles]))[None]
    low, high = torch.arange(16.0), torch.arange(15.0, -1.0, -1.0)
    assert dequantized("Q4_1", block)[0].equal(torch.cat([low, high]) * 0.5 - 2.0)
    assert dequantized("Q4_0", block[:, [0, 1, *range(4, 20)]])[0].equal((torch.cat([low, high]) - 8) * 0.5)
    signed = torch.cat([block[:, :2], torch.arange(-16, 16, dtype=torch.int8).view(torch.uint8)[None]], 1)
    assert dequantized("Q8_0", signed)[0].equal(torch.arange(-16.0, 16.0) * 0.5)


class TestMistakes:
    """What a wrong reader, or a wrong file, would change is seen."""

    def test_rows_of_queries_and_keys_left_as_they_lie(self, tmp_path):
        found = differences_on(write_model("llama", tmp_path, "Q8_0", unpermuted=True), 1)
        assert {path.partition(".attention.")[2] for path in found} == {"qkv.weights[0]", "qkv.weights[1]"}

    def test_halves_of_bytes_in_the_other_order(self, tmp_path):
        def swapped(name: str, stored: np.ndarray) -> np.ndarray:
            if not name.endswith("blk.0.ffn_up.weight"):
                return stored
            blocks = stored.reshape(-1, 18).copy()
            blocks[:, 2:] = (blocks[:, 2:] << 4) | (blocks[:, 2:] >> 4)
            return blocks.reshape(stored.shape)

        found = differences_on(write_model("llama", tmp_path, "Q4_0", change=swapped), 1)
        assert found == ["layout.layers[0].mlp.up.weights[1]"]

    def test_the_scale_of_the_block_beside(self, tmp_path):
        def moved(name: str, stored: np.ndarray) -> np.ndarray:
            if name != "blk.1.ffn_down.weight":
                return stored
            blocks = stored.reshape(-1, 34).copy()
            blocks[:, :2] = np.roll(blocks[:, :2], 1, axis=0)
            return blocks.reshape(stored.shape)

        found = differences_on(write_model("qwen2", tmp_path, "Q8_0", change=moved), 1)
        assert found == ["layout.layers[1].mlp.down.weights[0]"]

    def test_experts_in_another_order(self, tmp_path):
        def turned(name: str, stored: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(np.roll(stored, 1, 0)) if name == "blk.1.ffn_up_exps.weight" else stored

        written = write_model("qwen3_moe", tmp_path, "Q8_0", change=turned)
        found = differences_on(written, 1)
        count = 4
        assert found == [f"layout.layers[1].mlp.experts[{one}].up.weights[1]" for one in range(count)]

    def test_gates_taken_for_ups(self, tmp_path, monkeypatch):
        """In gpt-oss's file they lie apart, in its folder by turns."""
        written, right = write_model("gpt_oss", tmp_path, "MXFP4"), ARCHITECTURES["gpt-oss"]
        gate, up = "ffn_gate_exps.weight", "ffn_up_exps.weight"
        layer = right.parts[0]
        wrong = replace(right, parts=({**layer, gate: layer[up], up: layer[gate]},))
        monkeypatch.setitem(cast(dict[str, Architecture], ARCHITECTURES), "gpt-oss", wrong)
        found = differences_on(written, 1)
        assert {path.partition(".mlp.")[0] for path in found} == {"layout.layers[0]", "layout.layers[1]"}
        assert all(".up." in path for path in found)

    def test_halves_of_bytes_of_mxfp4_in_the_other_order(self, tmp_path):
        def swapped(name: str, stored: np.ndarray) -> np.ndarray:
            if name != "blk.0.ffn_down_exps.weight":
                return stored
            blocks = stored.reshape(-1, 17).copy()
            blocks[:, 1:] = (blocks[:, 1:] << 4) | (blocks[:, 1:] >> 4)
            return blocks.reshape(stored.shape)

        found = differences_on(write_model("gpt_oss", tmp_path, "MXFP4", change=swapped), 1)
        assert found == [f"layout.layers[0].mlp.experts[{one}].down.weights[0]" for one in range(4)]

    def test_queries_keys_and_values_left_by_kind(self, tmp_path, monkeypatch):
        """GPT-NeoX has those of the first head, then of the next."""
        wrong = replace(ARCHITECTURES["gptneox"], changes={})
        monkeypatch.setitem(cast(dict[str, Architecture], ARCHITECTURES), "gptneox", wrong)
        found = differences_on(write_model("gpt_neox", tmp_path, "Q8_0"), 1)
        assert found
        assert all(".attention.qkv." in path for path in found)

    def test_norms_without_their_one(self, tmp_path):
        def less(name: str, stored: np.ndarray) -> np.ndarray:
            return (stored.view(np.float32) - 1).view(np.uint8) if name == "output_norm.weight" else stored

        assert differences_on(write_model("gemma", tmp_path, "Q8_0", change=less), 1) == ["layout.norm.weight"]


@pytest.mark.parametrize(("kind", "scale"), [("Q8_0", b"\xff\x7f"), ("F32", b"\x00\x00\x80\x7f")])
def test_a_number_that_is_none_is_named_with_its_tensor_and_place(tmp_path, kind, scale):
    """The scale of the sixth block of 32, or the number at its place."""
    written = write_model("llama", tmp_path, kind)
    reader = gguf.GGUFReader(written.file)
    tensor = next(one for one in reader.tensors if one.name == "blk.1.ffn_up.weight")
    content, row_bytes = bytearray(written.file.read_bytes()), tensor.n_bytes // 96
    place = tensor.data_offset + 5 * row_bytes
    content[place : place + len(scale)] = scale
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    error = damaged(hf_folder(path, "model"), NotFiniteError("found"))
    assert "model.layers.1.mlp.up_proj.weight has numbers that are NaN or infinite, at [5, 0] in " in str(error)


def test_files_without_such_a_number_may_overflow(tmp_path):
    error = damaged(made(write_model("llama", tmp_path, "Q8_0")), NotFiniteError("a weight of shape [3]"))
    assert "it overflows, or its files are damaged: a weight of shape [3]" in str(error)
