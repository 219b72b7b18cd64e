import math

from vllm import LLM, SamplingParams

llm = LLM(model="demo", max_logprobs=20)
output = llm.generate(
    "The capital of France is", SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=1)
)[0]
completion = output.outputs[0]
assert len(completion.logprobs) == len(completion.token_ids)
total = 0.0
for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
    assert 3 <= len(entry) <= 4
    assert entry[token_id].rank == 1
    total += entry[token_id].logprob
assert math.isclose(total, completion.cumulative_logprob)
assert output.prompt_logprobs[0] is None
assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
assert all(isinstance(next(iter(entry.values())).decoded_token, str) for entry in output.prompt_logprobs[1:])
