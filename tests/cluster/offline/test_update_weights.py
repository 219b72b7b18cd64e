"""Weights are replaced in a running engine: what runs finishes or goes on, and the rest is as if started anew."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.offline.local_router import LocalReplica
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.errors import ConfigurationError, HoldfastError, InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from tests.parity.families import save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
PROMPTS = ([5, 6, 7, 8] * 10, [9, 10, 11])
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory) -> list[Path]:
    """Two models that differ in their weights alone, with a tokenizer."""
    other = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(tiny_model, other)
    noise = torch.Generator().manual_seed(1)
    tensors = load_file(other / "model.safetensors")
    changed = {name: own * (1 + 0.5 * torch.randn(own.shape, generator=noise)) for name, own in tensors.items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    return [tiny_model, other]


def loaded(folder: Path, executor: str = "native", **settings: object) -> LLM:
    return LLM(str(folder), num_threads=1, num_blocks=64, block_size=16, executor=executor, **settings)


def answers(llm: LLM) -> list:
    outputs = llm.generate(list(PROMPTS), GREEDY)
    return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in outputs]


@pytest.fixture(scope="module")
def known(folders) -> dict[tuple[int, str], list]:
    """What each model says by itself."""
    found = {}
    for executor in ("native", "hf"):
        for number, folder in enumerate(folders):
            with loaded(folder, executor) as llm:
                found[number, executor] = answers(llm)
        assert found[0, executor] != found[1, executor]
    return found


@pytest.mark.parametrize("executor", ["native", "hf"])
def test_a_folder_takes_the_place_of_the_weights(folders, known, executor):
    with loaded(folders[0], executor) as llm:
        before = llm.engine.info.fingerprint
        assert answers(llm) == answers(llm) == known[0, executor]
        assert llm.update_weights(folders[1], "step-1") == "step-1"
        fresh = llm.generate(PROMPTS[0], GREEDY)[0]
        assert fresh.num_cached_tokens == 0, "what was cached belongs to other weights"
        assert answers(llm) == known[1, executor]
        assert "/step-1/" in llm.engine.info.fingerprint
        assert llm.engine.info.fingerprint != before
        assert llm.update_weights(folders[0]) == "update-2"
        assert answers(llm) == known[0, executor]


def test_tensors_take_the_place_of_those_of_their_names(folders, known, tmp_path):
    theirs = load_file(folders[1] / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    shutil.copytree(folders[0], tmp_path / "mixed")
    tensors = load_file(folders[0] / "model.safetensors") | {name: theirs[name]}
    save_file(tensors, tmp_path / "mixed/model.safetensors", metadata={"format": "pt"})
    with loaded(tmp_path / "mixed") as other:
        mixed = answers(other)
    with loaded(folders[0]) as llm:
        llm.update_weights({name: theirs[name].double()})
        assert answers(llm) == mixed
        llm.update_weights(theirs.items())
        assert answers(llm) == known[1, "native"]


def test_what_does_not_fit_is_refused_and_the_old_weights_stay(folders, known, tmp_path):
    other = save_tiny_model("qwen2", tmp_path / "other", max_position_embeddings=256)
    norm = load_file(folders[1] / "model.safetensors")["model.norm.weight"]
    with loaded(folders[0]) as llm:
        for weights, error, message in (
            (tmp_path / "none", ConfigurationError, "config.json"),
            (other, ConfigurationError, "model_type"),
            ({"model.nonsense": norm}, InvalidRequestError, "model.nonsense"),
            ({"model.norm.weight": norm[:1]}, InvalidRequestError, "must have shape"),
            ({"model.norm.weight": [1.0]}, InvalidRequestError, "model.norm.weight"),
            (5, InvalidRequestError, "weights"),
        ):
            with pytest.raises(error, match=message):
                llm.update_weights(weights)
        for arguments in ({"running": "abort"}, {"version": "two\nlines"}):
            with pytest.raises(InvalidRequestError):
                llm.update_weights(folders[1], **arguments)
        assert answers(llm) == known[0, "native"]
    with pytest.raises(HoldfastError):
        llm.update_weights(folders[1])


class Begun:
    """A long request that has begun, and what came of it."""

    def __init__(self, engine: InferenceEngine, num_tokens: int = 5) -> None:
        self.has_begun = threading.Event()
        self._num_tokens = num_tokens
        self.handle = engine.submit_request(PROMPTS[1], LONG, callback=self._look)
        assert self.has_begun.wait(TIMEOUT_S)

    def _look(self, output) -> None:
        if len(output.outputs[0].token_ids) >= self._num_tokens:
            self.has_begun.set()

    def token_ids(self) -> list[int]:
        return self.handle.result(TIMEOUT_S).outputs[0].token_ids


def hold_steps(monkeypatch: pytest.MonkeyPatch, until: str, num_free: int = 8) -> None:
    """Lets the next engine run `num_free` plans, and the others after `LocalReplica.<until>`, the update's own call.
    A tiny model is done with a long request before a thread that waits for its first tokens has woken.
    """
    may_go = threading.Event()
    free = iter(range(num_free))
    run, step_of_update = LeaderRunner.run, getattr(LocalReplica, until)

    def held(self, plan):
        assert next(free, None) is not None or may_go.wait(TIMEOUT_S)
        return run(self, plan)

    def release(self):
        step_of_update(self)
        may_go.set()

    monkeypatch.setattr(LeaderRunner, "run", held)
    monkeypatch.setattr(LocalReplica, until, release)


def long_answer(folder: Path) -> list[int]:
    with loaded(folder) as llm:
        return llm.generate([PROMPTS[1]][0], LONG)[0].outputs[0].token_ids


def test_what_runs_finishes_and_what_comes_meanwhile_waits(folders, known, monkeypatch):
    right = long_answer(folders[0])
    hold_steps(monkeypatch, until="retire")
    with loaded(folders[0]) as llm:
        running = Begun(llm.engine)
        updating = threading.Thread(target=llm.update_weights, args=(folders[1],))
        updating.start()
        assert running.token_ids() == right
        updating.join(TIMEOUT_S)
        assert answers(llm) == known[1, "native"]


def test_what_runs_goes_on_with_the_new_weights_after_the_tokens_that_it_has(folders, monkeypatch):
    right = long_answer(folders[0])
    hold_steps(monkeypatch, until="detach")
    with loaded(folders[0]) as llm:
        running = Begun(llm.engine)
        llm.update_weights(folders[1], running="replay")
        token_ids = running.token_ids()
    assert len(token_ids) == LONG.max_tokens
    num_old = next(index for index, (new, old) in enumerate(zip(token_ids, right, strict=True)) if new != old)
    assert num_old >= 5
    with loaded(folders[1]) as llm:
        rest = llm.generate([*PROMPTS[1], *token_ids[:num_old]], LONG)[0].outputs[0].token_ids
    assert token_ids[num_old:] == rest[: LONG.max_tokens - num_old]


def test_many_are_carried_over_together(folders):
    """More than the engine runs at once, some of them still in the router's queue."""
    with loaded(folders[0], max_num_seqs=4, max_num_waiting=4) as llm:
        running = [Begun(llm.engine, 1)] + [llm.engine.enqueue_request([3 + number, 7], LONG) for number in range(20)]
        llm.update_weights(folders[1], running="replay")
        llm.update_weights(folders[0], running="replay")
        assert len(running[0].token_ids()) == LONG.max_tokens
        for handle in running[1:]:
            assert len(handle.result(TIMEOUT_S).outputs[0].token_ids) == LONG.max_tokens
        assert llm.get_stats().num_used_blocks == 0


def test_a_callback_cannot_wait_for_itself(folders):
    refused = []

    def update(output) -> None:
        try:
            llm.update_weights(folders[1])
        except InvalidRequestError as error:
            refused.append(error)

    with loaded(folders[0]) as llm:
        llm.engine.submit_request(PROMPTS[1], GREEDY, callback=update).result(TIMEOUT_S)
    assert refused


@pytest.mark.slow
def test_two_ranks_take_them_together(folders, known):
    with loaded(folders[0], tensor_parallel_size=2) as llm:
        llm.update_weights(folders[1])
        assert answers(llm) == known[1, "native"]
        with pytest.raises(ConfigurationError):
            llm.update_weights("/nowhere")
        llm.update_weights(load_file(folders[0] / "model.safetensors"))
        assert answers(llm) == known[0, "native"]
