from vllm import LLM, SamplingParams

prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. " * 3
prompts = [prefix + prompt for prompt in ("Hello, my name is", "The president is", "The future is")]
greedy = SamplingParams(temperature=0.0, max_tokens=10)
regular = LLM(model="demo", enable_prefix_caching=False, max_model_len=512).generate(prompts, greedy)
llm = LLM(model="demo", enable_prefix_caching=True, max_model_len=512)
llm.generate(prompts[0], greedy)
cached = llm.generate(prompts, greedy)
assert [one.outputs[0].text for one in cached] == [one.outputs[0].text for one in regular]
assert all(output.num_cached_tokens > 0 for output in cached)
