"""Quantization at load once more, as docs/quantization.md has its rule, in numpy and without Holdfast's code: codes and
scales of a weight, and the folder that a plain one becomes when they are dequantized.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

GROUP = 32
FURTHEST = [sign * steps / 4 for steps in range(24, 37) for sign in (1, -1)]
"""Where the largest magnitude of a group lies, in scales."""

Codes = tuple[NDArray[np.float32], torch.Tensor]
"""Codes [out, in], as numbers, and scales [out, groups] in the weight's dtype."""


def four_bits(weight: torch.Tensor, group: int = GROUP) -> Codes:
    x = weight.float().numpy().reshape(len(weight), -1, group)
    largest = np.abs(x).max(-1, keepdims=True)
    factor = np.divide(np.float32(32767), largest, out=np.zeros_like(largest), where=largest > 0)
    t = np.rint(x * factor).astype(np.int64)
    squared = np.zeros(x.shape[:2])
    numbers, selves = np.zeros(x.shape[:2]), np.ones(x.shape[:2])
    for furthest in FURTHEST:
        product = (t * int(furthest * 2048) + 2**14) >> 15
        code = np.clip((product + 2**10) >> 11, -8, 7)
        own, by = (t * code).sum(-1).astype(float), (code * code).sum(-1).astype(float)
        is_more = own * own * selves > squared * by
        squared, numbers, selves = (
            np.where(is_more, ours, old) for ours, old in ((own * own, squared), (own, numbers), (by, selves))
        )
    best = (numbers / selves * largest[..., 0] / 32767).astype(np.float32)
    scales = without_zeros(torch.from_numpy(best).to(weight.dtype))
    codes = np.clip(np.rint(x / scales.float().numpy()[..., None]), -8, 7).astype(np.int8)
    return codes.reshape(weight.shape).astype(np.float32), scales


def eight_bits(weight: torch.Tensor) -> Codes:
    x = weight.float().numpy()
    scales = without_zeros(torch.from_numpy(np.abs(x).max(1, keepdims=True) / np.float32(127)).to(weight.dtype))
    return np.clip(np.rint(x / scales.float().numpy()), -127, 127).astype(np.int8).astype(np.float32), scales


def eight_bit_floats(weight: torch.Tensor) -> Codes:
    """The nearest number E4M3; of two that are as near, that with the even code."""
    x = weight.float().numpy()
    scales = without_zeros(torch.from_numpy(np.abs(x).max(1, keepdims=True) / np.float32(448)).to(weight.dtype))
    steps = np.clip(x / scales.float().numpy(), -448, 448)
    known = np.array([eight_bit_float(code) for code in range(127)])
    between = (known[1:] + known[:-1]) / 2
    code = np.searchsorted(between, np.abs(steps))
    is_tie = np.abs(steps) == np.append(between, np.inf)[code]
    code = np.where(is_tie & (code % 2 == 1), code + 1, code)
    return (np.sign(steps) * known[code]).astype(np.float32), scales


def eight_bit_float(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def without_zeros(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def numbers_of(codes: Codes) -> torch.Tensor:
    """Dequantized, rounded to bfloat16."""
    found, scales = codes
    spread = scales.float().numpy().repeat(found.shape[1] // scales.shape[1], 1)
    return torch.from_numpy(np.ascontiguousarray(found.astype(np.float32) * spread)).bfloat16()


OF_LINEARS = {"int4": four_bits, "int8": eight_bits, "fp8": eight_bit_floats}
OF_HEADS = {"int4": eight_bits, "int8": eight_bits, "fp8": eight_bit_floats}


def in_bfloat16(folder: Path) -> Path:
    """The folder itself, its numbers rounded."""
    tensors = {name: one.bfloat16() for name, one in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, dtype="bfloat16")
    return folder


STAY = re.compile(r"embed|norm|conv1d|router|gate$|\.wg$")
"""Modules of two dimensions whose weights stay as they are."""


def as_linear(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """Numbers of a linear's codes."""
    fits = quantization != "int4" or weight.shape[1] % GROUP == 0
    return numbers_of((OF_LINEARS[quantization] if fits else eight_bits)(weight))


def dequantized(folder: Path, quantization: str, where: Path) -> Path:
    """What a plain folder becomes: its linears and its head are coded, and the head is no table any more."""
    shutil.copytree(folder, where)
    tensors = load_file(folder / "model.safetensors")
    if not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in tensors):
        table = next(name for name in tensors if re.search(r"(embed_tokens|embed_in|embeddings)\.weight$", name))
        tensors["lm_head.weight"] = tensors[table].clone()
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        if module.endswith(("lm_head", "embed_out")):
            tensors[name] = numbers_of(OF_HEADS[quantization](values))
        elif module != name and ".layers." in name and values.dim() == 2 and not STAY.search(module):
            tensors[name] = as_linear(values, quantization)
        elif ".layers." in name and values.dim() == 3 and 1 not in values.shape:  # experts in one tensor
            tensors[name] = torch.stack([as_linear(expert, quantization) for expert in values])
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    set_config(where, tie_word_embeddings=False)
    return where


def set_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
