"""Weights that are quantized while they are loaded: codes by the written rule, and the same at any number of ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.worker.config import ModelConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu import weight_codes
from holdfast.worker.executors.cpu.weight_codes import eight_bit_codes, put_numbers, searched_codes
from holdfast.worker.executors.stored_matrix import BytesAndScales
from holdfast.worker.models.compact import compact_tensors
from holdfast.worker.models.formats.codes import PackedCodes, PlainCodes
from holdfast.worker.models.formats.quantization_rule import scheme_for
from holdfast.worker.models.loading import load_model
from holdfast.worker.models.quantizing_tensors import PlainWeight
from holdfast.worker.models.weight_files import weight_bytes
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.parity.harness import worker_config
from tests.worker.executors.cpu.native import library_or_skip
from tests.worker.models.formats import reference_rule as reference
from tests.worker.models.formats.quantized_folders import SIZES, write
from tests.worker.models.layouts import differences_of

CPU = torch.device("cpu")
STACKED = ("gemma4_text", "granitemoe", "granitemoehybrid")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def weight_of(dtype: torch.dtype, outputs: int = 9, inputs: int = 256) -> torch.Tensor:
    """With outputs of many magnitudes, one of zeros, one that is too small for a scale, and an outlier."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-3, 3, outputs)[:, None]
    weight[1] = 0
    weight[2] = 1e-7
    weight[3, 40] = 3e4
    weight[4, :32] = torch.tensor([7.5, -8.5, 2.5, 3.5]).repeat(8)  # ties
    return weight.to(dtype)


@pytest.mark.parametrize("name", ["avx2", "avx512"])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_4_bits_are_those_of_the_written_rule(dtype, group, name, monkeypatch):
    """Groups that do not fill a last pass of eight or sixteen lanes among them."""
    weight, library = weight_of(dtype), library_or_skip(name)
    monkeypatch.setattr(weight_codes, "load_library", lambda: library)
    words, scales = searched_codes(weight, group)
    codes = PackedCodes(stored=words, bits=4, packed_dim=1, middle=8).read((0, 9), (0, 256))
    wanted, wanted_scales = reference.four_bits(weight, group)
    assert np.array_equal(codes.numpy(), wanted)
    assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "rule"), [(torch.int8, "eight_bits"), (torch.float8_e4m3fn, "eight_bit_floats")])
def test_codes_of_8_bits_are_those_of_the_written_rule(dtype, kind, rule):
    weight = weight_of(dtype)
    codes, scales = eight_bit_codes(weight, kind, (0, 256))
    wanted, wanted_scales = getattr(reference, rule)(weight)
    assert np.array_equal(codes.float().numpy(), wanted)
    assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_codes_of_8_bits_are_those_of_torch(dtype, out_dtype):
    """All codes, runs of unequal lengths, rows in any order, scales of all magnitudes, and one that is no number."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(6, 1).view(dtype)
    ends, places = np.array([3, 131, 256]), np.array([5, 0, 7, 1, 4, 2])
    scales = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-30, 1.0, 1e3])
    scales[2:4] = scales[1]
    scales[4, 1] = torch.nan
    zeros = torch.tensor([0.0, 3.0, -128.0]).expand(6, 3).contiguous()
    out = torch.zeros(8, 256, dtype=out_dtype)
    put_numbers(BytesAndScales(codes=codes, ends=ends, scales=scales, zeros=zeros), out, places)
    of_columns = torch.repeat_interleave(torch.arange(3), torch.tensor([3, 128, 125]))
    wanted = ((codes.float() - zeros[:, of_columns]) * scales[:, of_columns]).to(out_dtype)
    assert torch.equal(out[places].nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(out[places].isnan(), wanted.isnan())
    assert not out[[3, 6]].any(), "other rows stay as they are"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_codes_of_8_bits_are_read_as_torch_converts_them(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(dtype)
    found = PlainCodes(codes).read((0, 2), (0, 128))
    wanted = codes.float()
    assert found.isnan().equal(wanted.isnan())
    numbers = ~wanted.isnan()
    assert found[numbers].view(torch.int32).equal(wanted[numbers].view(torch.int32)), "zeros keep their signs"


def test_the_search_costs_less_than_the_largest_magnitude():
    """Squared errors: the search's, that of largest / 7, and that of llama.cpp's Q4_0, largest / -8."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = weight.float().view(64, -1, 32)
    codes, scales = reference.four_bits(weight)
    ours = (torch.from_numpy(codes).view_as(x) * scales.float()[..., None] - x).square().mean()
    furthest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    by_largest = [
        (torch.clamp((x / scale).round(), -8, 7) * scale - x).square().mean()
        for scale in (furthest.abs() / 7, furthest / -8)
    ]
    assert ours < 0.72 * by_largest[0]
    assert ours < 0.9 * by_largest[1]


# --- whole models ---


def differences_on(plain: Path, quantization: str, numbers: Path, size: int) -> list[str]:
    return differences_of(plain, numbers, size, quantization=quantization)


@pytest.mark.in_turn
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "phi3", *STACKED])
def test_a_model_is_its_dequantized_folder(tmp_path, family, quantization):
    """Untied and tied, experts one by one and in one tensor, fused linears; groups of an MLP cut by two ranks."""
    sizes = {"hidden_size": 64} if family == "gemma4_text" else SIZES  # whose layers differ
    changes = {**sizes, "tie_word_embeddings": family == "qwen2", "intermediate_size": 96}
    changes |= {"mamba_n_heads": 8} if family == "granitemoehybrid" else {}
    plain = reference.in_bfloat16(save_tiny_model(family, tmp_path / "plain", **changes))
    numbers = reference.dequantized(plain, quantization, tmp_path / "numbers")
    assert [differences_on(plain, quantization, numbers, size) for size in (1, 2)] == [[], []]


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_three_ranks_have_shares_of_the_same_codes(tmp_path, quantization):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    plain = reference.in_bfloat16(save_tiny_model("llama", tmp_path / "plain", **{**SIZES, **heads}))
    numbers = reference.dequantized(plain, quantization, tmp_path / "numbers")
    assert differences_on(plain, quantization, numbers, 3) == []


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (100, 64)),
        ("model.layers.0.mlp.gate.weight", (4, 64)),
        ("model.layers.0.mlp.gate.wg.weight", (4, 64)),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64)),
        ("model.layers.0.router.proj.weight", (4, 64)),
        ("model.layers.0.self_attn.q_norm.weight", (4, 16)),
        ("model.layers.0.conv.conv.weight", (64, 1, 3)),
        ("model.layers.0.mamba.A_log", (4, 16)),
        ("model.layers.0.self_attn.q_proj.bias", (64,)),
    ],
)
def test_what_stays_as_it_is(name, shape):
    assert scheme_for("int4", name, shape) is None
    assert scheme_for("int8", name, shape) is None


def test_inputs_that_are_no_groups_have_8_bits(tmp_path):
    plain = reference.in_bfloat16(save_tiny_model("llama", tmp_path / "plain", **{**SIZES, "intermediate_size": 40}))
    assert scheme_for("int4", "model.layers.0.mlp.down_proj.weight", (64, 40)).bits == 8
    numbers = reference.dequantized(plain, "int4", tmp_path / "numbers")
    assert differences_on(plain, "int4", numbers, 1) == []


# --- mistakes that the tests above find out ---


def shifted_scales(weight, quantized):
    return replace(quantized, scales=quantized.scales.roll(1, -1))


def cut_at_the_wrong_group(weight, quantized):
    """Groups counted from where a share begins."""
    groups = (torch.arange(len(quantized.groups)) - quantized.columns[0]).clamp(min=0) // 32
    return replace(quantized, groups=groups)


def rounded_away(weight, quantized):
    """Ties of codes away from zero: numbers that lie between two codes are one code further."""
    first, last = quantized.columns
    steps = (
        weight.source[slice(*weight.rows), slice(*weight.columns)].float()
        / quantized.scales.float().repeat_interleave(32, 1)[:, first:last]
    )
    stored = torch.where(steps.frac().abs() == 0.5, steps + steps.sign() * 0.5, steps.round()).clamp(-8, 7)
    return replace(quantized, codes=PlainNumbers(stored), columns=(0, last - first))


class PlainNumbers:
    unsigned = floating = None

    def __init__(self, stored):
        self.stored = stored

    def read(self, rows, columns):
        return self.stored[slice(*rows), slice(*columns)]


@pytest.mark.parametrize(("mistake", "size"), [(shifted_scales, 1), (cut_at_the_wrong_group, 2), (rounded_away, 1)])
def test_a_planted_mistake_is_found_out(tmp_path, mistake, size, monkeypatch):
    plain = reference.in_bfloat16(save_tiny_model("llama", tmp_path / "plain", **SIZES))
    tensors = reference.load_file(plain / "model.safetensors")
    for values in tensors.values():
        values.copy_((values * 16).round() / 16)  # few different numbers, and so many ties
    reference.save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    numbers = reference.dequantized(plain, "int4", tmp_path / "numbers")
    assert differences_on(plain, "int4", numbers, size) == []
    usual = PlainWeight.quantized

    def quantized(self):
        found = usual(self)
        return mistake(self, found) if self.scheme.bits == 4 else found

    monkeypatch.setattr(PlainWeight, "quantized", quantized)
    assert differences_on(plain, "int4", numbers, size) != []


# --- settings ---


def test_what_is_quantized_is_not_quantized_again(tmp_path):
    written = write("llama", tmp_path, "awq")
    with pytest.raises(
        ConfigurationError, match=r"^model.quantization = 'int8': .* quantized already \(AWQ int4 g32\)"
    ):
        compact_tensors(written.folder, "int8")


def test_the_fingerprint_and_the_facts_name_what_is_served(tmp_path):
    plain = reference.in_bfloat16(save_tiny_model("llama", tmp_path, **SIZES))

    def info(**settings):
        config = worker_config(plain, 1)
        config = config.model_copy(update={"model": config.model.model_copy(update=settings)})
        (loaded,) = run_ranks(1, lambda group: load_model(config, group, CPU, lambda *_: None))
        loaded.backend.close()
        return loaded.info

    infos = [info(), *(info(quantization=one) for one in ("int4", "int8", "fp8"))]
    assert len({one.fingerprint for one in infos}) == 4
    words = [one.quantization for one in infos]
    assert words == ["none", "int4 g32 at load", "int8 per channel at load", "fp8 per channel at load"]


def test_weights_that_are_made_up_are_not_quantized():
    with pytest.raises(ValueError, match="quantization needs a checkpoint, and load_format = 'dummy'"):
        ModelConfig(quantization="int4", load_format="dummy")


@pytest.mark.parametrize(("family", "reason"), [("gpt2", "linears of gpt2 lie as"), ("gpt_oss", "several experts")])
def test_models_whose_weights_lie_in_another_way_are_refused(tmp_path, family, reason):
    folder = save_tiny_model(family, tmp_path)
    with pytest.raises(ConfigurationError, match=rf"^model.quantization = 'int4': .*{reason}.*leave --quantization"):
        compact_tensors(folder, "int4")


def test_a_head_of_its_own_is_counted(tmp_path):
    tied = reference.in_bfloat16(save_tiny_model("qwen2", tmp_path, tie_word_embeddings=True, **SIZES))
    table = reference.load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    assert weight_bytes(tied, "auto", "int8") - weight_bytes(tied) == table.nbytes


def test_a_draft_model_stays_as_it_is(tmp_path):
    from holdfast.worker.models.draft_model import _alone

    config = WorkerConfig(model=ModelConfig(quantization="int4"))
    assert _alone(config, tmp_path).model.quantization is None


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_codes_that_were_made_can_be_read_again(name):
    """They lie in no file: a first reader, such as the proof at load, may not give back their memory."""
    source = weight_of(torch.bfloat16, 64, 256)
    scheme = scheme_for("int4", name, tuple(source.shape))
    assert scheme is not None
    plain = PlainWeight(rows=(0, 64), columns=(0, 256), source=source.clone(), scheme=scheme, rule="int4")
    made = plain.quantized()
    first = made[:32].to(torch.bfloat16)
    assert first.any()
    assert made.to(torch.bfloat16)[:32].equal(first)
    assert made.to(torch.bfloat16)[32:].any()
