"""A layout that was kept gives the same bits without Hugging Face's modules, and is not used once anything changed."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from holdfast.worker.config import WorkerConfig
from holdfast.worker.distributed.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.mapped_files import MappedFiles
from holdfast.worker.models import backend as backend
from holdfast.worker.models import kept_layout
from holdfast.worker.models.backend import LoadedBackend, load_backend
from holdfast.worker.models.kept_layout import load
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.worker.executors.rank_scenarios import BLOCK_SIZE, NUM_BLOCKS, all_bits

CPU = torch.device("cpu")


def saved(family: str, tmp_path: Path) -> Path:
    return save_tiny_model(family, tmp_path / "model", max_position_embeddings=256)


@pytest.fixture(params=["starcoder2", "gpt_neox", "mixtral"])
def checkpoint(request, tmp_path) -> Path:
    return saved(request.param, tmp_path)


@pytest.fixture
def layouts(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(kept_layout, "layouts_folder", lambda: tmp_path / "layouts")
    return tmp_path / "layouts"


def loaded(folder: Path, group: TensorParallelGroup | None = None, **settings: object) -> LoadedBackend:
    model = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 200, "executor": "native", **settings}
    config = WorkerConfig(model=model)
    return load_backend(config, folder, group or SingleRank(), CPU, lambda *_: None)


def bits(loaded: LoadedBackend) -> str:
    loaded.backend.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    return all_bits(loaded.backend)


@pytest.fixture
def asked(monkeypatch) -> list[Path]:
    """The folders that Hugging Face has been asked about."""
    folders: list[Path] = []
    read_config = backend.read_config

    def noted(folder: Path, overrides: Mapping[str, object]) -> object:
        folders.append(folder)
        return read_config(folder, overrides)

    monkeypatch.setattr(backend, "read_config", noted)
    return folders


def test_a_later_start_gives_the_same_bits_without_hugging_face(checkpoint, layouts, asked):
    first = loaded(checkpoint)
    later = loaded(checkpoint)
    assert bits(later) == bits(first)
    assert later.facts == first.facts
    assert len(asked) == 1


def test_ranks_recall_their_shares_together(layouts, tmp_path, asked):
    folder = saved("starcoder2", tmp_path)
    first = run_ranks(2, lambda group: bits(loaded(folder, group)))
    assert run_ranks(2, lambda group: bits(loaded(folder, group))) == first
    assert len(asked) == 2
    next(layouts.glob("*-1-of-2")).unlink()
    assert run_ranks(2, lambda group: bits(loaded(folder, group))) == first
    assert len(asked) == 4


def test_weights_stay_where_they_are_in_the_checkpoint(layouts, tmp_path):
    folder = saved("starcoder2", tmp_path)
    loaded(folder, dtype="float32")
    layout = load(next(layouts.iterdir()), folder).recognized.layout
    assert isinstance(layout, DecoderLayout)
    files = MappedFiles()
    weights = [layout.embedding, *layout.head.weights, *layout.layers[0].attention.qkv.weights]
    assert all(files.place_of(weight) is not None for weight in weights)


def test_a_layout_is_made_again_once_anything_has_changed(layouts, tmp_path, asked, monkeypatch):
    folder = saved("starcoder2", tmp_path)
    changes = {
        "nothing, the first time": lambda: None,
        "weights": lambda: os.utime(folder / "model.safetensors", (1, 1)),
        "config": lambda: (folder / "generation_config.json").write_text('{"eos_token_id": 7}'),
        "libraries": lambda: monkeypatch.setattr(kept_layout, "version", lambda name: "another"),
        "sources": lambda: monkeypatch.setattr(kept_layout, "_SOURCES", ("executors",)),
    }
    for number, (name, change) in enumerate(changes.items(), 1):
        change()
        loaded(folder)
        assert len(asked) == number, name
    loaded(folder, max_model_len=100)
    assert len(asked) == len(changes) + 1, "a setting"
    loaded(folder, max_model_len=100)
    assert len(asked) == len(changes) + 1, "nothing has changed"


def test_a_layout_file_that_cannot_be_read_is_made_again(layouts, tmp_path):
    folder = saved("starcoder2", tmp_path)
    expected = bits(loaded(folder))
    path = next(layouts.iterdir())
    for content in (b"", b"not a layout", b"\x02\x00\x00\x00\x00\x00\x00\x00{}"):
        path.write_bytes(content)
        assert bits(loaded(folder)) == expected
        assert path.read_bytes() != content


def test_a_layout_that_the_executor_does_not_compute_is_not_used(layouts, tmp_path, monkeypatch):
    folder = saved("starcoder2", tmp_path)
    expected = bits(loaded(folder))
    made = backend.make_backend
    answers = iter(["its logits are wrong"])

    def wrong_once(*args: object, **settings: object) -> object:
        return next(answers, None) or made(*args, **settings)

    monkeypatch.setattr(backend, "make_backend", wrong_once)
    assert bits(loaded(folder)) == expected


def test_a_model_whose_proof_fails_runs_on_the_hf_backend_as_ever(layouts, tmp_path, monkeypatch):
    """Its weights have been packed and given back by then."""
    folder = saved("starcoder2", tmp_path)
    expected = bits(loaded(folder, executor="hf"))
    made = backend.make_backend

    def packed_in_vain(*args: object, **settings: object) -> str:
        made(*args, **settings)
        return "its logits are wrong"

    monkeypatch.setattr(backend, "make_backend", packed_in_vain)
    found = loaded(folder, executor="auto")
    assert found.backend.numerics == "hf-4"
    assert bits(found) == expected
    assert not list(layouts.iterdir())


def test_what_hugging_face_must_run_keeps_no_layout(layouts, tmp_path):
    folder = saved("starcoder2", tmp_path)
    loaded(folder, executor="hf")
    loaded(folder, keep_layout=False)
    assert not layouts.exists()


def test_a_home_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_layout, "layouts_folder", lambda: Path("/dev/null/layouts"))
    loaded(saved("starcoder2", tmp_path))


def test_the_oldest_layouts_go(layouts, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_layout, "_MOST_FILES", 2)
    folder = saved("starcoder2", tmp_path)
    for length in (100, 101, 102):
        loaded(folder, max_model_len=length)
    assert len(list(layouts.iterdir())) == 2
