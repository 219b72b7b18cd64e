"""Vectors of short texts beside sentence-transformers on the same model: texts per second of CPU time and of wall time.

    python -m benchmarks.embeddings MODEL_FOLDER [--texts 1000] [--peer FOLDER]

Rounds alternate within one run. `--peer` is a folder that `pip install --target` has put sentence-transformers in; it
would write texts by the model's chat template if there is one. Without it the peer is its method by hand: texts sorted
by length, batches of 32 with padding, transformers' model in torch, the last token, normalized.
"""

import argparse
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from statistics import median

import numpy as np

from holdfast import LLM

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


def texts_of(count: int) -> list[str]:
    """Texts of 4 to 24 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 24))) for _ in range(count)]


def peer_of(folder: str, place: str | None, threads: int) -> Callable[[Sequence[str]], np.ndarray]:
    """Vectors of texts [texts, hidden], by the peer in float32."""
    import torch

    torch.set_num_threads(threads)
    if place is not None:
        sys.path.append(place)
        models = import_module("sentence_transformers.models")
        transformer = models.Transformer(folder, model_kwargs={"dtype": torch.float32})
        transformer.tokenizer.pad_token = transformer.tokenizer.pad_token or transformer.tokenizer.eos_token
        pooling = models.Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
        modules = [transformer, pooling, models.Normalize()]
        model = import_module("sentence_transformers").SentenceTransformer(modules=modules, device="cpu")
        return lambda texts: model.encode(list(texts), batch_size=32)
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    plain = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def vectors(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        found = np.zeros((len(texts), plain.config.hidden_size), dtype=np.float32)
        for start in range(0, len(order), 32):
            some = order[start : start + 32]
            batch = tokenizer([texts[at] for at in some], padding=True, return_tensors="pt")
            with torch.inference_mode():
                states = plain(**batch).last_hidden_state
            last = states[torch.arange(len(some)), batch["attention_mask"].sum(1) - 1]
            found[some] = torch.nn.functional.normalize(last, dim=-1).numpy()
        return found

    return vectors


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of CPU time, of all threads of this process, and of wall time."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer")
    given = parser.parse_args()
    texts, peer = texts_of(given.texts), peer_of(given.folder, given.peer, given.threads)
    settings = {"runner": "pooling", "dtype": "float32", "max_num_seqs": 256, "num_threads": given.threads}
    with LLM(given.folder, **settings) as llm:
        ours = np.array([one.outputs.embedding for one in llm.embed(texts[:64])])
        print(f"largest difference: {np.abs(ours - peer(texts[:64])).max():.2g}; load {os.getloadavg()[0]:.1f}")
        times = [(timed(lambda: llm.embed(texts)), timed(lambda: peer(texts))) for _ in range(given.rounds)]
    for at, kind in enumerate(("CPU", "wall")):
        own, other = (median(one[who][at] for one in times) for who in (0, 1))
        print(f"{kind}: {len(texts) / own:.0f} texts/s, peer {len(texts) / other:.0f}, {other / own:.2f} times")


if __name__ == "__main__":
    main()
