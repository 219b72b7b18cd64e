from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams

llm = LLM(model="demo", guided_decoding_backend="auto")
guided = GuidedDecodingParams(choice=["yes", "no"])
outputs = llm.generate(["Is the sky blue?"] * 3, SamplingParams(guided_decoding=guided, max_tokens=10))
assert all(output.outputs[0].text in ("yes", "no") for output in outputs)
