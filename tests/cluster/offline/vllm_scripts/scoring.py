from vllm import LLM, SamplingParams

llm = LLM(model="demo", seed=0)
tokenizer = llm.llm_engine.get_tokenizer()
sampling_params = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, seed=5)
rollout = llm.generate("The weather today is", sampling_params)[0]
completion = rollout.outputs[0]

scoring = sampling_params.clone()
scoring.max_tokens = 1
scoring.logprobs = None
scoring.prompt_logprobs = 0
assert (sampling_params.max_tokens, sampling_params.prompt_logprobs) == (8, None)
whole = [*rollout.prompt_token_ids, *completion.token_ids]
scored = llm.generate({"prompt_token_ids": whole}, scoring)[0].prompt_logprobs[len(rollout.prompt_token_ids) :]
rolled = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
assert [entry[token].logprob for entry, token in zip(scored, completion.token_ids, strict=True)] == rolled
assert llm.llm_engine.model_config.max_model_len >= len(whole)
