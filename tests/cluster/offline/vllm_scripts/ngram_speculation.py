from vllm import LLM, SamplingParams

speculative_config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
prompts = ["Monday Tuesday Wednesday Monday Tuesday", "one two three four one two three"]
greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
plain = LLM(model="demo").generate(prompts, greedy)
llm = LLM(model="demo", speculative_config=speculative_config, disable_log_stats=False)
guessed = llm.generate(prompts, greedy)
assert [one.outputs[0].token_ids for one in guessed] == [one.outputs[0].token_ids for one in plain]
counts = {metric.name: metric.value for metric in llm.get_metrics()}
assert counts["vllm:spec_decode_num_draft_tokens"] >= counts["vllm:spec_decode_num_accepted_tokens"] > 0
