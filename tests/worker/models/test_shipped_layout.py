"""Shipped layouts: the bundled models' first start asks Hugging Face nothing, and other bytes get none of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, BUNDLED_DRAFT, bundled_path
from holdfast.worker.config import WorkerConfig
from holdfast.worker.distributed.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models import kept_layout
from holdfast.worker.models import kept_layout as shipped_layout
from holdfast.worker.models import rank_program as program
from holdfast.worker.models.kept_layout import SHIPPED, find_shipped, shipped_name
from holdfast.worker.models.rank_program import LoadedProgram, load_program
from tests.fake_group import run_ranks

CPU = torch.device("cpu")
SHARES = [(BUNDLED, 1), (BUNDLED, 2), (BUNDLED_DRAFT, 1)]


def config_of(folder: Path, **settings: object) -> WorkerConfig:
    return WorkerConfig(model={"model": str(folder), **settings})


def loaded(folder: Path, group: TensorParallelGroup) -> LoadedProgram:
    return load_program(config_of(folder), folder, group, CPU, lambda *_: None)


def ranks(size: int, work: object) -> None:
    if size == 1:
        work(SingleRank())
    else:
        run_ranks(size, work)


@pytest.mark.parametrize(("name", "size"), SHARES)
def test_a_first_start_asks_hugging_face_nothing(name, size, monkeypatch):
    def asked(*_: object) -> None:
        raise AssertionError("Hugging Face's modules were built")

    monkeypatch.setattr(program, "build_rank_model", asked)
    ranks(size, lambda group: loaded(bundled_path(name), group).program.close())


@pytest.mark.parametrize(("name", "size"), SHARES)
def test_what_is_shipped_is_what_this_tree_recognizes(name, size, monkeypatch, tmp_path):
    """If not: `python -m scripts.ship_layouts`."""
    folder, kept = bundled_path(name), tmp_path / "layouts"
    monkeypatch.setattr(shipped_layout, "SHIPPED", tmp_path)
    monkeypatch.setattr(kept_layout, "layouts_folder", lambda: kept)
    ranks(size, lambda group: loaded(folder, group).program.close())
    for path in kept.iterdir():
        rank = int(path.name.split("-")[1])
        with safe_open(path, "pt") as now, safe_open(SHIPPED / shipped_name(folder, rank, size), "pt") as shipped:
            content = json.loads(now.metadata()["recognized"])
            assert json.loads(shipped.metadata()["recognized"]) == content
            assert set(now.keys()) == set(shipped.keys())
            answers = content["parts"]["Recognized"]["answers"]
            computed, noise = numbers(answers), numbers(answers, "allowed")
            for key in now.keys():  # noqa: SIM118
                ours, theirs = now.get_tensor(key), shipped.get_tensor(key)
                if key in noise:  # the rounding of another machine's kernels
                    assert ((ours / theirs).log2().abs() < 2).all()
                else:
                    is_computed = key in computed
                    torch.testing.assert_close(theirs, ours, rtol=0.05 * is_computed, atol=1e-3 * is_computed)


def numbers(written: object, name: str = "") -> set[str]:
    """Of the tensors in a part of a layout file's content that the file holds itself; with a name, of its fields."""
    if isinstance(written, list):
        return {number for item in written for number in numbers(item, name)}
    if not isinstance(written, dict):
        return set()
    own = {written["tensor"]} if not name and isinstance(written.get("tensor"), str) else set()
    inner = (numbers(item, "" if key == name else name) for key, item in written.items())
    return own.union(*inner)


def test_each_share_has_one_file():
    expected = {shipped_name(bundled_path(name), rank, size) for name, size in SHARES for rank in range(size)}
    assert {path.name for path in SHIPPED.iterdir()} == expected


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_checkpoint_of_other_bytes_has_none(tmp_path, file):
    folder = Path(shutil.copytree(bundled_path(BUNDLED), tmp_path / "model"))
    assert find_shipped(config_of(folder), folder, SingleRank()) is not None
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    assert find_shipped(config_of(folder), folder, SingleRank()) is None


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"max_model_len": 100}])
def test_other_settings_have_none(settings):
    folder = bundled_path(BUNDLED)
    assert find_shipped(config_of(folder, **settings), folder, SingleRank()) is None


def test_what_is_not_to_be_kept_is_not_recalled_either(monkeypatch):
    folder = bundled_path(BUNDLED)
    kept = kept_layout.KeptLayout(config_of(folder, keep_layout=False), folder, SingleRank(), CPU)
    assert kept.recall() is None
