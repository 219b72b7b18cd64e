"""What keys and values are kept in: where that is refused, before anything is loaded, and what it takes."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models import memory
from holdfast.worker.models.backend import _check_hf_backend_will_do
from holdfast.worker.models.checks import check_kv_cache_dtype
from holdfast.worker.models.draft_model import _alone
from holdfast.worker.models.loading import load_model
from holdfast.worker.models.memory import MemoryEstimator
from holdfast.worker.models.model_facts import ModelFacts
from tests.parity.families import save_tiny_model

FP8 = CacheConfig(kv_cache_dtype="fp8")


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
    assert message.startswith(f"cache.kv_cache_dtype = 'fp8': {reason}")
    assert "leave --kv-cache-dtype at auto" in message
    check_kv_cache_dtype(config.model_copy(update={"cache": CacheConfig()}), device, hf_config)


def test_int8_is_for_cpus_and_named_on_gpus():
    config = WorkerConfig(cache=CacheConfig(kv_cache_dtype="int8"))
    with pytest.raises(
        ConfigurationError, match=r"^cache.kv_cache_dtype = 'int8': the model runs on a GPU, .* or choose fp8"
    ):
        check_kv_cache_dtype(config, "cuda", of_type("llama"))
    for executor in ("auto", "hf"):
        served = config.model_copy(update={"model": ModelConfig(executor=executor)})
        check_kv_cache_dtype(served, "cpu", of_type("bloom"))


@pytest.mark.parametrize(
    ("asked", "hf_config", "own"),
    [
        ("bfloat16", SimpleNamespace(model_type="llama", dtype=torch.bfloat16), "bfloat16"),
        ("auto", SimpleNamespace(model_type="llama", dtype=torch.bfloat16), "bfloat16"),
        ("auto", SimpleNamespace(model_type="llama", torch_dtype="float16"), "float16"),
        ("auto", of_type("llama"), "float32"),
        ("float32", None, "float32"),
    ],
)
def test_a_dtype_of_its_own_is_the_models_and_another_is_refused(asked, hf_config, own):
    for wanted in ("bfloat16", "float16", "float32"):
        config = WorkerConfig(cache=CacheConfig(kv_cache_dtype=wanted), model=ModelConfig(dtype=asked))
        if wanted == own:
            check_kv_cache_dtype(config, "cpu", hf_config)
            continue
        reason = f"^cache.kv_cache_dtype = '{wanted}': the model runs in {own}, .* set --dtype {wanted}"
        with pytest.raises(ConfigurationError, match=reason):
            check_kv_cache_dtype(config, "cpu", hf_config)


def test_others_are_not_refused():
    for device in ("auto", "cuda"):
        check_kv_cache_dtype(WorkerConfig(cache=FP8), device, of_type("llama"))
        check_kv_cache_dtype(WorkerConfig(cache=FP8), device, of_type("mixtral"))


def test_loading_refuses_before_it_looks_for_the_model():
    config = WorkerConfig(cache=FP8, model=ModelConfig(model="/nowhere"))
    with pytest.raises(ConfigurationError, match=r"^cache.kv_cache_dtype = 'fp8': the model runs on a CPU"):
        load_model(config, SingleRank(), torch.device("cpu"), lambda *progress: None)


def test_a_model_whose_program_is_refused_does_not_fall_back_to_the_hf_backend():
    facts = ModelFacts(model_type="llama", vocab_size=8, max_model_len=8, eos_token_ids=())
    with pytest.raises(ConfigurationError, match=r"^cache.kv_cache_dtype = 'fp8': llama has .*: its heads"):
        _check_hf_backend_will_do(WorkerConfig(cache=FP8), facts, None, "its heads are too large")
    _check_hf_backend_will_do(WorkerConfig(), facts, None, "its heads are too large")


def test_a_draft_model_keeps_the_cache_that_any_executor_has(tmp_path):
    config = WorkerConfig(cache=FP8)
    assert _alone(config, tmp_path).cache.kv_cache_dtype == "auto"


def test_an_estimate_for_a_gpu_counts_a_byte_for_a_number_and_one_for_a_row(tmp_path, monkeypatch):
    """2 layers of 2 KV heads: 8 rows of 8 numbers. As if there were a GPU here."""
    monkeypatch.setattr(memory, "choose_device", lambda config: torch.device("cuda"))
    folder = save_tiny_model("llama", tmp_path)
    found = {}
    for dtype in ("auto", "fp8"):
        model = ModelConfig(model=str(folder), dtype="bfloat16")
        found[dtype] = MemoryEstimator(WorkerConfig(model=model, cache=CacheConfig(kv_cache_dtype=dtype)))
    assert found["auto"].kv_bytes_per_token == 8 * 16
    assert found["fp8"].kv_bytes_per_token == 8 * 9
    assert found["fp8"].num_blocks(1 << 20) / found["auto"].num_blocks(1 << 20) == pytest.approx(16 / 9, rel=0.02)


def test_names_that_executors_had_are_taken():
    assert ModelConfig(executor="decoder").executor == "native"
    assert ModelConfig(executor="skeleton").executor == "hf"
