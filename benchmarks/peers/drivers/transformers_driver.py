"""Driver of transformers: continuous batching with `sdpa` attention over pages."""

import time
from typing import Any

import torch
from line_server import Generate, Output, Prompts, Sampling, serve, split_at
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

PAGE_SIZE = 256
MAX_TOKENS = 40_000
"""Enough for every case. Each step handles masks as large as the cache: a larger one would only slow it down."""


def load(model: str, settings: dict[str, Any]) -> Generate:
    torch.set_num_threads(settings["num_threads"])
    torch.set_grad_enabled(False)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
    ).eval()
    manager = _manager(loaded, settings)

    def generate(prompts: Prompts, max_tokens: int, split: bool, sampling: Sampling) -> Output:
        if sampling:
            raise NotImplementedError("this driver decodes greedily alone")
        started_s = time.perf_counter()
        names = [
            manager.add_request(ids, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1) for ids in prompts
        ]
        outputs: dict[str, list[int]] = {}
        first_s: dict[str, float] = {}
        unfinished = set(names)
        while unfinished:
            result = _next_result(manager)
            if result.generated_tokens:
                first_s.setdefault(result.request_id, time.perf_counter() - started_s)
                outputs[result.request_id] = list(result.generated_tokens)
            if result.is_finished():
                unfinished.discard(result.request_id)
        total_s = time.perf_counter() - started_s
        return Output([outputs[name] for name in names], split_at(max(first_s.values()), total_s))

    return generate


def _manager(model: Any, settings: dict[str, Any]) -> Any:
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    num_tokens = min(settings["kv_cache_bytes"] // bytes_per_token, MAX_TOKENS)
    batching = ContinuousBatchingConfig(
        num_blocks=num_tokens // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_batch_tokens=settings["max_num_batched_tokens"],
        max_requests_per_batch=settings["max_num_seqs"],
        use_cuda_graph=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
    manager.start()
    return manager


def _next_result(manager: Any) -> Any:
    while (result := manager.get_result(timeout=1)) is None:
        if not manager.is_running():
            raise RuntimeError("the generation thread has ended")
    if result.error:
        raise RuntimeError(result.error)
    return result


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
