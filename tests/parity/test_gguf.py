"""Served GGUF files: tokens and log-probabilities of the dequantized folder, and Hugging Face's logits in float32."""

import pytest

from holdfast import LLM, SamplingParams
from tests.parity.harness import (
    hugging_face,
    load,
    logits_in_chunks,
    reference_logits,
    relative_difference,
    worker_config,
)
from tests.worker.models.formats.gguf_files import ARCHITECTURES, write_model

PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 40)]
TOLERANCE = 1e-4
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_of_float32_has_the_logits_of_hugging_face(tmp_path, family):
    written = write_model(family, tmp_path)
    ours = logits_in_chunks(load(worker_config(written.file)), PROMPTS, chunk=16)
    assert relative_difference(ours, reference_logits(hugging_face(written.folder), PROMPTS)) <= TOLERANCE


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q4_1"), ("gemma2", "Q8_0"), ("qwen2_moe", "Q4_0")])
def test_a_file_answers_as_its_dequantized_folder(tmp_path, family, kind):
    """Which has no tokenizer of its own, and takes the file's."""
    written = write_model(family, tmp_path, kind)

    def answers(**model: object) -> list[object]:
        with LLM(**model, num_threads=1) as llm:
            outputs = llm.generate(["tt", "(a b c", {"prompt_token_ids": PROMPTS[2]}], PARAMS)
        return [
            (output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs
        ]

    ours = answers(model=str(written.file), quantized_activations="bfloat16")
    assert ours == answers(model=str(written.folder), tokenizer=str(written.file))
