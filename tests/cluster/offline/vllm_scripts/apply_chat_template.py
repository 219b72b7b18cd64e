from vllm import LLM, SamplingParams

llm = LLM(model="demo")
tokenizer = llm.get_tokenizer()
messages = [{"role": "user", "content": "What is the capital of Italy?"}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
assert ids == tokenizer.encode(text, add_special_tokens=False)
assert tokenizer.apply_chat_template([messages], add_generation_prompt=True)["input_ids"] == [ids]
assert tokenizer.apply_chat_template(messages, tokenize=False) == text.removesuffix("<|assistant|>")
said = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))[0]
assert said.prompt_token_ids == ids
prompt = {"prompt_token_ids": ids}
assert llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text == said.outputs[0].text
begun = [*messages, {"role": "assistant", "content": "The capital of Italy is"}]
assert tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True).endswith("of Italy is")
