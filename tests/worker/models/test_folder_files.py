"""A model's folder with a file that is empty, cut short, a pointer of git-lfs, or of no type that is read is refused by
that file's name; what is there and whole is not.
"""

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.checks import choose_max_model_len
from holdfast.worker.models.safetensors_files import mapped_tensors
from holdfast.worker.models.weight_files import check_folder
from holdfast.worker.models.weights import load_checkpoint, read_config, read_eos_token_ids, resolve_model
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


NORM = "model.norm.weight"
HEADERS = {
    "a shape of floats": lambda header: header[NORM].update(shape=[32.0]),
    "a shape of bool": lambda header: header[NORM].update(shape=[True, 32]),
    "negative sizes": lambda header: header[NORM].update(shape=[-1, -32]),
    "places of floats": lambda header: header[NORM].update(
        data_offsets=[float(i) for i in header[NORM]["data_offsets"]]
    ),
    "three places": lambda header: header[NORM]["data_offsets"].append(0),
    "a type that is no text": lambda header: header[NORM].update(dtype=5),
    "metadata that is no table": lambda header: header.update(__metadata__=5),
    "metadata of numbers": lambda header: header.update(__metadata__={"format": 5}),
    "half a surrogate pair": lambda header: header.update({"\ud800": header.pop(NORM)}),
    "no object": lambda header: header.update({NORM: None}),
}


@pytest.mark.parametrize("change", HEADERS)
def test_a_header_that_is_not_of_the_format_is_refused(folder, change):
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    HEADERS[change](header)
    written = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + content[8 + length :])
    assert refusal(folder).startswith(f"{WEIGHTS} is not a safetensors file")


@pytest.mark.parametrize("num_bytes", range(8))
def test_a_header_of_any_length_is_read_alike(folder, num_bytes):
    before = {name: one.values.clone() for name, one in mapped_tensors(folder).items()}
    path = folder / WEIGHTS
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].rstrip(b" ")
    header += b" " * ((num_bytes - len(header)) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    now = mapped_tensors(folder)
    assert now.keys() == before.keys()
    assert all(torch.equal(one.values, before[name]) and one.values.is_contiguous() for name, one in now.items())
    assert all(one.values.data_ptr() % one.values.dtype.itemsize == 0 for one in now.values())


def test_a_name_that_is_twice_in_a_header_is_refused(folder):
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].strip()
    written = header[:-1] + b", " + header[1:]
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + content[8 + length :])
    assert refusal(folder).startswith(f"{WEIGHTS} is not a safetensors file")


@pytest.mark.parametrize("where", ["nowhere", WEIGHTS, "."])
def test_weights_that_cannot_be_read_are_named(folder, where):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(where)
    (folder / INDEX).unlink()
    assert refusal(folder).startswith(f"{WEIGHTS} cannot be read (")


@pytest.mark.parametrize(
    "name", ["model-00002-of-00002.safetensors", "../model.safetensors", ".", "a\0b", "a" * 5000, 5]
)
def test_a_file_that_an_index_names_and_that_is_not_there_is_named(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS, "b": name}}))
    assert refusal(folder).startswith(f"{str(name)[:200]}, which {INDEX} names, is not there")


@pytest.mark.parametrize("content", [b"caf\xe9 {{ messages }}", "{{ messages }}".encode("utf-16"), b"\x1f\x8b\x08\x00"])
def test_a_template_that_is_not_in_utf_8_is_refused(folder, content):
    (folder / "chat_template.jinja").write_bytes(content)
    assert refusal(folder).startswith("chat_template.jinja is not in UTF-8 (byte ")


@pytest.mark.parametrize("name", [name for name in CONTENTS if name not in (*NOT_JSON, "tokenizer.json")])
@pytest.mark.parametrize(
    "content", ["{}".encode("utf-16"), b"\xef\xbb\xbf{}", b'{"eos_token": "\\ud800"}', b'{"a": "\xe9"}']
)
def test_json_that_is_not_in_utf_8_is_refused(folder, name, content):
    (folder / name).write_bytes(content)
    assert refusal(folder).startswith(f"{name} is no JSON, or cut short (")


def test_a_name_that_no_file_can_have_is_refused_without_all_of_it():
    with pytest.raises(ConfigurationError, match=r"^model\.model = '(aé)+\.\.\.: a name of more than 255 bytes"):
        resolve_model("aé" * 150)


def test_weights_are_not_looked_at_where_none_are_wanted(folder):
    (folder / WEIGHTS).write_bytes(b"")
    check_folder(folder, "model.model = 'm'", with_weights=False)


@pytest.mark.parametrize("base", ["someone/base", None])
@pytest.mark.parametrize("with_config", [True, False])
def test_an_adapter_is_called_one(folder, base, with_config):
    (folder / INDEX).unlink()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    if not with_config:
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


@pytest.mark.parametrize(
    "entries",
    [
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"vocab_size": 0},
        {"vocab_size": -1},
        {"hidden_size": 2**63, "head_dim": 8},
        {"intermediate_size": -1},
        {"num_hidden_layers": 10**9},
        {"max_position_embeddings": 2**63},
        {"max_position_embeddings": 0},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": "4"}},
        {"architectures": [5]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": float("nan")}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": -2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e30}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": "x",
            }
        },
    ],
)
def test_a_config_that_no_model_can_be_built_of_is_refused(folder, entries):
    """By the way of those that no native backend reads, which ends in transformers' own code."""
    change_config(folder, **entries)
    with pytest.raises(UnsupportedModelError, match="model type 'llama' cannot be served: "):
        build(folder)


def build(folder: Path) -> None:
    config = read_config(folder)
    choose_max_model_len(config, None)
    load_checkpoint(folder, config)


@pytest.mark.parametrize("value", ["x", "2", [None], [[2]], {"a": 2}, 2.0, True])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_of_output_that_is_no_token_is_refused_by_name(folder, file, value):
    (folder / "generation_config.json").unlink()
    (folder / file).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigurationError, match=rf"{file}: eos_token_id = .*must be a token id or a list of them"):
        read_eos_token_ids(folder, SimpleNamespace(eos_token_id=value if file == "config.json" else None))
