import json

from vllm import LLM, SamplingParams, StructuredOutputsParams

llm = LLM(model="demo", max_model_len=200, structured_outputs_config={"backend": "auto"})


def ask(prompt, structure, **params):
    sampling_params = SamplingParams(structured_outputs=structure, temperature=0.5, seed=1, **params)
    return llm.generate(prompt, sampling_params=sampling_params)[0].outputs[0].text


assert ask("Sentiment of vLLM:", StructuredOutputsParams(choice=["Positive", "Negative"])) in ("Positive", "Negative")
mail = ask("An e-mail address:", StructuredOutputsParams(regex=r"[a-z]{1,8}@[a-z]{1,8}\.com"), max_tokens=40)
assert mail.endswith(".com")
schema = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 8},
        "apis": {"type": "integer", "minimum": 2, "maximum": 5},
    },
    "required": ["brand", "apis"],
    "additionalProperties": False,
}
car = json.loads(ask("A car in JSON:", StructuredOutputsParams(json=schema), max_tokens=80))
assert set(car) == {"brand", "apis"}
grammar = 'start: "SELECT " ("one" | "two") " FROM table"'
assert ask("SQL:", StructuredOutputsParams(grammar=grammar), max_tokens=40).startswith("SELECT ")
