"""The layout of a stated family is what is recognized in Hugging Face's modules, field by field and bit by bit."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.models import stated_layout
from holdfast.worker.models.model import build_tree
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.recognize import recognize
from holdfast.worker.models.row_tiles import RowTiles
from holdfast.worker.models.stated_config import read_stated_config
from holdfast.worker.models.weights import read_config
from tests.fake_group import run_ranks
from tests.parity.families import YARN, save_tiny_model

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32

LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LONG_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}
MIXED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, wide heads and biases": ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "llama, heads by the hidden size": ("llama", {"head_dim": None, "num_key_value_heads": None}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with all it may have": ("llama", {"rope_parameters": LONG_YARN}),
    "llama, yarn with a factor of attention": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {**SLIDING, "tie_word_embeddings": False}),
    "qwen2, windows by layer": ("qwen2", MIXED),
    "qwen3": ("qwen3", {}),
    "qwen3, windows and biases": ("qwen3", {**SLIDING, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "rms_norm_eps": 1e-5}),
}
"""By name: the family, and what is changed of its tiny model."""


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory) -> Path:
    family, changes = CASES[request.param]
    return save_tiny_model(family, tmp_path_factory.mktemp("model"), **changes)


def recognized(folder: Path, group: TensorParallelGroup, dtype: str = "auto") -> DecoderLayout:
    """What Hugging Face's modules are read as."""
    config = read_config(folder)
    served = config.dtype if dtype == "auto" else getattr(torch, dtype)
    target = Target(group=group, tiles=RowTiles(CPU), device=CPU, dtype=served)
    settings = ModelConfig(model=str(folder), dtype=dtype)
    layout = recognize(build_tree(settings, folder, config, target, lambda *_: None), group.size)
    assert isinstance(layout, DecoderLayout), layout
    return layout


def stated(folder: Path, group: TensorParallelGroup, dtype: str = "auto") -> DecoderLayout:
    config = read_stated_config(json.loads((folder / "config.json").read_text()))
    served = config.dtype if dtype == "auto" else getattr(torch, dtype)
    return stated_layout.stated_layout(config, folder, group, served)


def differences(ours: object, theirs: object, path: str = "layout") -> list[str]:
    """The places where two parts of layouts differ."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype and bits(ours).equal(bits(theirs))
        return [] if same else [path]
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{path}[{index}]")]
    if is_dataclass(ours) and type(ours) is type(theirs):
        names = [item.name for item in fields(ours)]
        return [
            found
            for name in names
            for found in differences(getattr(ours, name), getattr(theirs, name), f"{path}.{name}")
        ]
    return [] if type(ours) is type(theirs) and ours == theirs else [path]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def differences_on(folder: Path, size: int, dtype: str = "auto") -> list[str]:
    def compared(group: TensorParallelGroup) -> list[str]:
        return differences(stated(folder, group, dtype), recognized(folder, group, dtype))

    return [found for rank in run_ranks(size, compared) for found in rank]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_stated_layout_is_that_which_is_recognized(checkpoint, size):
    assert differences_on(checkpoint, size) == []
