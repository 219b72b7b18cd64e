"""Reference of the greedy outputs: did a server compute the model, or something cheaper?

    python -m benchmarks.peers.reference < REQUEST     {"model": PATH, "prompts": [[...]], "outputs": {NAME: [[...]]}}

Each server's ids are fed through Hugging Face's model in float32. Printed as JSON, for each: the share of ids that are
the reference's first choice, and how far below it the others are at most, in logits. Servers that round differently
differ where two ids are nearly as likely; one that computes something else does not come close.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def compare(model: Any, prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, float]:
    gaps: list[float] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output])
        logits = model(ids, logits_to_keep=len(output) + 1).logits[0, :-1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps += (logits.max(1).values - chosen).tolist()
    return {
        "first_choice": sum(gap == 0 for gap in gaps) / len(gaps),
        "largest_gap": max(gaps),
        "num_tokens": len(gaps),
    }


def main() -> None:
    request = json.load(sys.stdin)
    path = Path(request["model"])
    place = {"gguf_file": path.name} if path.is_file() else {}  # a GGUF file is dequantized
    folder = path.parent if path.is_file() else path
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place).eval()
    except (ValueError, StrictDataclassFieldValidationError) as error:
        if not place or ("not supported" not in str(error) and isinstance(error, ValueError)):
            raise
        print("{}")  # transformers reads no GGUF file of this architecture
        return
    outputs = request["outputs"]
    print(json.dumps({name: compare(model, request["prompts"], ids) for name, ids in outputs.items()}))


if __name__ == "__main__":
    main()
