"""Quantized folders of tiny models, packed by hand as the formats are described, and what they are dequantized.

Codes, scales and zero points are random, so that each number tells which of them it was made of. Nothing here is
Holdfast's: words are put together code by code, in numpy.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.parity.families import save_tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1}
GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs the code in each place of a word belongs to."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Tensors = dict[str, torch.Tensor]
Packer = Callable[[int, int, np.random.Generator], tuple[Tensors, NDArray[np.float32]]]
"""A weight of so many outputs and inputs -> its tensors, by the last part of the name, and its numbers."""


def words_of(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Codes [.., n] -> words [.., n / codes of a word], the first code in the lowest bits; filled up with zeros."""
    per_word = 32 // bits
    filled = np.pad(codes.astype(np.uint64), [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)])
    words = np.zeros((*filled.shape[:-1], filled.shape[-1] // per_word), dtype=np.uint64)
    for place in range(per_word):
        words |= filled[..., place::per_word] << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def tensor(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def scales_of(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Of the size that makes weights of a tiny model, and none like another."""
    return torch.from_numpy(0.01 + 0.02 * rng.random(shape)).to(torch.float16)


def gptq(*, bits: int = 4, sym: bool = False, act_order: bool = False, version: int = 1, group: int = GROUP) -> Packer:
    def pack(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        length = inputs if group == -1 else group
        num_groups = -(-inputs // length)
        codes = rng.integers(0, 2**bits, (outputs, inputs))
        zeros = (
            np.full((outputs, num_groups), 2 ** (bits - 1)) if sym else rng.integers(1, 2**bits, (outputs, num_groups))
        )
        scales = scales_of(rng, outputs, num_groups) * (8 / 2**bits)
        order = rng.permutation(inputs) if act_order else np.arange(inputs)
        groups = order // length
        numbers = np.empty((outputs, inputs), dtype=np.float32)
        for k in range(inputs):
            g = groups[k]
            numbers[:, k] = (codes[:, k] - zeros[:, g]).astype(np.float32) * scales[:, g].float().numpy()
        return {
            "qweight": tensor(words_of(codes, bits).T),
            "qzeros": tensor(words_of((zeros - (1 if version == 1 else 0)).T, bits)),
            "scales": scales.T.contiguous(),
            "g_idx": tensor(groups.astype(np.int32)),
        }, numbers

    return pack


def awq(*, group: int = GROUP) -> Packer:
    def ordered(codes: NDArray[Any]) -> NDArray[np.int32]:
        """[rows, outputs], each eight outputs in their places of a word."""
        return words_of(codes.reshape(len(codes), -1, 8)[:, :, list(AWQ_COLUMNS)].reshape(codes.shape), 4)

    def pack(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        num_groups = inputs // group
        codes = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (num_groups, outputs))
        scales = scales_of(rng, num_groups, outputs)
        spread = np.repeat(zeros, group, 0), np.repeat(scales.float().numpy(), group, 0)
        numbers = ((codes - spread[0]).astype(np.float32) * spread[1]).T
        return {"qweight": tensor(ordered(codes)), "qzeros": tensor(ordered(zeros)), "scales": scales}, numbers

    return pack


def compressed(
    *, bits: int = 4, strategy: str = "group", symmetric: bool = True, packed: bool = True, act_order: bool = False
) -> Packer:
    """compressed-tensors of whole numbers: codes are signed, and packed with half of their range added."""

    def pack(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        rows = 1 if strategy == "tensor" else outputs
        num_groups = inputs // GROUP if strategy == "group" else 1
        half = 2 ** (bits - 1)
        codes = rng.integers(-half, half, (outputs, inputs))
        zeros = np.zeros((rows, num_groups), dtype=int) if symmetric else rng.integers(-half, half, (rows, num_groups))
        scales = (scales_of(rng, rows, num_groups) * (8 / half)).to(torch.bfloat16)
        groups = (rng.permutation(inputs) if act_order else np.arange(inputs)) // (inputs // num_groups)
        numbers = (codes - zeros[:, groups]).astype(np.float32) * scales.float().numpy()[:, groups]
        found = {"weight_scale": scales.reshape(1) if strategy == "tensor" else scales}
        if packed:
            found |= {
                "weight_packed": tensor(words_of(codes + half, bits)),
                "weight_shape": torch.tensor([outputs, inputs]),
            }
        else:
            found |= {"weight": tensor(codes.astype(np.int8))}
        if not symmetric:
            stored = words_of((zeros + half).T, bits).T if packed else zeros.astype(np.int8)
            found |= {"weight_zero_point": tensor(stored)}
        if act_order:
            found |= {"weight_g_idx": tensor(groups.astype(np.int32))}
        return found, numbers

    return pack


def eight_bit_floats(
    block: tuple[int, int] | None, name: str, *, by_channel: bool = False, kind: torch.dtype = torch.float8_e4m3fn
) -> Packer:
    """fp8: a scale for each block, for each output, or for all."""

    def pack(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        codes = torch.from_numpy(rng.standard_normal((outputs, inputs)) * 8).to(kind)
        rows, columns = block or ((1, inputs) if by_channel else (outputs, inputs))
        shape = -(-outputs // rows), -(-inputs // columns)
        scales = torch.from_numpy(0.01 + 0.02 * rng.random(shape)).float()
        spread = scales.numpy().repeat(rows, 0)[:outputs].repeat(columns, 1)[:, :inputs]
        is_one = block is None and not by_channel
        found = {"weight": codes, name: scales.reshape(()) if is_one else scales}
        return found, codes.float().numpy() * spread

    return pack


def ct_config(
    bits: int, strategy: str, form: str, *, symmetric: bool = True, kind: str = "int", **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}
    weights |= {"group_size": GROUP} if strategy == "group" else {}
    activations = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None if bits == 4 else activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def gptq_config(**values: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, **values}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}

LAYOUTS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq": (gptq(), gptq_config()),
    "gptq act-order": (gptq(act_order=True), gptq_config(desc_act=True)),
    "gptq sym": (gptq(sym=True, act_order=True), gptq_config(sym=True, desc_act=True)),
    "gptq sym, v2 zeros": (gptq(sym=True, version=2), gptq_config(sym=True)),
    "gptq v2": (gptq(version=2), gptq_config(checkpoint_format="gptq_v2")),
    "gptq 8 bits": (gptq(bits=8), gptq_config(bits=8)),
    "gptq 8 bits act-order": (gptq(bits=8, sym=True, act_order=True), gptq_config(bits=8, sym=True, desc_act=True)),
    "gptq g8": (gptq(group=8), gptq_config(group_size=8)),
    "gptq one group": (gptq(group=-1), gptq_config(group_size=-1)),
    "awq": (awq(), AWQ),
    "awq g16": (awq(group=16), {**AWQ, "group_size": 16}),
    "ct w4a16": (compressed(), ct_config(4, "group", "pack-quantized")),
    "ct w4a16 asym": (compressed(symmetric=False), ct_config(4, "group", "pack-quantized", symmetric=False)),
    "ct w4a16 act-order": (compressed(act_order=True), ct_config(4, "group", "pack-quantized", actorder="group")),
    "ct w4a16 channel": (compressed(strategy="channel"), ct_config(4, "channel", "pack-quantized")),
    "ct w8a16": (compressed(bits=8, strategy="channel"), ct_config(8, "channel", "pack-quantized")),
    "ct w8a16 asym": (
        compressed(bits=8, symmetric=False),
        ct_config(8, "group", "pack-quantized", symmetric=False),
    ),
    "ct w8a8": (compressed(bits=8, strategy="channel", packed=False), ct_config(8, "channel", "int-quantized")),
    "ct w8a8 asym": (
        compressed(bits=8, packed=False, symmetric=False),
        ct_config(8, "group", "int-quantized", symmetric=False),
    ),
    "ct w8a8 tensor": (compressed(bits=8, strategy="tensor", packed=False), ct_config(8, "tensor", "int-quantized")),
    "ct fp8": (
        eight_bit_floats(None, "weight_scale", by_channel=True),
        ct_config(8, "channel", "float-quantized", kind="float"),
    ),
    "ct fp8 tensor": (
        eight_bit_floats(None, "weight_scale"),
        ct_config(8, "tensor", "naive-quantized", kind="float"),
    ),
    "ct fp8 group": (
        eight_bit_floats((1, GROUP), "weight_scale"),
        ct_config(8, "group", "float-quantized", kind="float"),
    ),
    "ct fp8 block": (
        eight_bit_floats((24, 20), "weight_scale"),
        ct_config(8, "block", "float-quantized", kind="float", block_structure=[24, 20]),
    ),
    "fp8 block": (eight_bit_floats((24, 20), "weight_scale_inv"), {**FP8, "weight_block_size": [24, 20]}),
    "fp8 whole blocks": (
        eight_bit_floats((40, 32), "weight_scale_inv"),
        {**FP8, "weight_block_size": [40, 32]},
    ),
    "fp8 tensor": (eight_bit_floats(None, "weight_scale"), {**FP8, "activation_scheme": "static"}),
    "fp8 e5m2": (eight_bit_floats(None, "weight_scale", kind=torch.float8_e5m2), {**FP8, "fmt": "e5m2"}),
}
"""By name: how a weight is packed, and the quantization_config. Blocks of fp8 divide neither the weights nor shares; of
whole ones a tile of inputs has one scale.
"""


@dataclass
class Written:
    """A quantized folder, and the folder of its numbers, rounded to bfloat16."""

    folder: Path
    dequantized: Path
    numbers: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Of each quantized weight, before they are rounded."""

    def change(self, change: Callable[[Tensors], None], config: Mapping[str, Any] | None = None) -> "Written":
        """Writes other tensors, or another quantization_config."""
        tensors = load_file(self.folder / "model.safetensors")
        change(tensors)
        save(self.folder, tensors)
        if config is not None:
            set_config(self.folder, quantization_config=dict(config))
        return self


PLAIN = re.compile(r"embed|lm_head|norm|conv1d|router|gate$|\.wg$")
"""Modules whose weights no checkpoint has quantized."""


def write(family: str, where: Path, layout: str, **changes: Any) -> Written:
    """A tiny model whose linears are quantized, head, table, router and norms not."""
    return quantized(save_tiny_model(family, where / "source", **{**SIZES, **changes}), where, layout)


def quantized(source: Path, where: Path, layout: str) -> Written:
    """The same of a plain folder. Linears of which a layout has no whole groups or words stay as they are."""
    packer, config = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    written = Written(where / "quantized", where / "dequantized")
    packed: Tensors = {}
    plain: Tensors = {}
    for name, values in sorted(load_file(source / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        is_fit = values.dim() == 2 and not values.shape[1] % GROUP and not values.shape[0] % 8
        if module == name or not is_fit or PLAIN.search(module):
            packed[name] = plain[name] = values.bfloat16()
            continue
        tensors, numbers = packer(*values.shape, rng)
        packed |= {f"{module}.{part}": one for part, one in tensors.items()}
        packed |= {f"{module}.input_scale": torch.ones(1)} if config.get("activation_scheme") == "static" else {}
        written.numbers[name] = numbers
        plain[name] = torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16()
    for folder, tensors in ((written.folder, packed), (written.dequantized, plain)):
        shutil.copytree(source, folder)
        save(folder, tensors)
        set_config(folder, dtype="bfloat16")
    set_config(written.folder, quantization_config=config)
    return written


def write_gpt_oss(where: Path, **changes: Any) -> Written:
    """Experts in MXFP4: blocks [expert, out, in / 32, 16] of two numbers a byte, the first in the low bits."""
    sizes = {**SIZES, "num_hidden_layers": 2, "intermediate_size": 64, **changes}
    source = save_tiny_model("gpt_oss", where / "source", **sizes)
    rng = np.random.default_rng(0)
    written = Written(where / "quantized", where / "dequantized")
    quantized: Tensors = {}
    plain: Tensors = {}
    for name, values in sorted(load_file(source / "model.safetensors").items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantized[name] = plain[name] = values.bfloat16()
            continue
        experts, inputs, outputs = values.shape
        codes = rng.integers(0, 16, (experts, outputs, inputs))
        exponents = rng.integers(120, 125, (experts, outputs, inputs // 32))
        blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).reshape(experts, outputs, inputs // 32, 16)
        quantized |= {
            f"{name}_blocks": tensor(blocks.astype(np.uint8)),
            f"{name}_scales": tensor(exponents.astype(np.uint8)),
        }
        numbers = np.array(E2M1, dtype=np.float32)[codes] * (2.0 ** (exponents - 127.0)).repeat(32, -1).astype(
            np.float32
        )
        written.numbers[name] = numbers.swapaxes(1, 2)
        plain[name] = torch.from_numpy(np.ascontiguousarray(written.numbers[name])).bfloat16()
    for folder, tensors in ((written.folder, quantized), (written.dequantized, plain)):
        shutil.copytree(source, folder)
        save(folder, tensors)
        set_config(folder, dtype="bfloat16")
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    set_config(written.folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ignored})
    return written


def save(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
