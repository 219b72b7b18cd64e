from vllm import LLM, SamplingParams

llm = LLM(model="demo")
prompt = "The capital of France is"
whole = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0]
assert whole.finish_reason in ("stop", "length")
assert whole.stop_reason is None

stopped = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16, stop=["zzz", "Paris"]))[0].outputs[0]
assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", "Paris", " ")

kept = SamplingParams(temperature=0, max_tokens=16, stop="Paris", include_stop_str_in_output=True)
assert llm.generate(prompt, kept)[0].outputs[0].text == " Paris"

token = whole.token_ids[2]
by_token = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[token]))[0].outputs[0]
assert (by_token.finish_reason, by_token.stop_reason) == ("stop", token)
