import warnings

from vllm import LLM, SamplingParams

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    llm = LLM(model="demo", hf_overrides={"rms_norm_eps": 0.5}, enforce_eager=True, distributed_executor_backend="mp")
assert len([warning for warning in caught if "enforce_eager" in str(warning.message)]) == 1
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
changed = llm.generate("The capital of France is", greedy)[0].outputs[0]
assert (
    changed.cumulative_logprob
    != LLM("demo").generate("The capital of France is", greedy)[0].outputs[0].cumulative_logprob
)
