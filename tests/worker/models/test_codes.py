"""Quantized weights that stay codes on GPUs: which do, and that they are the numbers of the dequantized folder."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.config import ModelConfig
from holdfast.worker.executors.coded import CodedMatrix, CodeKind, Offset
from holdfast.worker.executors.gpu.weights import DeviceWeights
from holdfast.worker.executors.layout import DecoderLayout, Experts, Mlp
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models import memory
from holdfast.worker.models.coded_bytes import CodedBytes
from holdfast.worker.models.formats.gguf_folder import hf_folder
from holdfast.worker.models.memory import MemoryEstimator
from holdfast.worker.models.stated_layout import read_stated
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.parity.harness import worker_config
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.gpu import runs
from tests.worker.models.formats.gguf_files import write_model
from tests.worker.models.formats.quantized_folders import LAYOUTS, write

CPU, BF16 = torch.device("cpu"), torch.bfloat16
Runner = partial(runs.Runner, launch=launch, block_size=16, max_positions=64)

SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}


def layout_in(
    folder: Path, group: TensorParallelGroup, quantization: Any = None, device: str = "cuda"
) -> DecoderLayout:
    """As it is read for a device, in main memory; on a CPU dequantized."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    config = ModelConfig(model=str(folder), quantized_activations="bfloat16", **settings)
    read = read_stated(config, folder, group, torch.device(device))
    assert not isinstance(read, str), read
    return read[0]


def linears(layout: DecoderLayout) -> list[Linear]:
    found: list[Linear] = []
    for layer in layout.layers:
        assert layer.attention is not None
        found += [layer.attention.qkv, layer.attention.output]
        mlps = [layer.mlp] if isinstance(layer.mlp, Mlp) else [*layer.mlp.experts, layer.mlp.shared]
        found += [linear for mlp in mlps if mlp is not None for linear in (mlp.up, mlp.down)]
    return [*found, layout.head]


def numbers_of(matrix: CodedMatrix) -> Tensor:
    """What a matrix on a device says, without the kernel."""
    inputs = torch.arange(matrix.num_inputs)
    groups = inputs // matrix.group_inputs if matrix.groups is None else matrix.groups
    codes, scales = codes_of(matrix, inputs), matrix.scales[:, groups].float()
    if matrix.form.offset is Offset.MINIMA:
        assert matrix.offsets is not None
        return (codes * scales + matrix.offsets[:, groups].float()).bfloat16()
    middle = {CodeKind.FOUR_BITS: 8, CodeKind.EIGHT_BITS: 128}.get(matrix.form.kind, 0)
    zeros = middle if matrix.offsets is None else matrix.offsets[:, groups].float()
    return ((codes - zeros) * scales).bfloat16()


def codes_of(matrix: CodedMatrix, inputs: Tensor) -> Tensor:
    """[outputs, inputs], float32."""
    if matrix.codes.dtype == torch.int32:
        unit, place = inputs // 32, inputs % 32
        s, t, h = place // 8, place % 8 // 2, place % 2
        return ((matrix.codes[:, 4 * unit + t] >> (16 * h + 4 * s)) & 15).float()
    floating = {CodeKind.E4M3: torch.float8_e4m3fn, CodeKind.E5M2: torch.float8_e5m2}.get(matrix.form.kind)
    return matrix.codes.float() if floating is None else matrix.codes.view(floating).float()


def faults(found: DecoderLayout, expected: DecoderLayout) -> list[str]:
    """Linears on a device that are other numbers than those of the dequantized folder."""
    device = DeviceWeights(found, CPU, 8).layout
    pairs = zip(linears(device), linears(expected), strict=True)
    return [str(number) for number, (one, other) in enumerate(pairs) if not weight_of(one).equal(weight_of(other))]


def weight_of(linear: Linear) -> Tensor:
    (coded,) = linear.codes or (None,)
    return numbers_of(coded) if isinstance(coded, CodedMatrix) else torch.cat(linear.weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_of_a_folder_are_the_numbers_of_the_dequantized_one(tmp_path, layout):
    """On one rank and on two, whose shares cut groups, blocks and orders of activations."""
    written = write("llama", tmp_path, layout, **SIZES)

    def compared(group: TensorParallelGroup) -> list[str]:
        found = layout_in(written.folder, group)
        coded = [bool(linear.codes) for linear in linears(found)]
        by_order = "act-order" in layout or layout == "gptq sym"  # of each linear its own, which cannot be stacked
        assert coded == [*[not by_order, True] * 2, False], "the head is not quantized in the file"
        return faults(found, layout_in(written.dequantized, group, None, "cpu"))

    assert run_ranks(2, compared) == [[], []]


def gguf_model(where: Path, kind: str, **changes: Any) -> Path:
    return hf_folder(write_model("llama", where, kind, **{**SIZES, "num_hidden_layers": 1, **changes}).file, "model")


@pytest.mark.parametrize(("family", "layout"), [("qwen2_moe", "ct w4a16"), ("mixtral", "fp8 block")])
def test_experts_are_dequantized_and_what_stands_beside_them_is_not(tmp_path, family, layout):
    """The expert that all tokens share is codes, too."""
    sizes = {**SIZES, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    written = write(family, tmp_path, layout, **sizes)

    def compared(group: TensorParallelGroup) -> list[str]:
        found = layout_in(written.folder, group)
        mlp = found.layers[0].mlp
        assert isinstance(mlp, Experts)
        assert all(linear.codes for linear in linears(found)[:2])
        assert not any(expert.up.codes or expert.down.codes for expert in mlp.experts)
        assert mlp.shared is None or (mlp.shared.up.codes and mlp.shared.down.codes)
        return faults(found, layout_in(written.dequantized, group, None, "cpu"))

    assert run_ranks(2, compared) == [[], []]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_codes_of_a_gguf_file_are_its_numbers(tmp_path, kind):
    folder = gguf_model(
        tmp_path, kind, **({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if "K" in kind else {})
    )
    for found, expected in run_ranks(2, lambda group: [layout_in(folder, group, None, device) for device in BOTH]):
        assert all(linear.codes for linear in linears(found)[:-1])
        assert faults(found, expected) == []


BOTH = ("cuda", "cpu")


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_codes_made_at_load_stay(tmp_path, quantization):
    """The head is of 8 bits; where it is the table too, the table stays as it is."""
    folder = save_tiny_model("llama", tmp_path, **SIZES, num_hidden_layers=1, vocab_size=203, dtype=torch.bfloat16)
    for group_size in (1, 2):
        layouts = run_ranks(
            group_size, lambda group: [layout_in(folder, group, quantization, device) for device in BOTH]
        )
        for found, expected in layouts:
            assert all(linear.codes for linear in linears(found))
            assert found.embedding.equal(expected.embedding)
            assert faults(found, expected) == []


WHOLE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 256, "num_hidden_layers": 1}


def logits_on(folder: Path, size: int, quantization: Any = None, device: str = "cuda") -> Tensor:
    """The leader's, of eight tokens in two chunks."""

    def run(group: TensorParallelGroup) -> Tensor:
        return Runner(layout_in(folder, group, quantization, device), group=group).run(tokens(8), (5, 3))

    return run_ranks(size, run)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ct w4a16 asym", "gptq act-order", "awq", "ct w8a8", "fp8 block", "Q4_1", "int4"])
def test_a_model_has_the_logits_of_its_dequantized_folder_on_any_number_of_ranks(tmp_path, layout):
    quantization, expected = None, None
    if layout == "Q4_1":
        folder = gguf_model(tmp_path, layout, **WHOLE)
    elif layout == "int4":
        folder, quantization = save_tiny_model("llama", tmp_path, **{**SIZES, **WHOLE}, dtype=torch.bfloat16), layout
    else:
        written = write("llama", tmp_path, layout, **{**SIZES, **WHOLE})
        folder, expected = written.folder, logits_on(written.dequantized, 1)
    if expected is None:
        expected = logits_on(folder, 1, quantization, "cpu")
    for size in (1, 2, 4):
        assert logits_on(folder, size, quantization).equal(expected)


FORESEEN = (
    "gptq",
    "awq",
    "ct w4a16",
    "ct w4a16 asym",
    "ct w8a16",
    "ct w8a8 asym",
    "fp8 tensor",
    "Q4_1",
    "Q6_K",
    "Q5_0",
    "int4",
)


@pytest.mark.parametrize("layout", FORESEEN)
def test_the_bytes_that_are_foreseen_are_those_on_a_device(tmp_path, layout):
    quantization: Any = layout if layout == "int4" else None
    if layout.startswith("Q"):
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if "K" in layout else {}
        folder = gguf_model(tmp_path, layout, **sizes)
    else:
        written = write("llama", tmp_path, "gptq" if quantization else layout, **SIZES)
        folder = written.dequantized if quantization else written.folder
    device = DeviceWeights(layout_in(folder, SingleRank(), quantization), CPU, 8).layout
    dense = sum(2 * linear.out_features * linear.in_features for linear in linears(device) if linear.codes)
    found = sum(one.nbytes for linear in linears(device) for one in linear.codes if isinstance(one, CodedMatrix))
    assert CodedBytes(folder, quantization).saved(2) == dense - found


def test_what_is_foreseen_on_gpus_and_on_cpus(tmp_path, monkeypatch):
    folder = write("llama", tmp_path, "ct w4a16", **SIZES).folder
    config = worker_config(folder, 2, quantized_activations="bfloat16")
    on_cpus = MemoryEstimator(config).weight_bytes
    monkeypatch.setattr(memory, "choose_device", lambda _: torch.device("cuda"))
    on_gpus = MemoryEstimator(config).weight_bytes
    assert on_cpus - on_gpus == CodedBytes(folder, None).saved(2) // 2
    hf = config.model_copy(update={"model": config.model.model_copy(update={"executor": "hf"})})
    assert MemoryEstimator(hf).weight_bytes == on_cpus, "which dequantizes"


def test_zero_points_of_more_than_eight_bits_are_dequantized(tmp_path):
    """Of GPTQ's first version: 255 stands for 256."""
    written = write("llama", tmp_path, "gptq 8 bits", **SIZES)

    def fill(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.qzeros"].fill_(-1)

    layer = layout_in(written.change(fill).folder, SingleRank()).layers[0]
    assert isinstance(layer.mlp, Mlp)
    assert layer.mlp.up.codes
    assert not layer.mlp.down.codes
