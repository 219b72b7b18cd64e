"""Random-weight models that servers run, by their shapes (`shapes.py`).

    python -m benchmarks.peers.models [--folder FOLDER] [S M L Q F G N E]

Weights are drawn from a fixed seed and stored as bf16 safetensors, with a tokenizer (`tokenizer.py`): speed does not
depend on what a model says, and nothing has to be downloaded.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch
from transformers import GenerationConfig

from benchmarks.peers.folders import Folders
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.tokenizer import SPECIAL_TOKENS, make_tokenizer

_SEED: Final = 20_261_122
_STANDARD_DEVIATION: Final = 0.02


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
