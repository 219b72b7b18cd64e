from vllm import LLM, SamplingParams

llm = LLM("demo", gpu_memory_utilization=0.8, limit_mm_per_prompt={})
messages = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of Italy?"}],
    }
]
plain = [{"role": "user", "content": "What is the capital of Italy?"}]
greedy = SamplingParams(temperature=0.0, max_tokens=16)
parts = llm.chat(messages, greedy, chat_template_content_format="string")
assert parts[0].outputs[0].text == llm.chat(plain, greedy)[0].outputs[0].text
