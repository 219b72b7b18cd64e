from vllm import LLM, SamplingParams

llm = LLM(
    model="demo", speculative_config={"model": "demo-draft", "num_speculative_tokens": 3, "method": "draft_model"}
)
output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=12))[0]
assert "Paris" in output.outputs[0].text
