from vllm import LLM, SamplingParams, TextPrompt, TokensPrompt

llm = LLM(model="demo", tokenizer_mode="auto", trust_remote_code=False)
tokenizer = llm.get_tokenizer()
ids = tokenizer.encode("The capital of France is")
greedy = SamplingParams(temperature=0, max_tokens=8)
by_ids = llm.generate(TokensPrompt(prompt_token_ids=ids), greedy)
by_text = llm.generate([TextPrompt(prompt="The capital of France is")], sampling_params=greedy)
older = llm.generate(prompt_token_ids=[ids], sampling_params=greedy)
texts = {output.outputs[0].text for output in (*by_ids, *by_text, *older)}
assert len(texts) == 1
assert "Paris" in texts.pop()
assert by_ids[0].prompt_token_ids == ids
