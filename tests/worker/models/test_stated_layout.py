"""The layout of a stated family is what is recognized in Hugging Face's modules, field by field and bit by bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.distributed.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.executors.layout import DecoderLayout, Linear
from holdfast.worker.models import rotary, stated_config, stated_layout
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.model import build_tree
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.recognize import recognize
from holdfast.worker.models.stated_config import read_stated_config
from holdfast.worker.models.stated_layout import read_stated
from holdfast.worker.models.stated_tensors import StoredTensors
from holdfast.worker.models.weights import read_config
from tests.fake_group import run_ranks
from tests.parity.families import NOT_SPLIT, YARN, save_tiny_model
from tests.worker.executors.models import MODELS
from tests.worker.models.layouts import differences, stated

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32

LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LONG_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.3}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0] * 4,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}
MIXED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    "gemma, biases": ("gemma", {"attention_bias": True, "tie_word_embeddings": False}),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "granite, biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, heads by the hidden size": ("llama", {"head_dim": None, "num_key_value_heads": None}),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3, longrope with a factor of attention": (
        "phi3",
        {"rope_parameters": {**LONGROPE, "attention_factor": 1.25}, "original_max_position_embeddings": 64},
    ),
    "gemma3_text, one kind of layer": ("gemma3_text", {"layer_types": ["full_attention"] * 2}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5, biases": ("ernie4_5", {"use_bias": True}),
    "gpt_neox, no biases": ("gpt_neox", {"attention_bias": False}),
    "nemotron, biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "seed_oss, biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "helium, biases": ("helium", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_moe, windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "decoder_sparse_step": 2}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn with all it may have": ("llama", {"rope_parameters": LONG_YARN}),
    "llama, yarn with a factor of attention": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "mistral, no window": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen2, windows": ("qwen2", {**SLIDING, "tie_word_embeddings": False}),
    "qwen2, windows by layer": ("qwen2", MIXED),
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
def checkpoint(request, tmp_path_factory) -> tuple[str, Path]:
    family, changes = CASES[request.param]
    return request.param, save_tiny_model(family, tmp_path_factory.mktemp("model"), **changes)


def recognized(folder: Path, group: TensorParallelGroup, dtype: str = "auto") -> DecoderLayout:
    """What Hugging Face's modules are read as."""
    config = read_config(folder)
    served = config.dtype if dtype == "auto" else getattr(torch, dtype)
    target = Target(group=group, device=CPU, dtype=served)
    settings = ModelConfig(model=str(folder), dtype=dtype)
    layout = recognize(build_tree(settings, folder, config, target, lambda *_: None), group.size)
    assert isinstance(layout, DecoderLayout), layout
    return layout


def differences_on(folder: Path, size: int, dtype: str = "auto") -> list[str]:
    def compared(group: TensorParallelGroup) -> list[str]:
        return differences(stated(folder, group, dtype), recognized(folder, group, dtype))

    return [found for rank in run_ranks(size, compared) for found in rank]


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_the_stated_layout_is_that_which_is_recognized(checkpoint, size):
    name, folder = checkpoint
    if size > 1 and name in NOT_SPLIT:
        settings = ModelConfig(model=str(folder))
        reasons = run_ranks(size, lambda group: read_stated(settings, folder, group))
        assert all("have to gather" in str(reason) for reason in reasons)
    else:
        assert differences_on(folder, size) == []


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


SIZES = {"vocab_size": 126, "hidden_size": 1280, "intermediate_size": 48, "num_hidden_layers": 30}
HEADS = {"num_attention_heads": 160}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_config_json_leaves_out_is_what_transformers_takes(tmp_path, family):
    """And the older names of rotary angles are read alike."""
    raw = {"model_type": family, "dtype": "bfloat16", **SIZES, **HEADS, "max_position_embeddings": 64}
    scaling = {"rope_scaling": {"type": "linear", "factor": 2.0}} if family not in ("phi3", "gemma4_text") else {}
    theta = "rotary_emb_base" if family == "gpt_neox" else "rope_theta"
    for more in ({}, {theta: 5000, **scaling, FAMILIES[family].eps: 1e-4}):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **more}))
        ours, theirs = read_stated_config({**raw, **more}), read_config(tmp_path)
        theirs.allow_global_per_layer_attribute_access = True
        expected = {name: getattr(theirs, name, None) for name in vars(ours)}
        expected["head_dim"] = expected["head_dim"] or 8  # by modules, where a config has none
        expected["num_key_value_heads"] = expected["num_key_value_heads"] or 160
        assert {name: plain(value) for name, value in vars(ours).items() if name in entries_of(theirs)} == {
            name: plain(value) for name, value in expected.items() if name in entries_of(theirs)
        }


def entries_of(config: Any) -> set[str]:
    """Those that transformers has for the family."""
    return {name for name in vars(config) if name not in ("sliding_window", "mlp_only_layers")} | {"head_dim"}


def plain(value: Any) -> Any:
    """Without older names of entries, and those that do nothing."""
    if not isinstance(value, dict):
        return value
    kept = {key: plain(item) for key, item in value.items() if key != "type"}
    return {key: item for key, item in kept.items() if (key, item) != ("partial_rotary_factor", 1.0)}


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
    window = stated_layout._Builder._window
    patch.setattr(stated_layout._Builder, "_window", lambda self, index: (w := window(self, index)) and w + 1)


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
    theirs = run_ranks(2, lambda group: recognized(folder, group))
    plant(monkeypatch)
    ours = run_ranks(2, lambda group: stated(folder, group))
    found = [path for pair in zip(ours, theirs, strict=True) for path in differences(*pair)]
    assert any(path.endswith(place) for path in found), found


# --- what is not stated ---

REFUSED: dict[str, dict[str, object]] = {
    "another architecture": {"architectures": ["LlamaForSequenceClassification"]},
    "what no layout can say": {"clip_qkv": 2.0},
    "another activation": {"hidden_act": "quick_gelu"},
    "another kind of angles": {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}},
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
