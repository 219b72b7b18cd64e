import json

from vllm import LLM, SamplingParams

TEMPLATE = """{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "The current weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
llm = LLM(model="demo", max_model_len=512)
messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), tools=tools, chat_template=TEMPLATE)[0]
prompt = llm.get_tokenizer().decode(output.prompt_token_ids)
assert json.loads(prompt.splitlines()[0])["function"]["name"] == "get_current_weather"
assert prompt.endswith("assistant:")

messages.append({"role": "assistant", "content": output.outputs[0].text})
messages.append({"role": "tool", "content": "98 degrees", "tool_call_id": "a12345678"})
again = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), tools=tools, chat_template=TEMPLATE)[0]
assert "tool: 98 degrees" in llm.get_tokenizer().decode(again.prompt_token_ids)
