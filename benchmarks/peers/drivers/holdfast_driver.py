"""Driver of Holdfast: offline `LLM.generate`, one rank."""

import threading
import time
from typing import Any

from line_server import Generate, Output, Prompts, Sampling, serve, split_at

from holdfast import LLM, LoRARequest, SamplingParams, StructuredOutputs
from holdfast.worker.executors.cpu import library


def load(model: str, settings: dict[str, Any]) -> Generate:
    ours = dict(settings["ours"])
    if (chosen := ours.pop("instruction_class", None)) is not None:
        library.runnable_classes = lambda: [chosen]
    shared = {name: settings[name] for name in ("dtype", "max_model_len", "max_num_seqs", "num_threads")}
    adapters = [LoRARequest(str(at), at, path) for at, path in enumerate(settings.get("adapters", ()), 1)]
    if adapters:
        ours |= {"enable_lora": True, "max_loras": len(adapters)}
    llm = LLM(model, **{**shared, "kv_cache_memory": settings["kv_cache_bytes"], **ours})

    def generate(prompts: Prompts, max_tokens: int, split: bool, sampling: Sampling) -> Output:
        plain = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        given = dict(sampling)
        if "json_schema" in given:
            given["structured_outputs"] = StructuredOutputs(json=given.pop("json_schema"))
        params = [plain.with_changes(seed=seed, **given) if given else plain for seed in range(len(prompts))]
        if split:
            return _watched(llm, prompts, params)
        loras = [adapters[at % len(adapters)] for at in range(len(prompts))] if adapters else None
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False, lora_request=loras)
        return Output([list(output.outputs[0].token_ids) for output in outputs], {})

    return generate


def _watched(llm: LLM, prompts: Prompts, params: list[SamplingParams]) -> Output:
    """With a callback for every token, which costs time: only for the split."""
    started_s = time.perf_counter()
    steps_s = llm.get_stats().step_time_s
    first_s: dict[str, float] = {}
    lock = threading.Lock()

    def note(output: Any) -> None:
        with lock:
            first_s.setdefault(output.request_id, time.perf_counter() - started_s)

    handles = [llm.engine.enqueue_request(ids, one, note) for ids, one in zip(prompts, params, strict=True)]
    outputs = [handle.result() for handle in handles]
    total_s = time.perf_counter() - started_s
    parts = split_at(max(first_s.values()), total_s) | {"steps": llm.get_stats().step_time_s - steps_s}
    return Output([list(output.outputs[0].token_ids) for output in outputs], parts)


if __name__ == "__main__":
    serve(load, ["holdfast", "torch", "transformers"])
