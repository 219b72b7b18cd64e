from vllm import LLM

llm = LLM(model="demo", generation_config="auto", override_generation_config={"temperature": 0.0, "max_new_tokens": 5})
params = llm.get_default_sampling_params()
assert (params.temperature, params.max_tokens) == (0.0, 5)
params.ignore_eos = True
assert len(llm.generate("Hello", params)[0].outputs[0].token_ids) == 5
assert len(llm.generate("The days of the week are")[0].outputs[0].token_ids) <= 5
