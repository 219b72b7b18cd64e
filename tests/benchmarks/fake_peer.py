"""A peer that answers at once: token `i` of a request is its last prompt token plus `i`. It shows how it was asked.

python fake_peer.py MODEL SETTINGS      `fake` in SETTINGS: {"short": true} one token too few, {"dies_at": case}
"""

import os
import sys
from typing import Any

from benchmarks.peers.drivers.line_server import Generate, Output, Prompts, Sampling, serve, split_at


def load(model: str, settings: dict[str, Any]) -> Generate:
    print("what a library prints goes to stderr")
    fake = settings.get("fake", {})

    def generate(prompts: Prompts, max_tokens: int, split: bool, sampling: Sampling) -> Output:
        if fake.get("dies_after", 99) < max_tokens:
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
        if fake.get("refuses"):
            raise ValueError("no")
        length = max_tokens - bool(fake.get("short"))
        return Output([[ids[-1] + i for i in range(length)] for ids in prompts], split_at(0.25, 1.0) if split else {})

    generate.apis = fake.get("apis", {})
    return generate


if __name__ == "__main__":
    serve(load, ["pytest"])
