"""Adapters served by the GPU executor, with Triton's interpreter in place of a GPU."""

import pytest

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast import LLM, LoRARequest, SamplingParams
from holdfast.worker.engine import model_runner
from holdfast.worker.executors.gpu.executor import NUMERICS, GpuExecutor
from holdfast.worker.models import native_backend as backend
from tests.worker.models.adapter_folders import TABLES, merge, save_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SETTINGS = {"dtype": "float32", "max_model_len": 64}


@pytest.fixture
def interpreted(monkeypatch):
    """Replicas run on the GPU executor; the check of their rows, which takes long here, is left out."""

    def executor(layout, group, max_positions, device, pool):
        made = GpuExecutor(layout, group, max_positions=max_positions, device=device, launch=launch)
        return made, NUMERICS

    monkeypatch.setattr(backend, "_executor", executor)
    monkeypatch.setattr(model_runner, "_self_check", lambda *_: True)


def ask(llm, loras):
    outputs = llm.generate([{"prompt_token_ids": [1, 2, 3]}] * len(loras), GREEDY, lora_request=loras)
    return [list(one.outputs[0].token_ids) for one in outputs]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_of_different_adapters_have_the_tokens_of_the_merged_models(interpreted, tiny_model, tmp_path):
    """In one step, and where one takes the place of another."""
    folders = [save_adapter(tiny_model, tmp_path / str(seed), seed=seed, tables=TABLES) for seed in (1, 2)]
    loras = [LoRARequest(f"lora-{number}", number, str(one)) for number, one in enumerate(folders, 1)]
    alone = []
    for number, adapter in enumerate(folders):
        with LLM(str(merge(tiny_model, adapter, tmp_path / f"merged{number}")), **SETTINGS) as llm:
            alone += ask(llm, [None])
    for most in (2, 1):
        with LLM(str(tiny_model), enable_lora=True, max_loras=most, **SETTINGS) as llm:
            plain, *others = ask(llm, [None, *loras])
        assert others == alone
        assert plain not in alone
