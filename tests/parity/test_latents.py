"""Models with latent attention say the same, to the last bit, however their requests are cut, packed and shared."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.memory import MemoryEstimator
from holdfast.worker.request import EngineRequest, Priority
from tests.parity.harness import is_run_by, load, logits_in_chunks, on_ranks, worker_config
from tests.parity.hybrids import Said, drafting_config, request, run_all, scheduler_of, start, told_alone

NUM_NEW = 14
FAMILY = "deepseek_v3"


@pytest.fixture(scope="module")
def folder(tiny_model) -> Path:
    made: Path = tiny_model(FAMILY)
    return made


@pytest.fixture(scope="module")
def leader(folder) -> LeaderRunner:
    return load(drafting_config(folder))


@pytest.fixture(scope="module")
def whole(leader, prompts) -> list[torch.Tensor]:
    return logits_in_chunks(leader, prompts, 128)


@pytest.fixture(scope="module")
def requests(prompts) -> list[EngineRequest]:
    """Short ones, one that has the beginning of a long one, and one whose greedy tokens repeat, which are drafted."""
    texts = [*prompts, prompts[0][:40] + prompts[2]]
    drawn = [request(str(number), text, NUM_NEW) for number, text in enumerate(texts)]
    greedy = request("greedy", prompts[1] * 2, 40)
    return [*drawn, replace(greedy, sampling_params=replace(greedy.sampling_params, temperature=0.0))]


@pytest.fixture(scope="module")
def alone(leader, requests) -> Said:
    """What each is told by itself, without a cache."""
    return told_alone(leader, requests)


def test_prompts_have_the_same_bits_in_any_chunks(leader, prompts, whole):
    assert is_run_by(leader, "native")
    assert leader._runner.info.row_invariant
    for chunk in (1, 7, 64):
        assert all(map(torch.equal, logits_in_chunks(leader, prompts, chunk), whole)), chunk


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_bits_of_one(size, folder, prompts, whole):
    assert all(
        map(torch.equal, on_ranks(drafting_config(folder, size), lambda one: logits_in_chunks(one, prompts, 7)), whole)
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks of 7": {"max_num_batched_tokens": 8},
    "with drafts": {"drafts": 8},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_requests_are_told_the_same_in_any_company_and_from_the_cache(name, leader, requests, alone):
    scheduler = scheduler_of(leader, **SETTINGS[name])
    assert run_all(scheduler, leader, requests) == alone
    assert run_all(scheduler, leader, requests) == alone
    assert scheduler.stats().num_prefix_hit_tokens > 0
    if "drafts" in name:
        assert scheduler.stats().num_draft_tokens > 0


def test_preempted_they_are_told_the_same(leader, requests, alone):
    scheduler = scheduler_of(leader, 8, max_num_seqs=2, prefix_caching=False)
    first = start(scheduler, leader, [replace(each, priority=Priority.LOW) for each in requests[1:3]], num_steps=9)
    rest = run_all(scheduler, leader, [requests[0]])
    assert {name: first.get(name, []) + said for name, said in rest.items()} == {
        name: alone[name] for name in ("0", "1", "2")
    }
    assert scheduler.stats().num_preemptions > 0


def test_the_cache_keeps_latents_alone_on_every_rank(folder, leader):
    """24 numbers a token and layer, filled up to 32."""
    info = leader._runner.info
    assert info.kv_bytes_per_token == 2 * 32 * 4
    assert {MemoryEstimator(worker_config(folder, size)).kv_bytes_per_token for size in (1, 2)} == {2 * 32 * 4}
    expanded = MemoryEstimator(worker_config(folder, executor="hf")).kv_bytes_per_token
    assert expanded == 2 * 4 * (32 + 16) * 4


def test_int8_is_refused_for_latents(folder):
    worker = worker_config(folder)
    worker = worker.model_copy(update={"cache": worker.cache.model_copy(update={"kv_cache_dtype": "int8"})})
    with pytest.raises(ConfigurationError, match="one scale in int8"):
        load(worker)
    with pytest.raises(ConfigurationError, match="one scale in int8"):
        MemoryEstimator(worker)


# --- other files of such models ---


def written(folder: Path, source: Path, name_of: Callable[[str], str], **changes: Any) -> Path:
    """The model of another folder, with other names of tensors and another config.json."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    more = {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}
    save_file({name_of(name): one for name, one in {**tensors, **more}.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(changes))
    return folder


def test_kimi_k2_is_deepseek_v3(folder, tmp_path, prompts, whole):
    """As its files are on the hub: with code of their own, which is not run; and layers that draft."""
    found = json.loads((folder / "config.json").read_text())
    kimi = {**found, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    plain = written(tmp_path / "plain", folder, str, **kimi)
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": kimi}
    inside = written(tmp_path / "inside", folder, lambda name: f"language_model.{name}", **outer)
    for one in (plain, inside):
        assert all(map(torch.equal, logits_in_chunks(load(worker_config(one)), prompts, 64), whole)), one.name
        assert MemoryEstimator(worker_config(one)).kv_bytes_per_token == 2 * 32 * 4


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v4", "glm5_next", "glm_moe_dsa"])
def test_a_model_of_which_a_part_is_not_there_is_refused_by_name(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 32}))
    with pytest.raises(UnsupportedModelError, match=rf"{model_type}.*(sparse|Delta) [aA]ttention: .* not implemented"):
        load(worker_config(tmp_path, load_format="dummy"))
