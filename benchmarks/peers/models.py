"""Random-weight models that servers run: S has 18.9 million parameters, M the shape of Qwen2.5-0.5B. Hybrids have
fewer layers: L is LFM2-1.2B with 6 of 16, Q is Qwen3.5-0.8B with 8 of 24, G is Granite 4 H micro with 8 of 40, N is
Qwen3-Next with 4 of 48 and 64 of 512 experts; Q, G and N have a quarter of the vocabulary.

    python -m benchmarks.peers.models [--folder FOLDER] [S M L Q G N]

Weights are drawn from a fixed seed and stored as bf16 safetensors, with a tokenizer (`tokenizer.py`): speed does not
depend on what a model says, and nothing has to be downloaded.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    GenerationConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from benchmarks.peers.folders import Folders
from benchmarks.peers.tokenizer import SPECIAL_TOKENS, make_tokenizer

_SEED: Final = 20_261_122
_STANDARD_DEVIATION: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An architecture of Hugging Face's and its sizes."""

    make_config: Callable[..., Any]
    make_model: Callable[..., Any]
    sizes: dict[str, Any]


SHAPES: Final = {
    "S": Shape(
        make_config=LlamaConfig,
        make_model=LlamaForCausalLM,
        sizes={
            "vocab_size": 8192,
            "hidden_size": 384,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 1024,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "M": Shape(
        make_config=Qwen2Config,
        make_model=Qwen2ForCausalLM,
        sizes={
            "vocab_size": 151_936,
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "L": Shape(
        make_config=Lfm2Config,
        make_model=Lfm2ForCausalLM,
        sizes={
            "vocab_size": 65_536,
            "hidden_size": 2048,
            "num_hidden_layers": 6,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 12_288,
            "conv_L_cache": 3,
            "max_position_embeddings": 32_768,
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "Q": Shape(
        make_config=Qwen3_5TextConfig,
        make_model=Qwen3_5ForCausalLM,
        sizes={
            "vocab_size": 62_080,
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 3584,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True,
        },
    ),
    "G": Shape(
        make_config=GraniteMoeHybridConfig,
        make_model=GraniteMoeHybridForCausalLM,
        sizes={
            "vocab_size": 25_088,
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "shared_intermediate_size": 8192,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_d_conv": 4,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
            "position_embedding_type": None,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "N": Shape(
        make_config=Qwen3NextConfig,
        make_model=Qwen3NextForCausalLM,
        sizes={
            "vocab_size": 37_984,
            "hidden_size": 2048,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 5120,
            "num_experts": 64,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": False,
        },
    ),
}


def make_model(name: str, out: Path) -> None:
    """Writes the model and its tokenizer. `out` appears when all of it is there."""
    shape, part = SHAPES[name], out.with_name(f"{out.name}.part")
    vocab_size, max_model_len = shape.sizes["vocab_size"], shape.sizes["max_position_embeddings"]
    first_special = vocab_size - len(SPECIAL_TOKENS)
    special = {"bos_token_id": first_special, "eos_token_id": vocab_size - 1, "pad_token_id": first_special}
    model = shape.make_model(shape.make_config(**shape.sizes, **special))
    draw_weights(model)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(**special, do_sample=False)
    model.save_pretrained(part)
    make_tokenizer(vocab_size, max_model_len).save_pretrained(part)
    part.rename(out)


@torch.no_grad()
def draw_weights(model: Any) -> None:
    """Fills all parameters, norms with 1 and biases with 0, by name: an order that no version shuffles."""
    generator = torch.Generator().manual_seed(_SEED)
    for name, weights in sorted(model.named_parameters()):
        if "norm" in name or name.endswith("bias"):
            weights.fill_(1.0 if "norm" in name else 0.0)
        else:
            weights.copy_(torch.randn(weights.shape, generator=generator) * _STANDARD_DEVIATION)
    model.tie_weights()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--folder", type=Path, default=Folders().root)
    options = parser.parse_args()
    if unknown := set(options.names) - set(SHAPES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    folders = Folders(options.folder)
    for name in options.names or SHAPES:
        out = folders.model(name)
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            make_model(name, out)
        config = json.loads((out / "config.json").read_text())
        size = (out / "model.safetensors").stat().st_size
        print(f"{out}: {config['model_type']}, {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
