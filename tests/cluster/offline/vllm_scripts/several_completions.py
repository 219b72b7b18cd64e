from vllm import LLM, SamplingParams

llm = LLM("demo", seed=3, max_num_seqs=16, max_num_batched_tokens=256)
params = SamplingParams(n=4, temperature=1.0, top_p=0.95, max_tokens=12, seed=7)
first = llm.generate(["Once upon a time"], params)[0]
second = llm.generate(["Once upon a time"], params)[0]
assert [one.index for one in first.outputs] == [0, 1, 2, 3]
assert [one.text for one in first.outputs] == [one.text for one in second.outputs]
assert len({one.text for one in first.outputs}) > 1
