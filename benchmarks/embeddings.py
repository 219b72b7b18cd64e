"""Vectors of short texts beside peers on the same model: texts per second of CPU time and of wall time.

    python -m benchmarks.embeddings MODEL_FOLDER [--texts 1000] [--dtype float32] [--peer FOLDER] [--openvino FOLDER]
        [--vllm] [--json FILE]

Rounds alternate within one run. `--peer` is a folder that `pip install --target` has put sentence-transformers in; it
would write texts by the model's chat template if there is one. Without it the peer is its method by hand: texts sorted
by length, batches of 32 with padding, transformers' model in torch, the last token or, where the folder says so, the
mean, normalized. `--openvino`: with the package of that name in this folder, the same method with OpenVINO's CPU plugin
is a peer too. `--vllm`: vLLM's pooling (`python -m benchmarks.peers.install vllm`), in a process that is paused while
others run, and is given token ids; its CPU time is not known.
"""

import argparse
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.peers.folders import Folders
from benchmarks.peers.install import DRIVERS
from benchmarks.peers.launch import SETTINGS, variables_of
from benchmarks.peers.peers import PEERS
from benchmarks.peers.server import Server
from holdfast import LLM
from holdfast.worker.models.encoder_families import ENCODERS

OPEN = 256  # requests at a time, of ours and of vLLM
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


def texts_of(count: int) -> list[str]:
    """Texts of 4 to 24 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 24))) for _ in range(count)]


def peer_of(folder: str, place: str | None, threads: int, dtype: str) -> Callable[[Sequence[str]], np.ndarray]:
    """Vectors of texts [texts, hidden], by the peer."""
    import torch

    torch.set_num_threads(threads)
    if place is not None:
        sys.path.append(place)
        models = import_module("sentence_transformers.models")
        transformer = models.Transformer(folder, model_kwargs={"dtype": getattr(torch, dtype)})
        transformer.tokenizer.pad_token = transformer.tokenizer.pad_token or transformer.tokenizer.eos_token
        pooling = models.Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
        modules = [transformer, pooling, models.Normalize()]
        model = import_module("sentence_transformers").SentenceTransformer(modules=modules, device="cpu")
        return lambda texts: model.encode(list(texts), batch_size=32)
    from transformers import AutoModel

    plain = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def states(batch: dict[str, np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            found = plain(**{name: torch.from_numpy(array) for name, array in batch.items()})
        return np.asarray(found.last_hidden_state.float())

    return by_hand(folder, states)


def openvino_of(folder: str, place: str, threads: int, dtype: str) -> Callable[[Sequence[str]], np.ndarray]:
    """The same by OpenVINO."""
    import torch
    from transformers import AutoModel

    sys.path.append(place)
    openvino = import_module("openvino")

    class States(torch.nn.Module):
        """Last hidden states, with a mask that can be traced."""

        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            causal = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool)
            causal = causal if self.model.config.model_type in ENCODERS else causal.tril()
            is_seen = causal[None, None] & attention_mask[:, None, None].bool()
            mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
            found: torch.Tensor = self.model(input_ids, attention_mask=mask, use_cache=False, return_dict=False)[0]
            return found

    ids = torch.ones(2, 8, dtype=torch.int64)
    traced = openvino.convert_model(States(), example_input={"input_ids": ids, "attention_mask": ids})
    settings = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "INFERENCE_NUM_THREADS": threads,
    }
    compiled = openvino.Core().compile_model(traced, "CPU", settings)
    return by_hand(folder, lambda batch: np.asarray(compiled(batch)[0]))


def vllm_of(folder: str, dtype: str, ends: ExitStack) -> Callable[..., np.ndarray]:
    """The same by vLLM, in a process that ends with `ends`."""
    from transformers import AutoTokenizer

    peer, folders = PEERS["vllm-pooling"], Folders()
    settings = {**SETTINGS, "dtype": dtype, "max_num_seqs": OPEN, "max_model_len": None}
    command: list[str | Path] = [folders.python(peer.environment), DRIVERS / peer.driver, folder, json.dumps(settings)]
    server = Server(peer.name, command, variables_of(peer, folders), folders.log(peer.name))
    ends.callback(server.close)
    server.await_ready()
    server.pause()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def vectors(texts: Sequence[str], numbers: int = 0) -> np.ndarray:
        """That many numbers of each: more take time on the way here."""
        return np.array(server.ask("vectors", tokenizer(list(texts))["input_ids"], numbers).ids)

    return vectors


def by_hand(
    folder: str, states: Callable[[dict[str, np.ndarray]], np.ndarray]
) -> Callable[[Sequence[str]], np.ndarray]:
    """The method of sentence-transformers, with `states` [texts, tokens, hidden] of a padded batch."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    pooling = Path(folder) / "1_Pooling" / "config.json"
    is_mean = pooling.is_file() and json.loads(pooling.read_text()).get("pooling_mode_mean_tokens", False)

    def pool(states: np.ndarray, mask: np.ndarray) -> np.ndarray:
        last = states[np.arange(len(states)), mask.sum(1) - 1]
        mean = np.einsum("bth,bt->bh", states, mask) / mask.sum(1, keepdims=True)
        return np.asarray(mean if is_mean else last)

    def vectors(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        found: list[np.ndarray] = [np.zeros(0)] * len(texts)
        for start in range(0, len(order), 32):
            some = order[start : start + 32]
            encoded = tokenizer([texts[at] for at in some], padding=True, return_tensors="np")
            batch = {name: encoded[name] for name in ("input_ids", "attention_mask")}
            pooled = pool(states(batch), batch["attention_mask"])
            for at, vector in zip(some, pooled / np.linalg.norm(pooled, axis=-1, keepdims=True), strict=True):
                found[at] = vector
        return np.stack(found)

    return vectors


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of CPU time, of all threads of this process, and of wall time."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.perf_counter() - start


def peers_of(given: argparse.Namespace, ends: ExitStack) -> dict[str, Callable[..., np.ndarray]]:
    """What the command line asks for, by name."""
    peers: dict[str, Callable[..., np.ndarray]] = {
        "peer": peer_of(given.folder, given.peer, given.threads, given.dtype)
    }
    if given.openvino is not None:
        peers["OpenVINO"] = openvino_of(given.folder, given.openvino, given.threads, given.dtype)
    if given.vllm:
        peers["vLLM"] = vllm_of(given.folder, given.dtype, ends)
    return peers


def measure(given: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each round, as `timed`, by who computed it."""
    texts = texts_of(given.texts)
    settings = {"runner": "pooling", "dtype": given.dtype, "max_num_seqs": OPEN, "num_threads": given.threads}
    with LLM(given.folder, **settings) as llm, ExitStack() as ends:
        ours = np.array([one.outputs.embedding for one in llm.embed(texts[:64])])
        peers = peers_of(given, ends)
        for name, peer in peers.items():
            theirs = peer(texts[:64], numbers=ours.shape[1]) if name == "vLLM" else peer(texts[:64])
            print(f"largest difference from {name}: {np.abs(ours - theirs).max():.2g}")
        works: dict[str, Callable[[Sequence[str]], object]] = {"own": llm.embed, **peers}
        times = [{name: timed(partial(work, texts)) for name, work in works.items()} for _ in range(given.rounds)]
    return {name: [one[name] for one in times] for name in works}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--peer")
    parser.add_argument("--openvino")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given)
    print(f"load {os.getloadavg()[0]:.1f}")
    for at, kind in enumerate(("CPU", "wall")):
        seconds = {name: median(one[at] for one in times) for name, times in found.items()}
        for name, other in seconds.items():
            if kind == "wall" or name != "vLLM":
                print(f"{kind}, {name}: {given.texts / other:.0f} texts/s, own {other / seconds['own']:.2f} times")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
