"""Quantized models are what they are dequantized: the same layouts in every field and bit."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.models.formats import codes, importers
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight
from tests.parity.harness import greedy_tokens, is_run_by, logits_in_chunks, on_ranks, worker_config
from tests.worker.models.formats.comparison import differences_on
from tests.worker.models.formats.quantized_folders import LAYOUTS, Tensors, Written, write, write_gpt_oss


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_its_dequantized_folder(tmp_path, layout):
    written = write("llama", tmp_path, layout)
    assert [differences_on(written, size) for size in (1, 2)] == [[], []]


@pytest.mark.parametrize("layout", ["gptq act-order", "awq", "ct w4a16 asym", "fp8 block"])
def test_linears_with_biases_and_tied_tables(tmp_path, layout):
    assert differences_on(write("qwen2", tmp_path, layout), 2) == []


@pytest.mark.parametrize(
    ("family", "layout"),
    [("mixtral", "gptq act-order"), ("mixtral", "awq"), ("qwen3_moe", "ct w4a16 asym"), ("qwen3_moe", "fp8 block")],
)
def test_experts(tmp_path, family, layout):
    of_experts = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    written = write(family, tmp_path, layout, **{of_experts: 64})
    assert [differences_on(written, size) for size in (1, 2)] == [[], []]


def test_experts_in_mxfp4(tmp_path):
    """On three ranks an inner size whose blocks are cut."""
    written = write_gpt_oss(tmp_path / "even")
    assert [differences_on(written, size) for size in (1, 2, 4)] == [[], [], []]
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    written = write_gpt_oss(tmp_path / "of three", **heads, intermediate_size=96)
    assert differences_on(written, 3) == []


def answers(
    folder: Path, size: int, executor: str = "auto", activations: str = "bfloat16"
) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens of prompts that decode together, and the logits of each prompt in one chunk and in small ones."""
    prompts = [[5, 9, 77, 31, 8, 64, 3], [100, 4, 4, 90]]

    def work(leader: LeaderRunner) -> tuple[list[list[int]], list[Tensor]]:
        assert is_run_by(leader, "hf" if executor == "hf" else "native")
        logits = [rows for chunk in (3, 8) for rows in logits_in_chunks(leader, prompts, chunk)]
        return greedy_tokens(leader, prompts, 8), logits

    return on_ranks(worker_config(folder, size, executor=executor, quantized_activations=activations), work)


@pytest.mark.parametrize(
    ("family", "layout", "size", "executor"),
    [
        ("llama", "gptq act-order", 2, "auto"),
        ("qwen2", "awq", 2, "auto"),
        ("qwen3_moe", "ct w4a16 asym", 2, "auto"),
        ("deepseek_v3", "fp8 block", 1, "hf"),
        ("deepseek_v3", "fp8 block", 2, "auto"),
    ],
)
def test_a_model_answers_with_the_bits_of_its_dequantized_folder(tmp_path, family, layout, size, executor):
    more = {"head_dim": 8, "num_hidden_layers": 2} if family == "deepseek_v3" else {}  # dense, and with experts
    written = write(family, tmp_path, layout, moe_intermediate_size=64, **more)
    expected, theirs = answers(written.dequantized, 1 if executor == "auto" else size, executor)
    found, ours = answers(written.folder, size, executor)
    assert found == expected
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("family", "layout"), [("llama", "fp8 block"), ("qwen3_moe", "ct fp8")])
def test_floating_point_codes_become_numbers_while_they_are_packed(tmp_path, family, layout):
    written = write(family, tmp_path, layout, moe_intermediate_size=96)
    for size in (1, 2):
        expected, theirs = answers(written.dequantized, size)
        found, ours = answers(written.folder, size, activations="auto")
        assert found == expected
        assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("ct") and "act-order" not in name])
def test_the_package_of_compressed_tensors_reads_the_same(tmp_path, layout):
    package = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    written = write("llama", tmp_path, layout)
    config = json.loads((written.folder / "config.json").read_text())["quantization_config"]
    scheme = schemes.QuantizationScheme(**config["config_groups"]["group_0"])
    name = "model.layers.0.mlp.down_proj"
    tensors = tensors_of(written, name)
    found = package.BaseCompressor.get_value_from_registry(config["format"]).decompress(tensors, scheme)["weight"]
    assert found.bfloat16().equal(torch.from_numpy(written.numbers[f"{name}.weight"].copy()).bfloat16())


def tensors_of(written: Written, module: str) -> Tensors:
    found: Tensors = {}

    def note(tensors: Tensors) -> None:
        found.update({name.rpartition(".")[2]: one for name, one in tensors.items() if name.startswith(f"{module}.")})

    written.change(note)
    return found


class TestMistakes:
    """What a wrong file would change is seen: the numbers that a packer says are not read of it."""

    @staticmethod
    def found(written: Written, change: Callable[[Tensors], None]) -> list[str]:
        return differences_on(written.change(change), 1)

    def test_halves_of_bytes_in_the_other_order(self, tmp_path):
        def swap(tensors: Tensors) -> None:
            one = tensors["model.layers.0.mlp.up_proj.weight_packed"].view(torch.uint8)
            one.copy_((one << 4) | (one >> 4))

        found = self.found(write("llama", tmp_path, "ct w4a16"), swap)
        assert found == ["layout.layers[0].mlp.up.weights[1]"]

    def test_a_zero_point_that_is_off_by_one(self, tmp_path):
        def add(tensors: Tensors) -> None:
            zeros = tensors["model.layers.0.mlp.down_proj.qzeros"].numpy().view(np.uint32)
            zeros[0, 0] ^= 1

        found = self.found(write("llama", tmp_path, "gptq"), add)
        assert found == ["layout.layers[0].mlp.down.weights[0]"]

    def test_the_scale_of_the_group_beside(self, tmp_path):
        def roll(tensors: Tensors) -> None:
            name = "model.layers.0.mlp.down_proj.scales"
            tensors[name] = tensors[name].roll(1, 0)

        found = self.found(write("llama", tmp_path, "awq"), roll)
        assert found == ["layout.layers[0].mlp.down.weights[0]"]

    def test_order_of_activations_left_out(self, tmp_path):
        def drop(tensors: Tensors) -> None:
            del tensors["model.layers.0.mlp.down_proj.g_idx"]

        found = self.found(write("llama", tmp_path, "gptq act-order"), drop)
        assert found == ["layout.layers[0].mlp.down.weights[0]"]


class TestPlanted:
    """What a wrong importer would read is seen."""

    DOWN = "layout.layers[0].mlp.down.weights[0]"

    @staticmethod
    def places(tmp_path: Path, layout: str, size: int = 1) -> set[str]:
        return set(differences_on(write("llama", tmp_path, layout), size))

    @pytest.mark.parametrize("layout", ["gptq", "awq", "ct w4a16 asym"])
    def test_zero_points_off_by_one(self, tmp_path, monkeypatch, layout):
        made = importers._weight

        def shifted(scheme, shape, codes, scales, zeros=None, groups=None):
            return made(scheme, shape, codes, scales, zeros + 1, groups)

        monkeypatch.setattr(importers, "_weight", shifted)
        assert self.DOWN in self.places(tmp_path, layout)

    @pytest.mark.parametrize("layout", ["gptq act-order", "ct w4a16 act-order"])
    def test_order_of_activations_ignored(self, tmp_path, monkeypatch, layout):
        made = importers._weight
        monkeypatch.setattr(importers, "_weight", lambda *parts: made(*parts[:5]))
        assert self.DOWN in self.places(tmp_path, layout)

    @pytest.mark.parametrize("layout", ["gptq", "awq", "ct w4a16", "fp8 block"])
    def test_groups_counted_from_where_a_share_is_cut(self, tmp_path, monkeypatch, layout):
        def spread(self, grid, blocks, at=slice(None)):
            of_rows = grid[blocks].float()
            length = self.columns[1] - self.columns[0]
            return of_rows if grid.shape[1] == 1 else of_rows[:, self.groups[:length][at]]

        monkeypatch.setattr(QuantizedWeight, "_spread", spread)
        assert self.places(tmp_path, layout, 1) == set()
        assert self.DOWN in self.places(tmp_path / "again", layout, 2)

    def test_places_of_a_word_in_order(self, tmp_path, monkeypatch):
        monkeypatch.setattr(importers, "AWQ_ORDER", codes.IN_ORDER)
        assert self.DOWN in self.places(tmp_path, "awq")

    @pytest.mark.parametrize("layout", ["gptq", "ct w4a16"])
    def test_places_of_a_word_from_the_highest(self, tmp_path, monkeypatch, layout):
        read = codes.unpacked

        def turned(words, bits, packed_dim, ranges, order=codes.IN_ORDER):
            return read(words, bits, packed_dim, ranges, tuple(reversed(order[: 32 // bits])))

        monkeypatch.setattr(codes, "unpacked", turned)
        assert self.DOWN in self.places(tmp_path, layout)

    @pytest.mark.parametrize("layout", ["gptq", "awq", "ct w4a16", "fp8 block"])
    def test_scales_of_the_group_beside(self, tmp_path, monkeypatch, layout):
        spread = QuantizedWeight._spread
        of_units = QuantizedWeight._of_units
        monkeypatch.setattr(QuantizedWeight, "_spread", lambda self, grid, *at: spread(self, grid.roll(1, 1), *at))
        monkeypatch.setattr(QuantizedWeight, "_of_units", lambda self, grid, *at: of_units(self, grid.roll(1, 1), *at))
        assert self.DOWN in self.places(tmp_path, layout)
