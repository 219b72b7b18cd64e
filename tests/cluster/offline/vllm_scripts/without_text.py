from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

llm = LLM(model="demo", async_scheduling=False)
params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
output = llm.generate(["The capital of France is"], params)[0]
assert output.finished
assert output.outputs[0].text == ""
assert "Paris" in llm.get_tokenizer().decode(output.outputs[0].token_ids)
