"""Keys and values in fp8: where they are refused, before anything is loaded, and what they take."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.distributed.tensor_parallel import SingleRank
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models import memory
from holdfast.worker.models.backend import _check_hf_backend_will_do
from holdfast.worker.models.checks import check_kv_cache_dtype
from holdfast.worker.models.draft_model import _alone
from holdfast.worker.models.loading import load_model
from holdfast.worker.models.memory import MemoryEstimator
from holdfast.worker.models.model_facts import ModelFacts
from tests.parity.families import save_tiny_model

FP8 = CacheConfig(kv_cache_dtype="fp8_e4m3")


def of_type(model_type):
    return SimpleNamespace(model_type=model_type)


@pytest.mark.parametrize(
    ("device", "executor", "hf_config", "reason"),
    [
        ("cpu", "auto", None, "the model runs on a CPU"),
        ("auto", "hf", None, "model.executor = 'hf'"),
        ("cuda", "auto", of_type("bloom"), "model type 'bloom' has no native backend"),
    ],
)
def test_where_nothing_reads_fp8_the_setting_is_named_and_what_to_do(device, executor, hf_config, reason):
    config = WorkerConfig(cache=FP8, model=ModelConfig(executor=executor))
    with pytest.raises(ConfigurationError) as refused:
        check_kv_cache_dtype(config, device, hf_config)
    message = str(refused.value)
    assert message.startswith(f"cache.kv_cache_dtype = 'fp8_e4m3': {reason}")
    assert "leave --kv-cache-dtype at auto" in message
    check_kv_cache_dtype(config.model_copy(update={"cache": CacheConfig()}), device, hf_config)


def test_others_are_not_refused():
    for device in ("auto", "cuda"):
        check_kv_cache_dtype(WorkerConfig(cache=FP8), device, of_type("llama"))
        check_kv_cache_dtype(WorkerConfig(cache=FP8), device, of_type("mixtral"))


def test_loading_refuses_before_it_looks_for_the_model():
    config = WorkerConfig(cache=FP8, model=ModelConfig(model="/nowhere"))
    with pytest.raises(ConfigurationError, match=r"^cache.kv_cache_dtype = 'fp8_e4m3': the model runs on a CPU"):
        load_model(config, SingleRank(), torch.device("cpu"), lambda *progress: None)


def test_a_model_whose_program_is_refused_does_not_fall_back_to_the_hf_backend():
    facts = ModelFacts(model_type="llama", vocab_size=8, max_model_len=8, eos_token_ids=())
    with pytest.raises(ConfigurationError, match=r"^cache.kv_cache_dtype = 'fp8_e4m3': llama has .*: its heads"):
        _check_hf_backend_will_do(WorkerConfig(cache=FP8), facts, "its heads are too large")
    _check_hf_backend_will_do(WorkerConfig(), facts, "its heads are too large")


def test_a_draft_model_keeps_the_cache_that_any_executor_has(tmp_path):
    config = WorkerConfig(cache=FP8)
    assert _alone(config, tmp_path).cache.kv_cache_dtype == "auto"


def test_an_estimate_for_a_gpu_counts_a_byte_for_a_number_and_one_for_a_row(tmp_path, monkeypatch):
    """2 layers of 2 KV heads: 8 rows of 8 numbers. As if there were a GPU here."""
    monkeypatch.setattr(memory, "choose_device", lambda config: torch.device("cuda"))
    folder = save_tiny_model("llama", tmp_path)
    found = {}
    for dtype in ("auto", "fp8_e4m3"):
        model = ModelConfig(model=str(folder), dtype="bfloat16")
        found[dtype] = MemoryEstimator(WorkerConfig(model=model, cache=CacheConfig(kv_cache_dtype=dtype)))
    assert found["auto"].kv_bytes_per_token == 8 * 16
    assert found["fp8_e4m3"].kv_bytes_per_token == 8 * 9
    assert found["fp8_e4m3"].num_blocks(1 << 20) / found["auto"].num_blocks(1 << 20) == pytest.approx(16 / 9, rel=0.02)


def test_names_that_executors_had_are_taken():
    assert ModelConfig(executor="decoder").executor == "native"
    assert ModelConfig(executor="skeleton").executor == "hf"
