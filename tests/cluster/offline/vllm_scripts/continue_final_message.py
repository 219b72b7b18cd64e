from vllm import LLM, SamplingParams

llm = LLM(model="demo")
messages = [
    {"role": "user", "content": "What is the capital of Italy?"},
    {"role": "assistant", "content": "The capital of Italy is"},
]
output = llm.chat(
    messages,
    SamplingParams(temperature=0, max_tokens=8),
    add_generation_prompt=False,
    continue_final_message=True,
    chat_template_kwargs={"enable_thinking": False},
)[0]
assert "Rome" in output.outputs[0].text
assert llm.get_tokenizer().decode(output.prompt_token_ids).endswith("The capital of Italy is")
