import pytest
import torch

from holdfast.worker.config import CacheConfig, SchedulerConfig, SpeculationConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models import backend
from holdfast.worker.models.hf_backend import HfBackend
from holdfast.worker.models.loading import _activation_bytes, full_step, load_model
from holdfast.worker.models.memory import (
    CPU_CACHE_LIMIT,
    PREFIX_CACHE_FACTOR,
    MemoryEstimator,
    choose_num_blocks,
    cpu_cache_bytes,
    gpu_cache_bytes,
    smallest_of_all_ranks,
)
from holdfast.worker.models.model import build_rank_model
from holdfast.worker.models.parallelize import Target, _Share
from holdfast.worker.models.weights import load_checkpoint, read_config
from holdfast.worker.scheduler.prompt_outputs import MAX_PROMPT_LOGPROBS
from tests.fake_group import run_ranks
from tests.parity.families import executor_of, save_tiny_model
from tests.parity.harness import worker_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def folder(family):
        if family not in folders:
            folders[family] = save_tiny_model(family, tmp_path_factory.mktemp("model"))
        return folders[family]

    return folder


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_bigcode", "gpt_neox", "gpt_oss", "llama", "olmo2", "phi3"])
def test_estimates_are_what_loading_finds(family, size, folder_of, monkeypatch):
    placed = [0] * size

    def place(share, *args, plain=_Share._place):
        local = plain(share, *args)
        placed[share._target.group.rank] += local.nbytes
        return local

    monkeypatch.setattr(_Share, "_place", place)
    monkeypatch.setattr(backend, "read_stated", lambda *_: "modules are counted here")
    executor = "hf" if executor_of(family, size) == "hf" or family == "deepseek_v3" else "auto"  # which keeps latents
    config = worker_config(folder_of(family), size, executor=executor)
    loaded = run_ranks(size, lambda group: load_model(config, group, CPU, lambda *progress: None))
    estimator = MemoryEstimator(config)
    of_modules = MemoryEstimator(worker_config(folder_of(family), size, executor="hf"))  # which keep all of every layer
    assert {of_modules.kv_bytes_per_token} == {model.info.kv_bytes_per_token for model in loaded}
    assert [estimator.weight_bytes] * size == placed


def test_an_estimate_reads_no_weights(folder_of, tmp_path):
    (tmp_path / "config.json").write_text((folder_of("llama") / "config.json").read_text())
    estimator = MemoryEstimator(worker_config(tmp_path, executor="hf"))
    # 2 layers x 2 KV heads x (32 + 16) numbers of 4 bytes: heads of 8 dimensions are filled up to whole tiles
    assert estimator.kv_bytes_per_token == MemoryEstimator(worker_config(tmp_path)).kv_bytes_per_token == 768
    parameters = load_checkpoint(folder_of("llama"), read_config(folder_of("llama"))).parameters()
    assert estimator.weight_bytes == sum(parameter.nbytes for parameter in parameters)
    assert estimator.max_model_len == 128


def test_blocks_and_sequences_that_fit_are_counted_whole(folder_of):
    estimator = MemoryEstimator(worker_config(folder_of("llama"), executor="hf"))
    block_bytes = 768 * 16
    assert estimator.num_blocks(10 * block_bytes + 1) == 10
    assert estimator.num_sequences(10 * block_bytes, num_tokens=33) == 3
    assert estimator.num_sequences(10 * block_bytes, num_tokens=32) == 5


def test_memory_settings_go_from_the_most_to_the_least_exact():
    assert choose_num_blocks(CacheConfig(num_blocks=7, kv_cache_memory=1000), 500, 10, most_blocks=3) == 7
    assert choose_num_blocks(CacheConfig(kv_cache_memory=1000), 500, 10, most_blocks=3) == 100
    assert choose_num_blocks(CacheConfig(), 500, 10, most_blocks=None) == 50
    assert choose_num_blocks(CacheConfig(), 500, 10, most_blocks=3) == 3


def test_a_cpus_cache_has_room_for_prefixes_of_earlier_sequences(folder_of, monkeypatch):
    monkeypatch.setattr("holdfast.worker.models.loading.cpu_cache_bytes", lambda: 2**30)
    changes = {"scheduler": SchedulerConfig(max_num_seqs=3), "cache": CacheConfig()}
    config = worker_config(folder_of("llama")).model_copy(update=changes)
    without = config.model_copy(update={"cache": CacheConfig(enable_prefix_caching=False)})
    for chosen, factor in ((config, PREFIX_CACHE_FACTOR), (without, 1)):
        num_blocks = factor * 3 * 128 // 16
        assert load_model(chosen, SingleRank(), CPU, lambda *progress: None).info.num_blocks == num_blocks
        estimator = MemoryEstimator(chosen)
        estimated = estimator.default_cache_bytes(chosen, 2**30, is_gpu=False)
        assert estimator.num_blocks(estimated) == num_blocks, "the estimate is what loading finds"


def test_a_cache_without_room_for_two_blocks_is_a_wrong_setting_on_every_rank(folder_of):
    def load(group):
        memory = 384 * 16 * (1 + group.rank)  # one block on the leader, two on the other
        config = worker_config(folder_of("llama"), 2, executor="hf")
        config = config.model_copy(update={"cache": CacheConfig(block_size=16, kv_cache_memory=memory)})
        with pytest.raises(ConfigurationError, match="would have 1 blocks of 6144 bytes, and needs 2"):
            load_model(config, group, CPU, lambda *progress: None)
        return True

    assert run_ranks(2, load) == [True, True]


def test_the_default_on_a_cpu_is_modest(monkeypatch):
    monkeypatch.setattr("holdfast.worker.models.memory.available_memory", lambda: 2**30)
    assert cpu_cache_bytes() == 2**30 // 10
    monkeypatch.setattr("holdfast.worker.models.memory.available_memory", lambda: 2**40)
    assert cpu_cache_bytes() == CPU_CACHE_LIMIT


def test_a_gpu_gives_what_others_and_a_full_step_leave(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    assert gpu_cache_bytes(torch.device("cuda"), activation_bytes=100, utilization=0.9) == 400


def test_a_full_step_is_measured_on_a_cache_of_its_own(folder_of, monkeypatch):
    """With a GPU's counters put in place; the step itself runs here."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    config = worker_config(folder_of("llama"))
    target = Target(group=SingleRank(), device=CPU, dtype=torch.float32)
    hf_config = read_config(folder_of("llama"))
    model = build_rank_model(config.model, folder_of("llama"), hf_config, target, lambda *progress: None)
    backend = HfBackend.settled(model, target, max_positions=128)
    config = WorkerConfig(scheduler=SchedulerConfig(max_num_batched_tokens=300))
    assert _activation_bytes(config, backend, target, 16, 128) == 250
    with pytest.raises(AttributeError):
        model.detach()  # nothing of that cache is still attached


def test_ranks_agree_on_the_smallest_number():
    assert run_ranks(3, lambda group: smallest_of_all_ranks(10 - group.rank, group, CPU)) == [8, 8, 8]


def test_the_full_step_uses_up_both_budgets():
    config = WorkerConfig(scheduler=SchedulerConfig(max_num_batched_tokens=198, max_num_seqs=40))
    plan = full_step(config, block_size=4, max_model_len=96)
    assert plan.num_tokens == 198
    assert [len(sequence.token_ids) for sequence in plan.sequences] == [96, 96, 6]
    assert sum(sequence.num_draws for sequence in plan.sequences) == 40 + MAX_PROMPT_LOGPROBS
    blocks = [block for sequence in plan.sequences for block in sequence.block_ids]
    assert blocks == list(range(24 + 24 + 2))


def test_drafts_have_their_rows_in_the_full_step():
    speculation = SpeculationConfig(speculative="ngram", num_speculative_tokens=5)
    plan = full_step(WorkerConfig(speculation=speculation), block_size=16, max_model_len=512)
    assert sum(sequence.num_draws for sequence in plan.sequences) == 64 + 5 + MAX_PROMPT_LOGPROBS
