"""Drafts from the outside: the bundled pair, chosen by one word, with grammars and stop strings; and its settings."""

import json
import re

import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path, located
from holdfast.cluster.config.config import load_config
from holdfast.cluster.config.layers import Setting
from holdfast.cluster.offline.llm import LLM
from holdfast.worker.config import ModelConfig, SpeculationConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.sampling_params import SamplingParams

PEOPLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["Anna", "Tom"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 4,
    "maxItems": 4,
}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday Monday Tuesday"
PROMPTS_AND_PARAMS = [
    ("People:", SamplingParams(structured_outputs={"json": PEOPLE}, max_tokens=100, seed=1, logprobs=2)),
    ("People:", SamplingParams(structured_outputs={"json": PEOPLE}, max_tokens=100, temperature=0)),
    ("Code:", SamplingParams(structured_outputs={"regex": "(ab|cd){3,9}"}, max_tokens=30, seed=2)),
    (DAYS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop="Friday Thursday")),
    (DAYS, SamplingParams(seed=3, max_tokens=40, ignore_eos=True, bad_words="Monday", min_tokens=10)),
    ("The capital of France", SamplingParams(seed=4, temperature=0.8, frequency_penalty=0.5, max_tokens=30)),
]


def told(method: str) -> tuple[list, int]:
    """Text, tokens, logprobs and reason of each output, and how many drafts came true."""
    with LLM("demo", speculative=method, num_threads=1, num_blocks=60, max_num_seqs=4) as llm:
        prompts, params = zip(*PROMPTS_AND_PARAMS, strict=True)
        completions = [output.outputs[0] for output in llm.generate(list(prompts), list(params))]
        stats = llm.engine.get_stats()
    outputs = [(item.text, item.token_ids, item.logprobs, item.finish_reason) for item in completions]
    return outputs, stats.num_accepted_tokens


@pytest.fixture(scope="module")
def plain() -> list:
    outputs, num_accepted = told("none")
    assert num_accepted == 0
    return outputs


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft"])
def test_outputs_are_those_without_drafts(plain, method):
    outputs, num_accepted = told(method)
    assert outputs == plain
    assert num_accepted > 10


def test_grammars_and_stops_held(plain):
    assert all(len(json.loads(text)) == 4 for text, *_ in plain[:2])
    assert re.fullmatch("(ab|cd){3,9}", plain[2][0])
    assert "Monday" not in plain[4][0]


def test_the_bundled_model_has_a_draft_model_of_its_own():
    draft = str(bundled_path("demo-draft"))
    assert located(WorkerConfig()).speculation.draft_model == draft
    named = WorkerConfig(
        model=ModelConfig(model="/some/model"), speculation=SpeculationConfig(draft_model="demo-draft")
    )
    assert located(named).speculation.draft_model == draft
    other = WorkerConfig(model=ModelConfig(model="/some/model"))
    assert located(other).speculation.draft_model is None


def test_the_method_is_named_by_one_word_everywhere(tmp_path):
    path = tmp_path / "holdfast.yaml"
    path.write_text("speculation:\n  speculative: suffix\n  num_speculative_tokens: 3\n")
    assert load_config(file=path, environ={}).config.worker.speculation.max_num_drafts == 3
    environ = {"HOLDFAST_SPECULATION__SPECULATIVE": "ngram"}
    assert load_config(environ=environ).config.worker.speculation.max_num_drafts == 8
    with pytest.raises(ConfigurationError, match=r"speculation.speculative = 'magic' \(from --speculative\)"):
        load_config({"speculation.speculative": Setting("magic", "--speculative")}, environ={})


def test_bad_ngram_lengths_are_refused():
    layer = {"speculation.ngram_min": Setting(5, "--ngram-min"), "speculation.ngram_max": Setting(4, "--ngram-max")}
    with pytest.raises(ConfigurationError, match="ngram_min = 5 must be at most ngram_max, 4"):
        load_config(layer, environ={})
