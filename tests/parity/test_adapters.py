"""Adapters offline: whatever happens to a request, it has the tokens that its adapter merged into the model gives."""

import shutil
import threading

import pytest

from holdfast import LLM, LoRARequest, SamplingParams
from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from holdfast.worker.model_info import adapter_of
from tests.worker.models.adapter_folders import TABLES, merge, save_adapter

LONG = "It is a fine day, and the people of the town go to the market to buy bread, milk, eggs, apples and fish. " * 2
"""Some blocks of the cache, which requests of one adapter share."""
PROMPTS = [
    LONG + prompt
    for prompt in [
        "The capital of France is",
        "Two plus two is",
        "Once upon a time there was",
        "A list of colours: red,",
    ]
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=0)
SMALL = {"dtype": "float32", "max_model_len": 128}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    base = bundled_path("demo")
    adapters = [
        save_adapter(base, root / f"adapter{seed}", seed=seed, std=0.06, targets=targets, tables=tables)
        for seed, targets, tables in (
            (1, None, ()),
            (2, ("q_proj", "v_proj"), TABLES),
            (3, ("down_proj", "o_proj"), ()),
        )
    ]
    return root, base, adapters


def requests(adapters):
    return [LoRARequest(f"lora-{number}", number, str(folder)) for number, folder in enumerate(adapters, 1)]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(outputs):
    return [[next(iter(one.values())).logprob for one in output.outputs[0].logprobs] for output in outputs]


@pytest.fixture(scope="module")
def alone(folders):
    """The outputs of each adapter, and of the model alone, each asked by itself."""
    _, base, adapters = folders
    with LLM(str(base), enable_lora=True, max_loras=2, **SMALL) as llm:
        return [
            [llm.generate(prompt, GREEDY, lora_request=lora)[0] for prompt in PROMPTS]
            for lora in (None, *requests(adapters))
        ]


def test_tokens_are_those_of_the_merged_model(folders, alone):
    root, base, adapters = folders
    for number, adapter in enumerate(adapters, 1):
        with LLM(str(merge(base, adapter, root / f"merged{number}")), **SMALL) as llm:
            merged = llm.generate(PROMPTS, GREEDY)
        assert tokens(merged) == tokens(alone[number])
        for found, expected in zip(logprobs(alone[number]), logprobs(merged), strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
        assert tokens(alone[number]) != tokens(alone[0])


def test_in_any_company_cached_drafted_preempted_and_forked(folders, alone):
    """More adapters than are resident at a time, twice, so that the second round finds its prefixes cached."""
    _, base, adapters = folders
    loras = [None, *requests(adapters)]
    asked = [(prompt, lora) for prompt in range(len(PROMPTS)) for lora in range(len(loras))]
    for settings in (
        {"max_loras": 3, "max_num_batched_tokens": 7},
        {"max_loras": 2, "speculative": "ngram"},
        {"max_loras": 1, "num_blocks": 14},
        {"max_loras": 3, "tensor_parallel_size": 2},
    ):
        with LLM(str(base), enable_lora=True, **SMALL, **settings) as llm:
            for _ in range(2):
                found = llm.generate(
                    [PROMPTS[prompt] for prompt, _ in asked], GREEDY, lora_request=[loras[lora] for _, lora in asked]
                )
                for (prompt, lora), output in zip(asked, found, strict=True):
                    assert tokens([output]) == tokens([alone[lora][prompt]]), (settings, prompt, lora)
                    assert logprobs([output]) == logprobs([alone[lora][prompt]])
                    assert output.lora_request == loras[lora]
            forked = llm.generate(PROMPTS[0], SamplingParams(n=3, temperature=0, max_tokens=16), lora_request=loras[1])
            assert {tuple(one.token_ids) for one in forked[0].outputs} == {tuple(alone[1][0].outputs[0].token_ids)}


def test_another_content_under_the_same_name(folders, alone, tmp_path):
    """A number that was not used before has the folder read anew; requests of the old one keep what was read."""
    _, base, adapters = folders
    place = shutil.copytree(adapters[0], tmp_path / "place")
    with LLM(str(base), enable_lora=True, **SMALL) as llm:
        first = LoRARequest("policy", 1, str(place))
        assert tokens(llm.generate(PROMPTS, GREEDY, lora_request=first)) == tokens(alone[1])
        shutil.rmtree(place)
        shutil.copytree(adapters[1], place)
        assert tokens(llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("policy", 2, str(place)))) == tokens(
            alone[2]
        )
        assert tokens(llm.generate(PROMPTS, GREEDY, lora_request=first)) == tokens(alone[1])


def test_replaced_in_place_under_a_stream(folders, alone, tmp_path):
    """A stream ends with the tokens of the adapter that it began with."""
    _, base, adapters = folders
    place = shutil.copytree(adapters[0], tmp_path / "place")
    policy = LoRARequest("policy", 1, str(place), load_inplace=True)
    with InferenceEngine(str(base), {"model": {"enable_lora": True, "max_loras": 2, **SMALL}}) as engine:
        for before, after in ((1, 2), (2, 3), (3, 3)):  # the last time with files that have not changed
            begun = threading.Event()
            running = engine.enqueue_request(
                PROMPTS[0], GREEDY, lambda _, begun=begun: begun.set(), lora_request=policy
            )
            assert begun.wait(300)
            shutil.copytree(adapters[after - 1], place, dirs_exist_ok=True)
            new = [engine.enqueue_request(prompt, GREEDY, lora_request=policy) for prompt in PROMPTS]
            assert tokens([handle.result() for handle in new]) == tokens(alone[after])
            assert tokens([running.result()]) == tokens(alone[before])[:1]


def test_refused_by_name(folders, tmp_path):
    _, base, adapters = folders
    wrong = save_adapter(base, tmp_path / "wrong", change=lambda config, tensors: config.update(use_dora=True))
    changed = shutil.copytree(adapters[0], tmp_path / "changed")
    with LLM(str(base), enable_lora=True, max_loras=1, **SMALL) as llm:
        with pytest.raises(InvalidRequestError, match="use_dora"):
            llm.generate("x", GREEDY, lora_request=LoRARequest("wrong", 1, str(wrong)))
        with pytest.raises(ConfigurationError, match="cannot be read"):
            llm.generate("x", GREEDY, lora_request=LoRARequest("gone", 1, str(tmp_path / "nowhere")))
        asked = LoRARequest("changed", 1, str(changed))
        llm.generate("x", GREEDY, lora_request=asked)
        (changed / "adapter_config.json").write_text((changed / "adapter_config.json").read_text() + " ")
        llm.generate("x", GREEDY, lora_request=requests(adapters)[1])  # takes the only slot
        with pytest.raises(InvalidRequestError, match=r"it holds .* now"):
            llm.generate("x", GREEDY, lora_request=asked)
    with LLM(str(base), **SMALL) as llm, pytest.raises(InvalidRequestError, match="enable_lora=True"):
        llm.generate("x", GREEDY, lora_request=asked)
    with pytest.raises(ConfigurationError, match="enable_lora"):
        LLM(str(base), enable_lora=True, executor="hf", **SMALL)


def test_the_fingerprint_has_the_digest(alone):
    assert adapter_of("demo/tp1/lora-0123456789abcdef/01234567") == "0123456789abcdef"
    assert adapter_of("demo/tp1/01234567") == ""
