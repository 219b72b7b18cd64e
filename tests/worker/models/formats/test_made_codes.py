"""Codes that are made at load: once of a small model, while rows are packed of a large one, with the same bits."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.executors.cpu import shared_weights
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.cpu.tile_memory import linears
from holdfast.worker.executors.layout import DecoderLayout, Experts
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models import proof
from holdfast.worker.models.backend import LoadedBackend, load_backend
from holdfast.worker.models.coded_bytes import memory_of_weights
from holdfast.worker.models.compact import compact_tensors
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight
from holdfast.worker.models.quantized_folder import write_quantized
from holdfast.worker.models.quantizing_tensors import PlainWeight
from holdfast.worker.models.weight_files import weight_bytes
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.worker.executors.rank_scenarios import BLOCK_SIZE, NUM_BLOCKS, all_bits
from tests.worker.models.formats import reference_rule as reference
from tests.worker.models.formats.comparison import numbers_of_units
from tests.worker.models.formats.quantized_folders import SIZES
from tests.worker.models.layouts import stated

UP = "model.layers.1.mlp.up_proj.weight"
SCHEMES = ("int4", "int8", "fp8")


def saved(family: str, folder: Path) -> Path:
    return reference.in_bfloat16(save_tiny_model(family, folder, **{**SIZES, "num_hidden_layers": 2}))


def loaded(folder: Path, quantization: str) -> LoadedBackend:
    config = WorkerConfig(
        model=ModelConfig(model=str(folder), device="cpu", quantization=quantization),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
    )
    return load_backend(config, folder, SingleRank(), torch.device("cpu"), lambda *_: None)


def make_only_for(most_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger models are large ones."""
    monkeypatch.setattr(proof, "MAX_REFERENCE_NUMBERS", most_numbers)


@pytest.mark.parametrize("quantization", SCHEMES)
def test_large_models_have_the_bits_and_the_shared_weights_of_small_ones(quantization, tmp_path, monkeypatch):
    folder = saved("mixtral", tmp_path)
    usual, kinds, digests = CpuExecutor._pack, [], []

    def noted(self: CpuExecutor, layout: DecoderLayout, *arguments: Any, **settings: Any) -> Any:
        kinds.append({type(part) for linear in linears(layout) for part in linear.stored})
        digests.append(shared_weights.layout_digest(layout, ""))
        return usual(self, layout, *arguments, **settings)

    monkeypatch.setattr(CpuExecutor, "_pack", noted)
    monkeypatch.setattr(shared_weights, "shares_large_pages", lambda: False)
    bits = []
    for most in (1 << 28, 0):
        make_only_for(most, monkeypatch)
        backend = loaded(folder, quantization).backend
        backend.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
        bits.append(all_bits(backend))
        backend.close()
    assert kinds == [{QuantizedWeight}, {PlainWeight}]
    assert digests[0] == digests[1]
    assert bits[0] == bits[1]


def test_shared_weights_are_named_by_the_rule_and_the_file(tmp_path):
    """And not by their codes, which a second process on the machine does not make."""
    folder = saved("llama", tmp_path)

    def digest(quantization: str, **changes: Any) -> str:
        weight = compact_tensors(folder, quantization).take(UP, (96, 64))
        return shared_weights.layout_digest(replace(weight, **changes), "")

    first = digest("int8")
    assert digest("int8") == first
    assert digest("int8", rows=(0, 32)) != first
    assert digest("int8", rule="int8-0") != first
    assert digest("int4") != first
    made = compact_tensors(folder, "int8").take(UP, (96, 64)).with_codes()
    assert isinstance(made, QuantizedWeight)
    assert shared_weights.layout_digest(made, "") == first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert digest("int8") != first


@pytest.mark.parametrize("most_numbers", [1 << 28, 0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("quantization", SCHEMES)
def test_a_weight_that_is_not_finite_is_named(quantization, bad, most_numbers, tmp_path, monkeypatch):
    make_only_for(most_numbers, monkeypatch)
    folder = saved("llama", tmp_path)
    tensors = reference.load_file(folder / "model.safetensors")
    tensors[UP][5, 7] = bad
    reference.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"its weight {UP} has numbers .* at \[5, 7\] in "):
        loaded(folder, quantization)


# --- experts that lie in one tensor ---

MODELS = {"gemma4_text": {"moe_intermediate_size": 128}, "granitemoe": {}, "granitemoehybrid": {"mamba_n_heads": 8}}


def experts_of(layout: DecoderLayout) -> list[Linear]:
    mixtures = [part for layer in layout.layers for part in (layer.mlp, layer.beside and layer.beside.experts)]
    mlps = [mlp for part in mixtures if isinstance(part, Experts) for mlp in part.experts]
    return [linear for mlp in mlps for linear in (mlp.up, mlp.down)]


@pytest.mark.parametrize("quantization", SCHEMES)
@pytest.mark.parametrize("family", MODELS)
def test_experts_of_one_tensor_stay_codes(family, quantization, tmp_path):
    """Their units, of any rank's share, are the numbers of the rule, and the memory is foreseen."""
    changes = {"hidden_size": 64, "intermediate_size": 128, **MODELS[family]}
    folder = reference.in_bfloat16(save_tiny_model(family, tmp_path / "plain", **changes))
    numbers = reference.dequantized(folder, quantization, tmp_path / "numbers")
    settings = {"quantized_activations": "auto", "quantization": quantization}

    def checked(group: TensorParallelGroup) -> DecoderLayout:
        layout, expected = stated(folder, group, **settings), stated(numbers, group)
        for ours, theirs in zip(experts_of(layout), experts_of(expected), strict=True):
            assert ours.units or ours.codes
            assert torch.cat([part.to(torch.bfloat16) for part in ours.stored]).equal(torch.cat(theirs.weights))
            for part in ours.units:
                assert numbers_of_units(part).equal(part.numbers(*part.rows))
        return layout

    (layout,) = run_ranks(1, checked)
    assert len(experts_of(layout)) >= 8
    run_ranks(2, checked)
    kept = [part for linear in linears(layout) for part in linear.stored]
    dense = sum(2 * part.shape[0] * part.shape[1] for part in kept)
    config = ModelConfig(model=str(folder), quantization=quantization)
    saved_bytes = weight_bytes(folder, "auto", quantization) - memory_of_weights(config, folder, "cpu")
    bits = {"int4": 4.5, "int8": 8.5, "fp8": 8.5}[quantization]
    assert saved_bytes == pytest.approx(dense * (1 - bits / 16), rel=0.1)


def test_experts_of_one_tensor_are_written_to_no_folder(tmp_path):
    folder = saved("granitemoe", tmp_path / "plain")
    with pytest.raises(ConfigurationError, match=r"^IN = .*input_linear.weight has the weights of several experts"):
        write_quantized(folder, tmp_path / "out", "int4", lambda *_: None)
