from vllm import LLM, SamplingParams

prompts = ["The capital of France is", "The days of the week are", "Two plus two is", "The sky is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="demo")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    assert [output.prompt for output in outputs] == prompts
    assert all(0 < len(output.outputs[0].token_ids) <= 16 for output in outputs)


main()
