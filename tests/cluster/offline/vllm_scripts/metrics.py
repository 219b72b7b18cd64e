from vllm import LLM, SamplingParams

llm = LLM(model="demo", disable_log_stats=False)
outputs = llm.generate(["Hello, my name is", "The future is"], SamplingParams(max_tokens=8, ignore_eos=True))
for output in outputs:
    assert output.metrics.first_token_latency > 0
    assert output.metrics.first_token_ts <= output.metrics.last_token_ts
    assert output.metrics.num_generation_tokens == 8
values = {metric.name: metric.value for metric in llm.get_metrics()}
assert values["vllm:generation_tokens"] == 16
assert values["vllm:prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
assert values["vllm:num_requests_running"] == 0
