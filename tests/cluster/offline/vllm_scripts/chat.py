from vllm import LLM, SamplingParams

llm = LLM(model="demo", seed=42, max_model_len=256, enforce_eager=True)
conversation = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I help you?"},
    {"role": "user", "content": "What is the capital of Italy?"},
]
outputs = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
assert "Rome" in outputs[0].outputs[0].text

conversations = [conversation for _ in range(5)]
outputs = llm.chat(messages=conversations, sampling_params=SamplingParams(temperature=0, max_tokens=20), use_tqdm=True)
assert len({output.outputs[0].text for output in outputs}) == 1
