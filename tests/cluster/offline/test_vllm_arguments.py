"""Arguments of vLLM's constructor: each is a setting of Holdfast's, changes nothing, or is refused by name."""

import json
import warnings

import pytest
import torch
from pydantic import ValidationError

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.sources import leaves
from holdfast.cluster.offline.engine_args import (
    NEUTRAL,
    NONE_IS_DEFAULT,
    REASONS,
    RENAMED,
    WITHOUT_EFFECT,
    translated,
)
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.offline.vllm_methods import default_params
from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams

SETTINGS = {path.rpartition(".")[2] for path, _ in leaves(HoldfastConfig)}


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), dtype="float32", num_threads=1, num_blocks=64) as llm:
        yield llm


def test_no_argument_has_two_fates():
    fates = [RENAMED.keys(), WITHOUT_EFFECT, NEUTRAL.keys(), SETTINGS]
    for index, fate in enumerate(fates):
        assert not any(fate & other for other in fates[index + 1 :])
    assert set(RENAMED.values()) <= SETTINGS
    assert REASONS.keys() <= NEUTRAL.keys()


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_would_change_outputs_is_refused_by_name(name):
    for value in NEUTRAL[name]:
        assert translated({name: value}) == {}
    assert translated({name: None}) == {}
    with pytest.raises(ConfigurationError, match=f"^{name} = "):
        translated({name: "something else"})


def test_what_changes_nothing_is_told_in_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert translated(dict.fromkeys(WITHOUT_EFFECT, 1) | {"max_num_seqs": 3}) == {"max_num_seqs": 3}
    (warning,) = caught
    assert all(name in str(warning.message) for name in WITHOUT_EFFECT)


def test_the_warning_names_the_callers_line(tiny_model):
    with pytest.warns(UserWarning, match="enforce_eager") as caught:
        LLM(str(tiny_model), num_threads=1, num_blocks=8, enforce_eager=True).close()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("given", "kept"), [("fp8", "fp8"), ("fp8_e4m3", "fp8"), ("int8", "int8"), ("auto", "auto"), (None, ...)]
)
def test_what_keys_and_values_are_kept_in_is_a_setting(given, kept):
    assert translated({"kv_cache_dtype": given}).get("kv_cache_dtype", ...) == kept


@pytest.mark.parametrize(("given", "kept"), [(None, ...), ("int4", "int4"), ("fp8", "fp8")])
def test_quantization_is_of_plain_checkpoints(given, kept):
    assert translated({"quantization": given}).get("quantization", ...) == kept


def test_methods_of_checkpoints_are_said_by_the_checkpoint():
    with pytest.warns(UserWarning, match="quantization = 'awq': accepted"):
        assert "quantization" not in translated({"quantization": "awq"})


def test_other_types_of_keys_and_values_are_refused(tiny_model):
    with pytest.raises(ConfigurationError, match=r"cache.kv_cache_dtype = 'fp8_e5m2' \(from LLM\(...\)\)"):
        LLM(str(tiny_model), kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigurationError, match=r"cache.kv_cache_dtype = 'fp8': the model runs"):
        LLM(str(tiny_model), kv_cache_dtype="fp8_e4m3", device="cpu")


def test_arguments_of_other_names_are_settings():
    assert translated({"kv_cache_memory_bytes": 5, "num_gpu_blocks_override": 7, "hf_overrides": None}) == {
        "kv_cache_memory": 5,
        "num_blocks": 7,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"speculative_config": None}, {}),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2}},
            {"speculative": "ngram", "ngram_max": 3, "num_speculative_tokens": 2},
        ),
        ({"speculative_config": {"model": "x"}}, {"speculative": "draft", "draft_model": "x"}),
        ({"spec_method": "suffix", "spec_tokens": 3}, {"speculative": "suffix", "num_speculative_tokens": 3}),
    ],
)
def test_speculation_is_configured_as_vllm_does(arguments, expected):
    assert translated(arguments) == expected


def test_a_method_that_is_not_here_changes_no_token():
    with pytest.warns(UserWarning, match="method 'eagle3'"):
        assert translated({"speculative_config": {"method": "eagle3", "model": "x"}}) == {}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"hf_overrides": lambda config: config}, "hf_overrides"),
        ({"speculative_config": "ngram"}, "speculative_config"),
        ({"tokenizer_revision": "main"}, "tokenizer_revision"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments, name, tiny_model):
    with pytest.raises(ConfigurationError, match=name):
        LLM(str(tiny_model), **arguments)


# --- the model's own defaults ---


def test_a_models_defaults_are_those_of_its_generation_config(tmp_path):
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 99, "do_sample": True, "num_beams": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert default_params(tmp_path, "auto", {}) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=99)
    assert default_params(tmp_path, "vllm", {}) == SamplingParams()
    assert default_params(tmp_path / "none", str(tmp_path), {"top_k": 0}).top_k == 0
    assert default_params(tmp_path / "none", "auto", {}) == SamplingParams()
    with pytest.raises(InvalidRequestError, match="temperature"):
        default_params(tmp_path, "auto", {"temperature": -1})
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="generation_config"):
        default_params(tmp_path, "auto", {})


# --- calls ---


@pytest.mark.parametrize(
    "arguments",
    [
        {"lora_request": "adapter"},
        {"mm_processor_kwargs": {"a": 1}},
        {"tokenization_kwargs": {"truncation": True}},
        {"priority": "high"},
        {"priority": [0]},
        {"prompt_token_ids": [1]},
        {"prompts": [{"prompt": "a", "multi_modal_data": {"image": 1}}, "b"]},
        {"prompts": [{"prompt": "a", "cache_salt": 5}, "b"]},
    ],
)
def test_a_call_that_asks_for_what_is_not_here_is_refused(llm, arguments):
    with pytest.raises(InvalidRequestError):
        llm.generate(**{"prompts": ["a", "b"], **arguments})


def test_a_prompt_with_an_image_is_refused_by_name(llm):
    chat = [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {}}]}]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[1\].type = 'image_url': must be text"):
        llm.chat(chat)
    with pytest.raises(InvalidRequestError, match=r"\['multi_modal_data'\]: must have prompt or"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}})


def test_priorities_of_both_kinds_are_taken(llm):
    one = SamplingParams(max_tokens=1)
    assert len(llm.generate(["a", "b", "c"], one, priority=[Priority.LOW, -3, 0])) == 3
    assert llm.generate("a", one, priority=Priority.HIGH)[0].finished


def test_a_salt_of_one_prompt_keeps_its_prefix_to_itself(llm):
    text = "a prefix that is longer than some blocks of the cache are, all in all, and then some more of it"
    one = SamplingParams(max_tokens=1)
    llm.generate({"prompt": text, "cache_salt": "mine"}, one)
    assert llm.generate({"prompt": text, "cache_salt": "yours"}, one)[0].num_cached_tokens == 0
    assert llm.generate({"prompt": text, "cache_salt": "mine"}, one)[0].num_cached_tokens > 0


def test_what_is_set_after_a_request_was_submitted_holds_for_the_next_one(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    handle = llm.engine.submit_request("hello", params)
    params.max_tokens = 2
    assert len(handle.result(60).outputs[0].token_ids) == 8
    assert len(llm.generate("hello", params)[0].outputs[0].token_ids) == 2


def test_another_tokenizer_and_another_chat_template_are_those_that_are_used(tiny_model, tmp_path):
    """The tokenizer's tokens for the same text are others, and it has no template of its own."""
    content = json.loads((tiny_model / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    given = {"tokenizer": str(tmp_path), "chat_template": tmp_path / "chat.jinja"}
    with LLM(str(tiny_model), num_threads=1, num_blocks=16, **given) as other:
        assert other.get_tokenizer().encode("HELLO") == other.get_tokenizer().encode("hello")
        (said,) = other.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
        assert other.get_tokenizer().decode(said.prompt_token_ids) == "hi!"
        turn = {"chat_template": "{{ messages[0].content }}?"}
        (said,) = other.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), **turn)
        assert other.get_tokenizer().decode(said.prompt_token_ids) == "hi?"
        assert other.engine.info.chat_template == "{% for m in messages %}{{ m.content }}!{% endfor %}"
    with pytest.raises(ConfigurationError, match=r"model\.tokenizer"):
        LLM(str(tiny_model), tokenizer=str(tmp_path / "none"))


def test_overrides_are_part_of_the_fingerprint(tiny_model):
    def fingerprint(**settings: object) -> str:
        with LLM(str(tiny_model), num_threads=1, num_blocks=8, **settings) as llm:
            return llm.engine.info.fingerprint

    assert fingerprint() == fingerprint(hf_overrides={})
    assert fingerprint() != fingerprint(hf_overrides={"rms_norm_eps": 0.25})


def test_none_is_the_default():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {name: changed for name in NONE_IS_DEFAULT if (changed := translated({name: None}))} == {}


@pytest.mark.parametrize(
    ("method", "prompt"), [("generate", "hi"), ("enqueue", "hi"), ("chat", [{"role": "user", "content": "hi"}])]
)
def test_an_argument_that_there_is_not_is_named(llm, method, prompt):
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'prompt_adapter_request'$"):
        getattr(llm, method)(prompt, prompt_adapter_request=None)


@pytest.mark.parametrize(
    ("written", "served"),
    [
        *(("half", "float16"), ("fp16", "float16"), ("torch.float16", "float16"), (torch.float16, "float16")),
        *(("float", "float32"), (torch.float32, "float32"), ("bf16", "bfloat16"), (torch.bfloat16, "bfloat16")),
    ],
)
def test_a_dtype_has_the_spellings_of_torch_and_vllm(written, served):
    assert ModelConfig(model="demo", dtype=written).dtype == served


@pytest.mark.parametrize("written", ["double", torch.float64, "torch.int8", "fp8", "", None, 16])
def test_a_dtype_that_no_model_is_served_in_is_refused(written):
    with pytest.raises(ValidationError, match=r"dtype\n.*'auto', 'float32', 'bfloat16' or 'float16'"):
        ModelConfig(model="demo", dtype=written)
