"""Models with states, and layers whose outputs are put in another order, in int8: what stays quantized, and ranks."""

from pathlib import Path

import pytest

from holdfast.worker.executors.cpu.tile_memory import linears
from holdfast.worker.executors.layout import Attention, DecoderLayout
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.state_layers import GatedDeltaNet, Mamba2
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.formats.gguf_folder import hf_folder
from tests.parity.families import settings_of
from tests.parity.harness import logits_in_chunks, on_ranks, worker_config
from tests.parity.hybrids import PATTERNS
from tests.worker.models.formats import gguf_hybrid_files as hybrid_files
from tests.worker.models.formats.gguf_hybrid_files import CONVERTED, sizes_of_blocks, write_hybrid
from tests.worker.models.formats.quantized_folders import write
from tests.worker.models.test_int8 import layout_in_units, unit_faults

PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 20)]
RATES = ("ssm_alpha", "ssm_beta", "ssm_ba")
"""Tensors of b and a, which files often have as numbers."""


def model(name: str, where: Path, kind: str = "Q4_0") -> Path:
    model_type, changes = PATTERNS.get(CONVERTED[name][1], (CONVERTED[name][1], {}))
    sizes = sizes_of_blocks({**settings_of(model_type)[1], **changes}, 32, 4)
    if "linear_num_value_heads" in sizes:
        sizes |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    if CONVERTED[name][0] == "gemma4":
        sizes |= {"hidden_size_per_layer_input": 32}
    return hf_folder(write_hybrid(name, where, kind, **sizes).file, "model")


def states(layout: DecoderLayout) -> list[GatedDeltaNet | Mamba2]:
    return [layer.state for layer in layout.layers if isinstance(layer.state, GatedDeltaNet | Mamba2)]


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "granite, dense", "nemotron", "mamba2"])
def test_the_inputs_of_states_stay_quantized(name, tmp_path):
    layout = layout_in_units(model(name, tmp_path), SingleRank())
    assert states(layout)
    for net in states(layout):
        assert net.inputs.units
        assert net.output is None or net.output.units
    assert unit_faults(layout) == []
    assert all(layer.attention.qkv.units for layer in layout.layers if isinstance(layer.attention, Attention))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rates", ["quantized", "numbers"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "granite, dense", "gemma4, shared keys"])
def test_ranks_have_the_bits_of_one(name, rates, size, tmp_path, monkeypatch):
    if rates == "numbers":
        monkeypatch.setattr(hybrid_files, "EXACT", (*hybrid_files.EXACT, *RATES))
    folder = model(name, tmp_path)
    nets = [net for net in states(layout_in_units(folder, SingleRank())) if isinstance(net, GatedDeltaNet)]
    assert all(net.rates is not None and bool(net.rates.weights) == (rates == "numbers") for net in nets)
    assert logits_on(folder, size) == logits_on(folder, 1)


def test_inputs_of_layers_by_token_stay_quantized(tmp_path):
    """Gemma 4's largest table: its rows are read out of units."""
    layout = layout_in_units(model("gemma4, shared keys", tmp_path, "Q8_0"), SingleRank())
    assert layout.inputs is not None
    assert isinstance(layout.inputs.table, Linear)
    assert layout.inputs.table.units
    assert unit_faults(layout) == []


def test_heads_with_query_key_and_value_by_turns_stay_quantized(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    folder = write("gpt_neox", tmp_path, "ct w4a16", **sizes).folder
    layout = layout_in_units(folder, SingleRank())
    assert all(linear.units for linear in linears(layout) if linear is not layout.head)
    assert unit_faults(layout) == []
    assert logits_on(folder, 2) == logits_on(folder, 1)


def logits_on(folder: Path, size: int) -> list[list[list[float]]]:
    config = worker_config(folder, size, dtype="bfloat16", quantized_activations="int8")
    found = on_ranks(config, lambda leader: logits_in_chunks(leader, PROMPTS, 7))
    return [logits.tolist() for logits in found]
