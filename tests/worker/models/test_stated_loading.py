"""A model of a stated family is loaded onto the native backend, or onto the HF backend on all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models import backend as backend
from holdfast.worker.models import proof
from holdfast.worker.models.backend import LoadedBackend, load_backend
from holdfast.worker.models.hf_backend import HfBackend
from holdfast.worker.models.native_backend import NativeBackend
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.worker.executors.rank_scenarios import BLOCK_SIZE, NUM_BLOCKS, all_bits

CPU = torch.device("cpu")


def loaded(folder: Path, group: TensorParallelGroup | None = None, **settings: object) -> LoadedBackend:
    model = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 200, **settings}
    return load_backend(WorkerConfig(model=model), folder, group or SingleRank(), CPU, lambda *_: None)


def bits(loaded: LoadedBackend) -> str:
    loaded.backend.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    return all_bits(loaded.backend)


def saved(family: str, folder: Path) -> Path:
    return save_tiny_model(family, folder, max_position_embeddings=256)


def test_where_one_rank_cannot_read_its_share_all_run_on_the_hf_backend(tmp_path, monkeypatch):
    folder = saved("llama", tmp_path)
    read = backend.read_stated

    def on_one(config: Any, folder: Path, group: TensorParallelGroup, device: torch.device) -> Any:
        return "this rank cannot" if group.rank == 1 else read(config, folder, group, device)

    monkeypatch.setattr(backend, "read_stated", on_one)
    assert all(isinstance(one.backend, HfBackend) for one in run_ranks(2, lambda group: loaded(folder, group)))


def test_a_model_that_the_executor_gets_wrong_runs_on_the_hf_backend_as_ever(tmp_path, monkeypatch):
    """Its weights have been packed and given back by then."""
    folder = saved("starcoder2", tmp_path)
    expected = bits(loaded(folder, executor="hf"))
    made = backend.make_backend

    def packed_in_vain(*args: Any, **settings: Any) -> str:
        made(*args, **settings)
        return "its logits are wrong"

    monkeypatch.setattr(backend, "make_backend", packed_in_vain)
    found = loaded(folder)
    assert isinstance(found.backend, HfBackend)
    assert bits(found) == expected
    with pytest.raises(UnsupportedModelError, match="no native backend: its logits are wrong"):
        loaded(folder, executor="native")


@pytest.mark.parametrize("most_numbers", [1 << 28, 0])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_that_is_no_number_is_named(tmp_path, monkeypatch, name, most_numbers):
    """Also of a model that is too large for the reference to run as a whole."""
    monkeypatch.setattr(proof, "MAX_REFERENCE_NUMBERS", most_numbers)
    folder = saved("qwen2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"its weight {name} has numbers"):
        loaded(folder)


def spoil(folder: Path, name: str, row: int, number: float) -> None:
    """One number of a weight that no check of a model uses."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row, 3] = number
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
@pytest.mark.parametrize(
    ("family", "name", "settings"),
    [
        ("llama", "model.embed_tokens.weight", {}),
        ("llama", "model.embed_tokens.weight", {"executor": "hf"}),
        ("mixtral", "model.layers.1.mlp.experts.gate_up_proj", {}),
        ("gpt2", "transformer.wte.weight", {}),
    ],
)
def test_a_number_that_no_check_comes_to_is_found_while_weights_are_packed(tmp_path, number, family, name, settings):
    folder = saved(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = name if name in tensors else min(key for key in tensors if "experts.1." in key)
    row = len(tensors[name]) - 1
    spoil(folder, name, row, number)
    with pytest.raises(UnsupportedModelError, match=rf"its weight {name} has numbers .* at \[{row}, 3\] in "):
        loaded(folder, **settings)


def test_a_number_of_one_rank_alone_is_found_by_all(tmp_path):
    folder = saved("llama", tmp_path)
    spoil(folder, "model.embed_tokens.weight", 1, torch.nan)

    def refusal(group: TensorParallelGroup) -> str:
        with pytest.raises(UnsupportedModelError) as refused:
            loaded(folder, group)
        return refused.value.reason

    first, second = run_ranks(2, refusal)
    assert first == second
    assert "model.embed_tokens.weight" in first


def test_a_number_that_the_chosen_dtype_does_not_have_is_an_overflow(tmp_path):
    folder = saved("llama", tmp_path)
    spoil(folder, "model.embed_tokens.weight", 1, 1e30)
    loaded(folder)
    with pytest.raises(UnsupportedModelError, match=r"it overflows, or .*torch.float16. Choose another dtype"):
        loaded(folder, dtype="float16")


@pytest.mark.parametrize("most_numbers", [1 << 28, 0])
def test_a_large_model_is_checked_by_its_layers(tmp_path, monkeypatch, most_numbers):
    monkeypatch.setattr(proof, "MAX_REFERENCE_NUMBERS", most_numbers)
    reference = proof.Reference.run_model
    calls: list[int] = []

    def noted(self: Any, token_ids: Any, positions: Any = None) -> Any:
        calls.append(len(token_ids))
        return reference(self, token_ids, positions)

    monkeypatch.setattr(proof.Reference, "run_model", noted)
    assert isinstance(loaded(saved("mistral", tmp_path)).backend, NativeBackend)
    assert len(calls) == (2 if most_numbers else 0)
