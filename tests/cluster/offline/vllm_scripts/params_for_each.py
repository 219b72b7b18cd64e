from vllm import LLM, SamplingParams

llm = LLM(model="demo", tensor_parallel_size=1, dtype="float32", swap_space=0, disable_log_stats=True)
params = [
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=5, min_p=0.05, repetition_penalty=1.1, max_tokens=8, ignore_eos=True),
]
outputs = llm.generate(["One", "Two", "Three"], params)
assert [[len(one.token_ids) for one in output.outputs] for output in outputs] == [[4], [6, 6], [8]]
