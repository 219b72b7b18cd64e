"""Files that hybrids are converted to for llama.cpp say what the folders say."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.peers import models, shapes
from tests.parity.harness import load, logits_in_chunks, worker_config

CONVERTER = Path(models.__file__).parent / "drivers" / "llamacpp_convert.py"
SMALL = {"vocab_size": 512, "hidden_size": 64, "max_position_embeddings": 512, "num_hidden_layers": 4}
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32}
CHANGES = {
    "L": {"intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2},
    "Q": {"intermediate_size": 96, "linear_num_value_heads": 2, **DELTA},
    "F": {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 6}
    | DELTA,
    "G": {"shared_intermediate_size": 96, "intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_head": 16}
    | {"mamba_d_state": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
    "N": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    | {"linear_num_value_heads": 4, **DELTA},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_converted_hybrid_has_the_logits_of_its_folder(name, tmp_path, monkeypatch):
    shape = shapes.SHAPES[name]
    sizes = {**shape.sizes, **SMALL, **CHANGES[name]}
    sizes["layer_types"] = sizes["layer_types"][:1] * 3 + ["full_attention"]
    monkeypatch.setitem(shapes.SHAPES, name, replace(shape, sizes=sizes))
    models.make_model(name, tmp_path / "folder")
    subprocess.run([sys.executable, CONVERTER, tmp_path / "folder", tmp_path / "model.gguf"], check=True)
    prompts = [list(range(40, 75)), [300, 299, 7]]
    expected, said = (
        logits_in_chunks(load(worker_config(tmp_path / one, dtype="bfloat16")), prompts, 16)
        for one in ("folder", "model.gguf")
    )
    assert all(torch.allclose(ours, theirs, atol=2e-3) for ours, theirs in zip(said, expected, strict=True))
    assert float(expected[0].std()) > 0.01
