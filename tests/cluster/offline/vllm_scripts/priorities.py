from vllm import LLM, SamplingParams

llm = LLM(model="demo", scheduling_policy="priority", max_num_seqs=2)
params = SamplingParams(temperature=0, max_tokens=8)
outputs = llm.generate(["A", "B", "C", "D"], params, priority=[0, 1, -1, 0])
assert [output.prompt for output in outputs] == ["A", "B", "C", "D"]
assert llm.generate("A", params, priority=5)[0].outputs[0].text == outputs[0].outputs[0].text
