"""A model of a stated family is loaded without Hugging Face's modules, with the same bits; or with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.worker.config import WorkerConfig
from holdfast.worker.distributed.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.models import backend as backend
from holdfast.worker.models import proof
from holdfast.worker.models.backend import LoadedBackend, load_backend
from holdfast.worker.models.native_backend import NativeBackend
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.worker.executors.rank_scenarios import BLOCK_SIZE, NUM_BLOCKS, all_bits

CPU = torch.device("cpu")


def loaded(folder: Path, group: TensorParallelGroup | None = None, **settings: object) -> LoadedBackend:
    model = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 200, "keep_layout": False, **settings}
    return load_backend(WorkerConfig(model=model), folder, group or SingleRank(), CPU, lambda *_: None)


def bits(loaded: LoadedBackend) -> str:
    loaded.backend.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    return all_bits(loaded.backend)


def saved(family: str, folder: Path) -> Path:
    return save_tiny_model(family, folder, max_position_embeddings=256)


@pytest.fixture
def built(monkeypatch) -> list[Path]:
    """The folders that Hugging Face's modules have been built for."""
    folders: list[Path] = []
    build = backend.build_rank_model

    def noted(config: Any, folder: Path, *others: Any) -> Any:
        folders.append(folder)
        return build(config, folder, *others)

    monkeypatch.setattr(backend, "build_rank_model", noted)
    return folders


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_bits_are_those_of_what_is_recognized(tmp_path, monkeypatch, built, family, size):
    folder = saved(family, tmp_path)
    ours = run_ranks(size, lambda group: loaded(folder, group))
    assert not built
    monkeypatch.setattr(backend, "read_stated", lambda *_: "a test asks for it")
    theirs = run_ranks(size, lambda group: loaded(folder, group))
    assert len(built) == size
    assert [one.facts for one in ours] == [one.facts for one in theirs]
    assert run_ranks(size, lambda group: bits(ours[group.rank])) == run_ranks(
        size, lambda group: bits(theirs[group.rank])
    )


def test_where_one_rank_cannot_read_its_share_hugging_face_is_asked_on_all(tmp_path, monkeypatch, built):
    folder = saved("llama", tmp_path)
    read = backend.read_stated

    def on_one(config: Any, folder: Path, group: TensorParallelGroup, device: torch.device) -> Any:
        return "this rank cannot" if group.rank == 1 else read(config, folder, group, device)

    monkeypatch.setattr(backend, "read_stated", on_one)
    assert all(isinstance(one.backend, NativeBackend) for one in run_ranks(2, lambda group: loaded(folder, group)))
    assert len(built) == 2


def test_a_model_that_the_executor_gets_wrong_is_left_to_hugging_face(tmp_path, monkeypatch, built):
    made = backend.make_backend
    answers = iter(["its logits are wrong"])
    monkeypatch.setattr(backend, "make_backend", lambda *args, **named: next(answers, None) or made(*args, **named))
    assert isinstance(loaded(saved("llama", tmp_path)).backend, NativeBackend)
    assert len(built) == 1


@pytest.mark.parametrize("most_bytes", [1 << 30, 0])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_that_is_no_number_is_named(tmp_path, monkeypatch, name, most_bytes):
    """Also of a model that is too large for the reference to run as a whole."""
    monkeypatch.setattr(proof, "_MOST_REFERENCE_BYTES", most_bytes)
    folder = saved("qwen2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"its weight {name}|its hidden states"):
        loaded(folder)


@pytest.mark.parametrize("most_bytes", [1 << 30, 0])
def test_a_large_model_is_checked_by_its_layers(tmp_path, monkeypatch, built, most_bytes):
    monkeypatch.setattr(proof, "_MOST_REFERENCE_BYTES", most_bytes)
    reference = proof.Reference.run_model
    calls: list[int] = []

    def noted(self: Any, token_ids: Any, positions: Any = None) -> Any:
        calls.append(len(token_ids))
        return reference(self, token_ids, positions)

    monkeypatch.setattr(proof.Reference, "run_model", noted)
    assert isinstance(loaded(saved("mistral", tmp_path)).backend, NativeBackend)
    assert len(calls) == (2 if most_bytes else 0)
    assert not built
