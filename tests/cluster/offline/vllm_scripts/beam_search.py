from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="demo", max_model_len=128)
params = BeamSearchParams(beam_width=4, max_tokens=10)
outputs = llm.beam_search([{"prompt": "The largest animal is"}, {"prompt": "The sky is"}], params)
for output in outputs:
    assert len(output.sequences) == 4
    assert all(sequence.cum_logprob < 0 for sequence in output.sequences)
    print(output.sequences[0].text)
