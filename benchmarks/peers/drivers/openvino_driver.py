"""Driver of OpenVINO GenAI: its continuous batching pipeline, whose loop is its own."""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from line_server import Generate, Output, Prompts, Sampling, serve, split_at


def load(model: str, settings: dict[str, Any]) -> Generate:
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, _scheduling(settings), "CPU", _properties(settings))

    def generate(prompts: Prompts, max_tokens: int, split: bool, sampling: Sampling) -> Output:
        started_s = time.perf_counter()
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = pipeline.generate(inputs, [_config(max_tokens, sampling, seed) for seed in range(len(inputs))])
        total_s = time.perf_counter() - started_s
        return Output([list(result.m_generation_ids[0]) for result in results], _parts(results, total_s))

    return generate


def _properties(settings: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": settings["num_threads"],
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
    }
    if precision := settings.get("kv_precision"):
        properties["KV_CACHE_PRECISION"] = precision  # u8 by default
    return properties


def _scheduling(settings: dict[str, Any]) -> openvino_genai.SchedulerConfig:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = settings["kv_cache_bytes"] >> 30
    scheduling.max_num_batched_tokens = settings["max_num_batched_tokens"]
    scheduling.max_num_seqs = settings["max_num_seqs"]
    scheduling.enable_prefix_caching = True
    scheduling.dynamic_split_fuse = True
    return scheduling


def _config(max_tokens: int, sampling: Sampling, seed: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.min_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = bool(sampling)
    if sampling:
        config.rng_seed = seed
    for name, value in sampling.items():
        if name == "json_schema":
            config.structured_output_config = openvino_genai.StructuredOutputConfig(json_schema=value)
        else:
            setattr(config, name, int(value) if name == "logprobs" else value)
    return config


def _parts(results: list[Any], total_s: float) -> dict[str, float]:
    try:
        first_s = max(result.perf_metrics.get_ttft().mean for result in results) / 1e3
    except (AttributeError, RuntimeError):
        return {}
    return split_at(first_s, total_s) if 0 < first_s < total_s else {}


if __name__ == "__main__":
    serve(load, ["openvino-genai", "openvino"])
