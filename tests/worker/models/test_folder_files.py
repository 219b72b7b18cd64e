"""A model's folder with a file that is empty, cut short, a pointer of git-lfs, or of no type that is read is refused by
that file's name; what is there and whole is not.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.checks import choose_max_model_len
from holdfast.worker.models.weight_files import check_folder
from holdfast.worker.models.weights import read_config, resolve_model
from tests.parity.families import save_tiny_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONTENTS = {
    "config.json": b"",
    "generation_config.json": b'{"eos_token_id": 2, "temperature": 0.7}',
    "tokenizer.json": b'{"model": {"vocab": {"a": 0}}, "version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "</s>", "chat_template": "x"}',
    "special_tokens_map.json": b'{"eos_token": "</s>"}',
    "chat_template.json": b'{"chat_template": "x"}',
    "chat_template.jinja": b"{{ messages }}",
    INDEX: b'{"weight_map": {"a": "model.safetensors"}}',
    WEIGHTS: b"",
}
NOT_JSON = ("chat_template.jinja", WEIGHTS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("saved"))
    for name, content in CONTENTS.items():
        if content:
            (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigurationError) as refused:
        resolve_model(str(folder))
    assert f"model.model = {str(folder)!r}: " in str(refused.value)
    return str(refused.value).split(": ", 1)[1]


def test_a_whole_folder_is_taken(folder):
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("name", CONTENTS)
def test_an_empty_file_is_named(folder, name):
    (folder / name).write_bytes(b"")
    assert refusal(folder) == f"{name} is empty; fetch it again"


@pytest.mark.parametrize("name", CONTENTS)
def test_a_pointer_of_git_lfs_is_called_one(folder, name):
    (folder / name).write_bytes(POINTER)
    assert refusal(folder).startswith(f"{name} is a git-lfs pointer")


@pytest.mark.parametrize("name", [name for name in CONTENTS if name != "chat_template.jinja"])
def test_a_file_that_is_cut_short_is_named(folder, name):
    whole = (folder / name).read_bytes()
    for length in {1, len(whole) // 2, len(whole.rstrip()) - 2}:
        (folder / name).write_bytes(whole[:length])
        assert name in (said := refusal(folder))
        assert "cut short" in said


@pytest.mark.parametrize("name", [name for name in CONTENTS if name not in NOT_JSON])
def test_json_that_is_no_object_is_named(folder, name):
    (folder / name).write_bytes(b"[1, 2]")
    assert refusal(folder) == f"{name} holds no JSON object; fetch it again"


def test_weights_with_more_than_their_header_says_are_named(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole + b"x")
    assert f"has {len(whole) + 1} bytes, where its header says {len(whole)}" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model.norm.weight", {"dtype": "F8_E4M3"}),
        ("model.norm.weight", {"shape": [3]}),
        ("another.weight", {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),
    ],
)
def test_a_header_whose_tensors_do_not_fit_their_places_is_refused_by_name(folder, name, changes):
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[name] = {**header.get(name, {}), **changes}
    written = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + content[8 + length :])
    said = refusal(folder)
    assert said.startswith(f"{WEIGHTS} has a header that does not fit: its place of ")
    assert name == "another.weight" or name in said


def test_a_file_that_an_index_names_and_that_is_not_there_is_named(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}))
    assert refusal(folder).startswith(f"model-00002-of-00002.safetensors, which {INDEX} names, is not there")


def test_weights_are_not_looked_at_where_none_are_wanted(folder):
    (folder / WEIGHTS).write_bytes(b"")
    check_folder(folder, "model.model = 'm'", with_weights=False)


@pytest.mark.parametrize("base", ["someone/base", None])
def test_an_adapter_is_called_one(folder, base):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    said = refusal(folder)
    assert said.startswith(f"this is the folder of an adapter{f' of {base}' if base else ''} (")


FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
OTHERS = (
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
    "complex64",
    "float8_e8m0fnu",
)


def store_as(folder: Path, dtype: str, name: str) -> None:
    weights = load_file(folder / WEIGHTS)
    weights[name] = torch.ones(4, 4).to(getattr(torch, dtype))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_of_all_types_with_values_of_their_own_are_taken(folder, dtype):
    store_as(folder, dtype, "model.layers.0.mlp.down_proj.weight")
    resolve_model(str(folder))


@pytest.mark.parametrize("dtype", OTHERS)
def test_weights_of_other_types_are_refused_by_name(folder, dtype):
    name = "model.layers.0.mlp.down_proj.weight"
    store_as(folder, dtype, name)
    assert refusal(folder).startswith(f"{name} in {WEIGHTS} is of type ")
    store_as(folder, "float32", name)
    store_as(folder, dtype, "transformer.h.0.attn.masked_bias")
    resolve_model(str(folder))


def change_config(folder: Path, **entries: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in entries.items():
        config.pop(name, None)
        if value is not ...:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("torch.bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        ("half", torch.float16),
        ("float32", torch.float32),
        ("torch.float64", torch.float32),
        (None, None),
    ],
)
def test_a_type_may_be_spelled_in_several_ways(folder, key, written, dtype):
    change_config(folder, dtype=..., torch_dtype=...)
    change_config(folder, **{key: written})
    assert read_config(folder).dtype == dtype


@pytest.mark.parametrize("written", ["int8", "float8_e4m3fn", "torch.quint8", 16, "os.system"])
def test_a_type_that_no_model_is_served_in_is_refused(folder, written):
    change_config(folder, dtype=..., torch_dtype=written)
    with pytest.raises(ConfigurationError, match=r"config\.json: torch_dtype = .*bfloat16, float16, float32"):
        read_config(folder)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 2.5}, 320),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "linear", "factor": 2.0}, 128),
    ],
)
def test_a_recipe_for_longer_contexts_counts(folder, rope, length):
    change_config(folder, rope_parameters=..., rope_theta=10000.0, rope_scaling=rope)
    config = read_config(folder)
    assert choose_max_model_len(config, None) == length
    assert choose_max_model_len(config, length) == length
    with pytest.raises(ConfigurationError, match=f"at most {length}"):
        choose_max_model_len(config, length + 1)
