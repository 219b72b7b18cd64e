"""Checkpoints of stated families are read as Hugging Face reads them, field by field and bit by bit; or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from holdfast.worker.config import ModelConfig
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models import rotary, stated_config
from holdfast.worker.models.family import Family
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.stated_layout import read_stated
from holdfast.worker.models.stated_tensors import StoredTensors
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.worker.executors.models import layout_of_module
from tests.worker.models.layouts import differences, stated

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}


def shares_of_loaded(folder: Path, size: int, dtype: str = "auto") -> list[DecoderLayout]:
    """The layouts of what Hugging Face loads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    own = model.dtype
    served = own if dtype == "auto" else getattr(torch, dtype)
    model.to(served)
    return run_ranks(size, lambda group: layout_of_module(model, group, own))


def differences_on(folder: Path, size: int, dtype: str = "auto") -> list[str]:
    ours = run_ranks(size, lambda group: stated(folder, group, dtype))
    pairs = zip(ours, shares_of_loaded(folder, size, dtype), strict=True)
    return [found for pair in pairs for found in differences(*pair)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gemma", "qwen3"])
def test_in_another_dtype_it_is_the_same_too(tmp_path, family, size, dtype):
    folder = save_tiny_model(family, tmp_path, attention_bias=True)
    as_stored_in(folder, BF16)
    assert differences_on(folder, size, dtype) == []


def as_stored_in(folder: Path, dtype: torch.dtype, named: str | None = None) -> None:
    """Converts a checkpoint, whose config may name another type."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, dtype=named or str(dtype).removeprefix("torch."))


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def in_shards(folder: Path) -> None:
    """Splits a checkpoint into two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    names = {name: f"model-{1 + index % 2:05}-of-00002.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "model.safetensors").unlink()


def test_a_checkpoint_in_shards_is_the_same_too(tmp_path):
    folder = save_tiny_model("llama", tmp_path)
    in_shards(folder)
    assert differences_on(folder, 2) == []


def test_a_tied_head_is_the_embedding_itself(tmp_path):
    folder = save_tiny_model("qwen2", tmp_path)
    layout = stated(folder, SingleRank())
    assert layout.head.weights[0].data_ptr() == layout.embedding.data_ptr()


# --- planted mistakes ---


def other_share(patch: pytest.MonkeyPatch) -> None:
    part = RankShare.part

    def swapped(self: Any, *length: Any) -> tuple[int, int]:
        first, count = part(self, *length)
        return (0 if first else count), count

    patch.setattr(RankShare, "part", swapped)


def without_bias(patch: pytest.MonkeyPatch) -> None:
    """A bias that is read as if it were not there; its tensor is taken all the same."""
    rows = RankShare.rows

    def forgetful(self: Any, *args: Any, **how: Any) -> Linear:
        return Linear(weights=rows(self, *args, **how).weights)

    patch.setattr(RankShare, "rows", forgetful)


def other_base(patch: pytest.MonkeyPatch) -> None:
    default = rotary._KINDS["default"]
    other = {**rotary._KINDS, "default": lambda rope, dim: default({**rope, "rope_theta": rope["rope_theta"] + 1}, dim)}
    patch.setattr(rotary, "_KINDS", other)


def wider_window(patch: pytest.MonkeyPatch) -> None:
    window = Family.window_of
    patch.setattr(Family, "window_of", lambda self, config, index: (w := window(self, config, index)) and w + 1)


def one_step_of_a_float(patch: pytest.MonkeyPatch) -> None:
    taken = StoredTensors.take

    def nearly(self: Any, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = taken(self, name, shape)
        if not name.endswith("1.mlp.down_proj.weight"):
            return tensor
        bits_of = tensor.clone().view(torch.int32)
        bits_of[-1, -1] ^= 1
        return bits_of.view(torch.float32)

    patch.setattr(StoredTensors, "take", nearly)


def other_epsilon(patch: pytest.MonkeyPatch) -> None:
    value = stated_config._value
    patch.setattr(
        stated_config, "_value", lambda raw, key, default: 2e-6 if key == "rms_norm_eps" else value(raw, key, default)
    )


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a cut of another rank": (other_share, "attention.qkv.weights[0]"),
    "a bias that is missing": (without_bias, "attention.output.bias"),
    "the base of the angles": (other_base, "rotaries[0].inverse_frequencies"),
    "a window that is wider by one": (wider_window, "layers[1].attention.sliding_window"),
    "an epsilon": (other_epsilon, "norm.eps"),
    "the last bit of one weight": (one_step_of_a_float, "layers[1].mlp.down.weights[0]"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(tmp_path, monkeypatch, name):
    plant, place = PLANTED[name]
    folder = save_tiny_model("qwen3", tmp_path, attention_bias=True, **SLIDING)
    theirs = shares_of_loaded(folder, 2)
    plant(monkeypatch)
    ours = run_ranks(2, lambda group: stated(folder, group))
    found = [path for pair in zip(ours, theirs, strict=True) for path in differences(*pair)]
    assert any(path.endswith(place) for path in found), found


# --- what is not stated ---

REFUSED: dict[str, dict[str, object]] = {
    "another architecture": {"architectures": ["LlamaForTokenClassification"]},
    "what no layout can say": {"clip_qkv": 2.0},
    "another activation": {"hidden_act": "quick_gelu"},
    "another kind of angles": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}},
    "angles without a factor": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
    "a share of a head that does not turn": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "angles in two forms": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "a count that is text": {"num_hidden_layers": "2"},
    "a count of nothing": {"num_key_value_heads": 0},
    "a flag that is a number": {"tie_word_embeddings": 1},
    "another size than is stored": {"intermediate_size": 47},
    "a bias that is not stored": {"attention_bias": True},
    "a layer less than is stored": {"num_hidden_layers": 1},
    "a layer more than is stored": {"num_hidden_layers": 3},
    "another family": {"model_type": "gpt2"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_stated_is_left_to_the_hf_backend(tmp_path, name):
    folder = save_tiny_model("llama", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    stated(folder)
    change_config(folder, **REFUSED[name])
    assert isinstance(read_stated(ModelConfig(model=str(folder)), folder, SingleRank()), str)


# --- forms of one model ---


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({change(name): values for name, values in tensors.items()}, folder / "model.safetensors")


def with_more(folder: Path, **tensors: Tensor) -> None:
    own = load_file(folder / "model.safetensors")
    more = {name.replace("__", "."): values for name, values in tensors.items()}
    save_file({**own, **more}, folder / "model.safetensors")


FORMS: dict[str, Callable[[Path], None]] = {
    "entries that no code reads": lambda folder: change_config(
        folder, use_new_thing=True, auto_map={"AutoConfig": "a"}
    ),
    "no type": lambda folder: change_config(folder, dtype=None),
    "tensors in bfloat16, and a config in float32": lambda folder: as_stored_in(folder, BF16, "float32"),
    "tensors in float32, and a config in bfloat16": lambda folder: change_config(folder, dtype="bfloat16"),
    "frequencies of an old checkpoint": lambda folder: with_more(
        folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4)
    ),
    "a head that is tied and stored": lambda folder: change_config(folder, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_are_read_as_hugging_face_reads_them(tmp_path, name):
    folder = save_tiny_model("llama", tmp_path)
    FORMS[name](folder)
    assert differences_on(folder, 2) == []


def test_a_checkpoint_without_a_head_is_read_as_hugging_face_reads_it(tmp_path):
    folder = save_tiny_model("qwen2", tmp_path)
    renamed(folder, lambda name: name.removeprefix("model."))
    assert differences_on(folder, 1) == []


def test_overrides_replace_entries_and_must_be_known(tmp_path):
    folder = save_tiny_model("llama", tmp_path)
    assert stated(folder, hf_overrides={"rms_norm_eps": 1e-3}).norm.eps == 1e-3
    settings = ModelConfig(model=str(folder), hf_overrides={"rms_norm_epsilon": 1e-3})
    assert read_stated(settings, folder, SingleRank()) == "model.hf_overrides has rms_norm_epsilon"
