"""Models in int8: which weights stay quantized, what their units say, and the same bits on any number of ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.coded import UNIT
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.cpu.tile_memory import linears
from holdfast.worker.executors.layout import Attention, DecoderLayout
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models import coded_bytes
from holdfast.worker.models.coded_bytes import memory_of_weights
from holdfast.worker.models.formats.gguf_folder import hf_folder
from holdfast.worker.models.native_backend import NativeBackend, make_backend
from holdfast.worker.models.quantized_activations import Kept, check_quantized_activations, kept_form
from holdfast.worker.models.weight_files import weight_bytes
from tests.fake_group import run_ranks
from tests.worker.executors.models import prepared
from tests.worker.executors.rank_scenarios import BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, all_best, all_bits
from tests.worker.models.formats.comparison import numbers_of_units
from tests.worker.models.formats.gguf_files import write_model
from tests.worker.models.formats.quantized_folders import write
from tests.worker.models.layouts import stated

SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
"""Every slice of a sum has whole units."""

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
"""The same, of blocks of 256."""

THREE_HEADS = {
    "hidden_size": 96,
    "head_dim": 32,
    "intermediate_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
"""Two ranks share them unequally."""


def layout_in_units(folder: Path, group: TensorParallelGroup) -> DecoderLayout:
    layout: DecoderLayout = stated(folder, group, "bfloat16", quantized_activations="int8")
    return layout


def gguf_model(where: Path, kind: str, family: str = "llama", **changes: Any) -> Path:
    return hf_folder(write_model(family, where, kind, **{**SIZES, **changes}).file, "model")


def built(layout: DecoderLayout, group: TensorParallelGroup) -> NativeBackend | str:
    """On the executor, which has to agree with the reference."""
    sizes = {"max_model_len": MAX_LEN, "block_size": BLOCK_SIZE}
    backend = make_backend(prepared(layout, group, **sizes), group, **sizes)
    if isinstance(backend, NativeBackend):
        backend.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    return backend


def bits_of(folder: Path, group: TensorParallelGroup) -> tuple[str, list[list[int] | None], str]:
    backend = built(layout_in_units(folder, group), group)
    assert isinstance(backend, NativeBackend), backend
    found = all_bits(backend), all_best(backend), backend.numerics
    backend.close()
    return found


# --- memory ---


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "Q4_K_M", "ct w4a16", "awq", "gptq", "int8"])
def test_the_memory_that_is_foreseen_is_what_units_take(tmp_path, kind):
    quantization: Any = "int8" if kind == "int8" else None
    if kind == "Q4_K_M":
        folder = mixed(tmp_path, "qwen2")
    elif kind.startswith("Q"):
        folder = gguf_model(tmp_path, kind, **(WIDE if "K" in kind else {}))
    else:
        written = write("llama", tmp_path, "gptq" if quantization else kind, **SIZES)
        folder = written.dequantized if quantization else written.folder
    config = ModelConfig(model=str(folder), quantization=quantization)
    layout = stated(folder, SingleRank(), "bfloat16", quantized_activations="int8", quantization=quantization)
    kept = [(part, part.unit_form) for linear in linears(layout) for part in linear.units]
    dense = sum(2 * part.shape[0] * part.shape[1] for part, _ in kept)
    taken = sum(form.panel_bytes(part.shape[1] // UNIT) * part.shape[0] // UNIT for part, form in kept if form)
    assert kept
    whole = weight_bytes(folder, "bfloat16", quantization)
    bfloat16 = config.model_copy(update={"dtype": "bfloat16"})
    assert memory_of_weights(bfloat16, folder, "cpu") == pytest.approx(whole - dense + taken, rel=0.01)


@pytest.mark.parametrize(("layout", "sharing"), [("ct fp8", None), ("fp8 whole blocks", UNIT)])
def test_the_memory_of_eight_bit_floats_is_that_of_their_codes_where_they_stay(tmp_path, monkeypatch, layout, sharing):
    folder = write("llama", tmp_path, layout, **SIZES).folder
    config = ModelConfig(model=str(folder), dtype="bfloat16")
    read = stated(folder, SingleRank(), "bfloat16", quantized_activations="auto")
    kept = [part for linear in linears(read) for part in linear.stored]
    dense = sum(2 * part.shape[0] * part.shape[1] for part in kept)
    panel_bytes = load_library().native_coded_bytes
    taken = sum(
        part.shape[0] // UNIT * panel_bytes(part.shape[1] // UNIT, (sharing or part.shape[1]) // UNIT) for part in kept
    )
    assert taken < 0.6 * dense
    monkeypatch.setattr(coded_bytes, "keeps_codes_here", lambda: False)
    whole = memory_of_weights(config, folder, "cpu")
    assert whole == weight_bytes(folder, "bfloat16")
    monkeypatch.setattr(coded_bytes, "keeps_codes_here", lambda: True)
    assert memory_of_weights(config, folder, "cpu") == pytest.approx(whole - dense + taken, rel=0.001)


# --- units of files ---


def unit_faults(layout: DecoderLayout) -> list[str]:
    """Weights whose units are other numbers than those that they are dequantized to, but for rows that fill them up."""
    stored = {id(part): part for linear in linears(layout) for part in linear.units}.values()
    return [str(part.shape) for part in stored if not _whole_rows(part).equal(part.numbers(*part.rows))]


def _whole_rows(part: StoredMatrix) -> torch.Tensor:
    numbers = numbers_of_units(part)
    return numbers[: len(numbers) - part.padding]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_units_of_a_gguf_file_are_its_numbers(tmp_path, kind):
    folder = gguf_model(tmp_path, kind, num_hidden_layers=1)
    for layout in run_ranks(2, lambda group: layout_in_units(folder, group)):
        assert all(linear.units for linear in linears(layout))
        assert unit_faults(layout) == []


IN_UNITS = {
    **dict.fromkeys(("gptq", "gptq sym, v2 zeros", "gptq v2", "gptq 8 bits", "awq", "ct w4a16", "ct w4a16 asym"), True),
    **dict.fromkeys(("ct w4a16 channel", "ct w8a16", "ct w8a8", "ct w8a8 asym", "ct w8a8 tensor"), True),
    **dict.fromkeys(("gptq one group", "ct w8a16 asym"), True),
    **dict.fromkeys(("gptq g8", "awq g16", "gptq 8 bits act-order"), False),
    **dict.fromkeys(("gptq act-order", "gptq sym", "ct w4a16 act-order", "ct fp8", "ct fp8 block", "fp8 block"), False),
    **dict.fromkeys(("fp8 tensor",), False),
}
"""Layouts of folders: whether their linears lie in units. Orders of activations, floating-point codes, and groups of
fewer inputs than a unit do not.
"""


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_units_of_blocks_that_ranks_cut_are_their_numbers(tmp_path, kind):
    folder = gguf_model(tmp_path, kind, num_hidden_layers=1, **WIDE)
    for layout in run_ranks(4, lambda group: layout_in_units(folder, group)):
        assert all(linear.units for linear in linears(layout))
        assert unit_faults(layout) == []


@pytest.mark.parametrize("layout", IN_UNITS)
def test_units_of_a_folder_are_its_numbers(tmp_path, layout):
    folder = write("llama", tmp_path, layout, **SIZES).folder
    for found in run_ranks(2, lambda group: layout_in_units(folder, group)):
        layer = found.layers[0]
        parts = (layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down)  # type: ignore[union-attr]
        assert {bool(part.units) for part in parts} == {IN_UNITS[layout]}
        assert not found.head.units, "it is not quantized in the file"
        assert unit_faults(found) == []


def test_what_does_not_lie_in_whole_units_is_dequantized(tmp_path):
    """A slice of a sum over 96 features in 4 slices has 24; one of 128 has a unit."""
    layer = layout_in_units(gguf_model(tmp_path, "Q4_0", intermediate_size=96), SingleRank()).layers[0]
    assert layer.mlp.up.units  # type: ignore[union-attr]
    assert layer.attention.output.units
    assert not layer.mlp.down.units  # type: ignore[union-attr]


# --- models ---


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        ("llama", "Q4_1", {"tie_word_embeddings": True}),
        ("qwen2", "Q4_0", {"tie_word_embeddings": False}),
        ("qwen3", "Q8_0", {}),
        ("llama", "Q4_K", {**WIDE, "tie_word_embeddings": True}),
        ("qwen2", "Q5_K", WIDE),
        ("llama", "Q6_K", {**WIDE, "tie_word_embeddings": True}),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_bits_of_one(tmp_path, family, kind, changes, size):
    folder = gguf_model(tmp_path, kind, family, **changes)
    whole = bits_of(folder, SingleRank())
    assert whole[2] == "native-2+int8-units-4"
    assert run_ranks(size, lambda group: bits_of(folder, group)) == [whole] * size


def mixed(where: Path, family: str, *, kind: str = "Q4_K", **others: str) -> Path:
    """As files named Q4_K_M are, or with types of more tensors."""
    others = {"attn_v": "Q6_K", "ffn_down": "Q6_K", **others}
    sizes = {**WIDE, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    return hf_folder(write_model(family, where, kind, others=others, **sizes).file, "model")


MIXED = {
    "llama": {},
    "gemma2": {"attn_k": "Q5_K", "ffn_gate": "Q5_K"},
    "gemma3_text": {"kind": "Q4_0", "attn_v": "Q4_1", "attn_k": "Q8_0", "ffn_up": "Q5_1"},
    "granite": {"kind": "Q5_K"},
    "mixtral": {"ffn_gate_exps": "Q8_0"},
    "qwen2": {"attn_q": "Q8_0", "attn_k": "Q5_0"},
    "qwen2_moe": {"ffn_up_exps": "Q5_K", "ffn_gate_shexp": "Q4_0"},
    "qwen3": {"attn_q": "Q5_1"},
    "qwen3_moe": {"ffn_up_exps": "Q4_1"},
    "smollm3": {"ffn_gate": "Q6_K"},
}
"""Families, and the types of other tensors of theirs."""
EVERY_DAY = ("gemma2", "gemma3_text", "mixtral", "qwen2_moe")
"""Each kind of file: of blocks of 256 and of 32, with experts, and with a shared one."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in EVERY_DAY else pytest.mark.slow) for name in MIXED]
)
def test_each_part_of_a_mixed_file_stays_in_its_own_form(tmp_path, family):
    folder = mixed(tmp_path, family, **MIXED[family])
    found = layout_in_units(folder, SingleRank())
    assert unit_faults(found) == []
    layers = [layer for layer in found.layers if isinstance(layer.attention, Attention)]
    attention = [part for layer in layers for part in (layer.attention.qkv, layer.attention.output)]  # type: ignore[union-attr]
    mlps = [mlp for layer in layers for mlp in getattr(layer.mlp, "experts", (layer.mlp,))]
    assert all(part.units for part in (*attention, *(part for mlp in mlps for part in (mlp.up, mlp.down))))
    assert len({part.unit_form for part in layers[0].attention.qkv.units}) > 1  # type: ignore[union-attr]
    whole = bits_of(folder, SingleRank())
    assert run_ranks(2, lambda group: bits_of(folder, group)) == [whole] * 2


def test_parts_of_other_forms_whose_heads_share_panels_are_dequantized(tmp_path):
    sizes = {**SIZES, "head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8}
    file = write_model("llama", tmp_path, "Q4_0", others={"attn_v": "Q8_0"}, **sizes).file
    layer = layout_in_units(hf_folder(file, "model"), SingleRank()).layers[0]
    assert not layer.attention.qkv.units  # type: ignore[union-attr]
    assert layer.mlp.up.units  # type: ignore[union-attr]


def test_unequal_ranks_have_the_bits_of_one(tmp_path):
    folder = gguf_model(tmp_path, "Q4_1", **THREE_HEADS)
    whole = bits_of(folder, SingleRank())
    assert [run_ranks(size, lambda group: bits_of(folder, group)) for size in (2, 3)] == [[whole] * 2, [whole] * 3]


MIXTURE = {**SIZES, "moe_intermediate_size": 256}


@pytest.mark.parametrize(
    ("family", "layout", "sizes"),
    [
        *(("llama", layout, SIZES) for layout in ("awq", "ct w8a8", "ct w4a16 asym")),
        ("mixtral", "awq", SIZES),
        ("qwen3_moe", "ct w4a16 asym", MIXTURE),
    ],
)
def test_folders_run_on_ranks(tmp_path, family, layout, sizes):
    folder = write(family, tmp_path, layout, **sizes).folder
    found = layout_in_units(folder, SingleRank())
    assert unit_faults(found) == []
    mlps = [mlp for layer in found.layers for mlp in getattr(layer.mlp, "experts", (layer.mlp,))]
    assert all(part.units for mlp in mlps for part in (mlp.up, mlp.down))
    whole = bits_of(folder, SingleRank())
    assert run_ranks(2, lambda group: bits_of(folder, group)) == [whole] * 2


def gates_for_ups(layout: DecoderLayout) -> DecoderLayout:
    mlp = layout.layers[0].mlp
    wrong = replace(mlp, up=replace(mlp.up, units=mlp.up.units[::-1]))  # type: ignore[union-attr, type-var]
    return replace(layout, layers=(replace(layout.layers[0], mlp=wrong), *layout.layers[1:]))


def another_head(layout: DecoderLayout) -> DecoderLayout:
    (units,) = layout.head.units
    moved = replace(units, order=torch.arange(len(units)).roll(1))
    return replace(layout, head=replace(layout.head, units=(moved,)), embedding=moved.to(torch.bfloat16))


@pytest.mark.parametrize("plant", [gates_for_ups, another_head])
def test_an_executor_that_packs_other_units_is_not_used(
    tmp_path, plant: Callable[[DecoderLayout], DecoderLayout]
) -> None:
    group = SingleRank()
    layout = layout_in_units(gguf_model(tmp_path, "Q4_1", tie_word_embeddings=True), group)
    right = prepared(layout, group, max_model_len=MAX_LEN, block_size=BLOCK_SIZE)
    wrong = replace(right, layout=plant(layout))
    assert "times the allowed error" in str(make_backend(wrong, group, max_model_len=MAX_LEN, block_size=BLOCK_SIZE))


# --- the setting ---


def test_what_quantized_weights_stay():
    def kept(device: str = "cpu", setting: str = "auto", dtype: torch.dtype = torch.bfloat16) -> Kept:
        return kept_form(ModelConfig(quantized_activations=setting), device, dtype)

    assert kept() is Kept.UNITS
    assert kept(dtype=torch.float16) is Kept.UNITS
    assert kept(dtype=torch.float32) is Kept.NUMBERS
    assert kept(setting="int8", dtype=torch.float32) is Kept.UNITS
    assert kept(setting="bfloat16") is Kept.NUMBERS
    assert kept("cuda") is Kept.CODES


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        ("cuda", {}, "GPUs multiply quantized weights as bfloat16"),
        ("cpu", {"executor": "hf"}, "the HF backend"),
        ("cpu", {"load_format": "dummy"}, "random weights"),
    ],
)
def test_int8_is_refused_where_it_cannot_be(device, settings, reason):
    with pytest.raises(ConfigurationError, match=f"model.quantized_activations = 'int8': .*{reason}"):
        check_quantized_activations(ModelConfig(quantized_activations="int8", **settings), device)
