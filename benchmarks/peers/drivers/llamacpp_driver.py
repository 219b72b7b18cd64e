"""Driver of llama.cpp through its Python bindings: the batching of its server, over the C interface.

A slot for every request of a burst, prompts and decodes in steps of at most `n_batch` tokens, greedy by the logits.
As in llama.cpp's server, a slot keeps what it holds, and the next prompt in it reuses the tokens they have in common.
"""

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np
from line_server import Generate, Output, Prompts, Sampling, serve, split_at

NUM_SLOTS = 32
SLOT_TOKENS = 1152
"""A slot's share of the cache: the longest case has 1056 tokens."""
Entry = tuple[int, int, int, bool]
"""(slot, position, token id, whether its logits are wanted)"""


class Slots:
    """A context with its KV cache, and which tokens each slot of it holds."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"{model}: could not be loaded")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = NUM_SLOTS * SLOT_TOKENS
        params.n_seq_max = NUM_SLOTS
        params.n_batch = settings["max_num_batched_tokens"]
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = settings["num_threads"]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"{model}: no context of {params.n_ctx} tokens could be made")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.most_tokens = int(params.n_batch)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._held: list[list[int]] = [[] for _ in range(NUM_SLOTS)]

    def keep_common(self, slot: int, ids: list[int]) -> int:
        """How many of `ids` the slot holds already; the rest of what it held is dropped. The last one never counts."""
        held = self._held[slot]
        common = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        common = min(common, len(ids) - 1)
        llama_cpp.llama_memory_seq_rm(self._memory, slot, common, -1)
        del held[common:]
        return common

    def step(self, entries: list[Entry]) -> dict[int, int]:
        """The likeliest next token of each slot whose logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (slot, position, token, is_wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = slot, is_wanted
            self._held[slot].append(token)
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return {slot: self._likeliest(i) for i, (slot, _, _, is_wanted) in enumerate(entries) if is_wanted}

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, shape=(self._vocab_size,)).argmax())


def load(model: str, settings: dict[str, Any]) -> Generate:
    slots = Slots(model, settings)

    def generate(prompts: Prompts, max_tokens: int, split: bool, sampling: Sampling) -> Output:
        if sampling:
            raise NotImplementedError("this driver decodes greedily alone")
        if len(prompts) > NUM_SLOTS or max(map(len, prompts)) + max_tokens > SLOT_TOKENS:
            raise ValueError(f"there is room for {NUM_SLOTS} requests of {SLOT_TOKENS} tokens")
        started_s = time.perf_counter()
        outputs = _prefill(slots, prompts)
        first_s = time.perf_counter() - started_s
        for step in range(max_tokens - 1):
            entries = [(slot, len(ids) + step, outputs[slot][-1], True) for slot, ids in enumerate(prompts)]
            for slot, token in slots.step(entries).items():
                outputs[slot].append(token)
        return Output(outputs, split_at(first_s, time.perf_counter() - started_s))

    return generate


def _prefill(slots: Slots, prompts: Prompts) -> Prompts:
    """The first token of each prompt. All prompts are computed before the first decode step."""
    entries = [
        (slot, position, ids[position], position == len(ids) - 1)
        for slot, ids in enumerate(prompts)
        for position in range(slots.keep_common(slot, ids), len(ids))
    ]
    outputs: Prompts = [[] for _ in prompts]
    for start in range(0, len(entries), slots.most_tokens):
        for slot, token in slots.step(entries[start : start + slots.most_tokens]).items():
            outputs[slot].append(token)
    return outputs


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
