"""The layout of a stated family is what is recognized in Hugging Face's modules, field by field and bit by bit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.distributed.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.models import rotary, stated_config, stated_layout
from holdfast.worker.models.model import build_tree
from holdfast.worker.models.parallel_plan import Cut
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.recognize import recognize
from holdfast.worker.models.stated_config import STATED, NotStated, read_stated_config
from holdfast.worker.models.weights import read_config
from tests.fake_group import run_ranks
from tests.parity.families import YARN, save_tiny_model

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32

LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LONG_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}
MIXED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma, biases": ("gemma", {"attention_bias": True, "tie_word_embeddings": False}),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "granite, biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, wide heads and biases": ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "llama, heads by the hidden size": ("llama", {"head_dim": None, "num_key_value_heads": None}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with all it may have": ("llama", {"rope_parameters": LONG_YARN}),
    "llama, yarn with a factor of attention": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {**SLIDING, "tie_word_embeddings": False}),
    "qwen2, windows by layer": ("qwen2", MIXED),
    "qwen3": ("qwen3", {}),
    "qwen3, windows and biases": ("qwen3", {**SLIDING, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "rms_norm_eps": 1e-5}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3, windows": (
        "smollm3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": False},
    ),
}
"""By name: the family, and what is changed of its tiny model."""


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory) -> Path:
    family, changes = CASES[request.param]
    return save_tiny_model(family, tmp_path_factory.mktemp("model"), **changes)


def recognized(folder: Path, group: TensorParallelGroup, dtype: str = "auto") -> DecoderLayout:
    """What Hugging Face's modules are read as."""
    config = read_config(folder)
    served = config.dtype if dtype == "auto" else getattr(torch, dtype)
    target = Target(group=group, device=CPU, dtype=served)
    settings = ModelConfig(model=str(folder), dtype=dtype)
    layout = recognize(build_tree(settings, folder, config, target, lambda *_: None), group.size)
    assert isinstance(layout, DecoderLayout), layout
    return layout


def stated(folder: Path, group: TensorParallelGroup, dtype: str = "auto") -> DecoderLayout:
    config = read_stated_config(json.loads((folder / "config.json").read_text()))
    served = config.dtype if dtype == "auto" else getattr(torch, dtype)
    return stated_layout.stated_layout(config, folder, group, served)


def differences(ours: object, theirs: object, path: str = "layout") -> list[str]:
    """The places where two parts of layouts differ."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype and bits(ours).equal(bits(theirs))
        return [] if same else [path]
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{path}[{index}]")]
    if is_dataclass(ours) and type(ours) is type(theirs):
        names = [item.name for item in fields(ours)]
        return [
            found
            for name in names
            for found in differences(getattr(ours, name), getattr(theirs, name), f"{path}.{name}")
        ]
    return [] if type(ours) is type(theirs) and ours == theirs else [path]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def differences_on(folder: Path, size: int, dtype: str = "auto") -> list[str]:
    def compared(group: TensorParallelGroup) -> list[str]:
        return differences(stated(folder, group, dtype), recognized(folder, group, dtype))

    return [found for rank in run_ranks(size, compared) for found in rank]


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_stated_layout_is_that_which_is_recognized(checkpoint, size):
    assert differences_on(checkpoint, size) == []


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gemma", "qwen3"])
def test_in_another_dtype_it_is_the_same_too(tmp_path, family, size, dtype):
    folder = save_tiny_model(family, tmp_path, attention_bias=True)
    as_stored_in(folder, BF16)
    assert differences_on(folder, size, dtype) == []


def as_stored_in(folder: Path, dtype: torch.dtype) -> None:
    """Converts a checkpoint."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, dtype=str(dtype).removeprefix("torch."))


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


@pytest.mark.parametrize("family", STATED)
def test_what_config_json_leaves_out_is_what_transformers_takes(tmp_path, family):
    """And the older names of rotary angles are read alike."""
    sizes = {"vocab_size": 126, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 30}
    raw = {"model_type": family, "dtype": "bfloat16", **sizes, "num_attention_heads": 32, "max_position_embeddings": 64}
    derived = {"head_dim": 256 // 32}  # by modules, where a config has none
    for more in ({}, {"rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 2.0}, "rms_norm_eps": 1e-4}):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **more}))
        ours, theirs = read_stated_config({**raw, **more}), read_config(tmp_path)
        theirs.rope_parameters.pop("type", None)
        for name, value in vars(ours).items():
            absent = derived.get(name, None if value else value)
            assert value == getattr(theirs, name, absent), name


# --- planted mistakes ---


def other_chunk(cut: Cut, whole: Tensor, rank: int, size: int) -> Tensor:
    return TAKE(cut, whole, size - 1 - rank, size)


TAKE = Cut.take


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A bias that is read as if it were not there; its tensor is taken all the same."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        linear = stated_layout._Builder._linear

        def forgetful(self: Any, full_name: str, *shape: Any, **how: Any) -> Any:
            found = linear(self, full_name, *shape, **how)
            return stated_layout.Linear(weights=found.weights) if full_name.endswith(name) else found

        patch.setattr(stated_layout._Builder, "_linear", forgetful)

    return plant


def other_base(patch: pytest.MonkeyPatch) -> None:
    default = rotary._KINDS["default"]
    other = {**rotary._KINDS, "default": lambda rope, dim: default({**rope, "rope_theta": rope["rope_theta"] + 1}, dim)}
    patch.setattr(rotary, "_KINDS", other)


def wider_window(patch: pytest.MonkeyPatch) -> None:
    made = stated_layout._attention_module

    def wider(config: Any, index: int) -> Any:
        module = made(config, index)
        module.sliding_window = module.sliding_window and module.sliding_window + 1
        return module

    patch.setattr(stated_layout, "_attention_module", wider)


def one_step_of_a_float(patch: pytest.MonkeyPatch) -> None:
    taken = stated_layout.StoredTensors.take

    def nearly(self: Any, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = taken(self, name, shape)
        if not name.endswith("1.mlp.down_proj.weight"):
            return tensor
        bits_of = tensor.clone().view(torch.int32)
        bits_of[-1, -1] ^= 1
        return bits_of.view(torch.float32)

    patch.setattr(stated_layout.StoredTensors, "take", nearly)


def other_epsilon(patch: pytest.MonkeyPatch) -> None:
    value = stated_config._value
    patch.setattr(
        stated_config, "_value", lambda raw, key, setting: 2e-6 if key == "rms_norm_eps" else value(raw, key, setting)
    )


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a cut of another rank": (lambda patch: patch.setattr(Cut, "take", other_chunk), "attention.qkv.weights[0]"),
    "a bias that is missing": (without("o_proj"), "attention.output.bias"),
    "the base of the angles": (other_base, "rotaries[0].inverse_frequencies"),
    "a window that is wider by one": (wider_window, "layers[1].attention.sliding_window"),
    "an epsilon": (other_epsilon, "norm.eps"),
    "the last bit of one weight": (one_step_of_a_float, "layers[1].mlp.down.weights[0]"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(tmp_path, monkeypatch, name):
    plant, place = PLANTED[name]
    folder = save_tiny_model("qwen3", tmp_path, attention_bias=True, **SLIDING)
    theirs = run_ranks(2, lambda group: recognized(folder, group))
    plant(monkeypatch)
    ours = run_ranks(2, lambda group: stated(folder, group))
    found = [path for pair in zip(ours, theirs, strict=True) for path in differences(*pair)]
    assert any(path.endswith(place) for path in found), found


# --- what is not stated ---

REFUSED: dict[str, dict[str, object]] = {
    "another architecture": {"architectures": ["LlamaForSequenceClassification"]},
    "a key that is not known": {"use_new_thing": True},
    "code of its own": {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
    "another activation": {"hidden_act": "gelu"},
    "another kind of angles": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "a key of the angles": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "angles by kind of layer": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "a count that is text": {"num_hidden_layers": "2"},
    "a count of nothing": {"num_key_value_heads": 0},
    "a flag that is a number": {"tie_word_embeddings": 1},
    "another type than is stored": {"dtype": "bfloat16"},
    "no type": {"dtype": None},
    "another size than is stored": {"intermediate_size": 47},
    "a bias that is not stored": {"attention_bias": True},
    "a layer less than is stored": {"num_hidden_layers": 1},
    "a layer more than is stored": {"num_hidden_layers": 3},
    "a head that is tied and stored": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_stated_is_left_to_hugging_face(tmp_path, name):
    folder = save_tiny_model("llama", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert isinstance(stated(folder, SingleRank()), DecoderLayout)
    change_config(folder, **REFUSED[name])
    with pytest.raises(NotStated):
        stated(folder, SingleRank())


def test_two_forms_of_the_weights_are_left_to_hugging_face(tmp_path):
    folder = save_tiny_model("llama", tmp_path)
    shutil.copy(folder / "model.safetensors", tmp_path / "kept")
    in_shards(folder)
    shutil.copy(tmp_path / "kept", folder / "model.safetensors")
    with pytest.raises(NotStated, match="must have exactly one of"):
        stated(folder, SingleRank())


def test_overrides_are_left_to_hugging_face(tmp_path):
    folder = save_tiny_model("llama", tmp_path)
    settings = ModelConfig(model=str(folder), hf_overrides={"rms_norm_eps": 1e-3})
    read = stated_layout.read_stated(settings, folder, SingleRank())
    assert read == "model.hf_overrides change its config"
