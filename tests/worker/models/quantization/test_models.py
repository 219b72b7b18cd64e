"""Quantized models are what they are dequantized: the same layouts in every field and bit."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.models.stated_config import STATED
from tests.fake_group import run_ranks
from tests.parity.harness import greedy_tokens, is_run_by, logits_in_chunks, on_ranks, worker_config
from tests.worker.models.quantization.folders import LAYOUTS, Tensors, Written, write, write_gpt_oss
from tests.worker.models.test_stated_layout import differences, recognized, stated


def differences_on(written: Written, size: int, dtype: str = "auto") -> list[str]:
    """Between what is read of the quantized folder and of the folder of its numbers."""
    is_stated = json.loads((written.folder / "config.json").read_text())["model_type"] in STATED
    read = stated if is_stated else recognized

    def compared(group: TensorParallelGroup) -> list[str]:
        return differences(read(written.folder, group, dtype), recognized(written.dequantized, group, dtype))

    return [found for rank in run_ranks(size, compared) for found in rank]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_its_dequantized_folder(tmp_path, layout):
    written = write("llama", tmp_path, layout)
    assert [differences_on(written, size) for size in (1, 2)] == [[], []]


@pytest.mark.parametrize("layout", ["gptq act-order", "awq", "ct w4a16 asym", "fp8 block"])
def test_linears_with_biases_and_tied_tables(tmp_path, layout):
    assert differences_on(write("qwen2", tmp_path, layout), 2) == []


@pytest.mark.parametrize("layout", ["gptq act-order", "awq", "ct w4a16 asym", "fp8 block"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts(tmp_path, family, layout):
    written = write(family, tmp_path, layout, moe_intermediate_size=64, intermediate_size=64)
    assert [differences_on(written, size) for size in (1, 2)] == [[], []]


def test_experts_in_mxfp4(tmp_path):
    written = write_gpt_oss(tmp_path)
    assert [differences_on(written, size) for size in (1, 2)] == [[], []]


def answers(folder: Path, size: int, executor: str = "auto") -> tuple[list[list[int]], list[Tensor]]:
    """Tokens of prompts that decode together, and the logits of each prompt in one chunk and in small ones."""
    prompts = [[5, 9, 77, 31, 8, 64, 3], [100, 4, 4, 90]]

    def work(leader: LeaderRunner) -> tuple[list[list[int]], list[Tensor]]:
        assert is_run_by(leader, "hf" if executor == "hf" else "native")
        logits = [rows for chunk in (3, 8) for rows in logits_in_chunks(leader, prompts, chunk)]
        return greedy_tokens(leader, prompts, 8), logits

    return on_ranks(worker_config(folder, size, executor=executor), work)


@pytest.mark.parametrize(
    ("family", "layout", "size", "executor"),
    [
        ("llama", "gptq act-order", 2, "auto"),
        ("qwen2", "awq", 2, "auto"),
        ("qwen3_moe", "ct w4a16 asym", 2, "auto"),
        ("llama", "fp8 block", 1, "hf"),
    ],
)
def test_a_model_answers_with_the_bits_of_its_dequantized_folder(tmp_path, family, layout, size, executor):
    written = write(family, tmp_path, layout, moe_intermediate_size=64)
    expected, theirs = answers(written.dequantized, 1 if executor == "auto" else size, executor)
    found, ours = answers(written.folder, size, executor)
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
