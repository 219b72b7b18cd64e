"""Adapter folders: what is read, and what is refused by name before anything changes."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.worker.adapter import Adapter, check_adapter_name
from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.adapter_folder import read_adapter
from holdfast.worker.models.adapter_tables import OwnTables, differing_row
from holdfast.worker.models.formats.gguf_folder import hf_folder
from holdfast.worker.models.stated_config import read_stated_config
from tests.parity.families import save_tiny_model
from tests.worker.models.adapter_folders import PREFIX, TABLES, places_of, save_adapter
from tests.worker.models.formats.gguf_files import SIZES, TURNS, write_model

Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("base"))


def applied(base: Path, folder: Path, name: str = "a"):
    places = places_of(base)
    read = places.named(read_adapter(name, str(folder)))
    read.check_finite()
    places.check_copies(read)
    return places.apply(read)


def drop(*names):
    return lambda config, tensors: [tensors.pop(name) for name in names]


def put(name, value):
    return lambda config, tensors: tensors.update({name: value})


BAD = {
    "has no lora_B": {"change": drop(f"{Q}.lora_B.weight")},
    "target_modules name model.layers.0.self_attn.q_proj": {"change": drop(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight")},
    "and config.json says|says rank 8": {"change": put(f"{Q}.lora_A.weight", torch.ones(4, 32))},
    "an adapter of another model": {"change": put(f"{Q}.lora_A.weight", torch.ones(8, 64))},
    "has a NaN": {"change": put(f"{Q}.lora_A.weight", torch.full((8, 32), torch.nan))},
    "must be a matrix of a floating type": {"change": put(f"{Q}.lora_A.weight", torch.ones(8, 32, dtype=torch.int32))},
    "is not supported: only lora_A": {"change": put(f"{PREFIX}lm_head.weight", torch.ones(8, 32))},
    "target_modules name lm_head, and there are no tensors": {
        "tables": TABLES,
        "change": drop(*(f"{PREFIX}lm_head.{one}.weight" for one in ("lora_A", "lora_B", "base_layer"))),
    },
    "embed_tokens has lora_A .* it is an adapter of another model": {
        "tables": TABLES,
        "change": put(f"{PREFIX}model.embed_tokens.lora_embedding_A", torch.ones(8, 127)),
    },
    "row 5 of lm_head.base_layer.weight is not that of the model": {
        "tables": TABLES,
        "change": lambda _, tensors: tensors[f"{PREFIX}lm_head.base_layer.weight"][5].mul_(1.01),
    },
    r"base_layer.weight is \(127, 32\), and the model's weight \(126, 32\)": {
        "tables": TABLES,
        "change": put(f"{PREFIX}lm_head.base_layer.weight", torch.ones(127, 32)),
    },
    "q_proj.base_layer.weight is no copy of the model's embedding": {
        "change": put(f"{Q}.base_layer.weight", torch.ones(32, 32))
    },
    "is no module of this model": {
        "change": lambda config, tensors: (
            config["target_modules"].append("router"),
            tensors.update({f"{PREFIX}model.layers.0.router.lora_{part}.weight": torch.ones(8, 8) for part in "AB"}),
        )
    },
    "which its target_modules do not name": {"target_modules": ["k_proj"]},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "target_parameters": {"target_parameters": "mlp.experts.gate_up_proj"},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "a_field_of_tomorrow": {"a_field_of_tomorrow": 1},
    "bias": {"bias": "all"},
    "peft_type": {"peft_type": "IA3"},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "must have a number": {"lora_alpha": "large"},
    "from 1 to 256": {"r": 257},
    "is no regular expression": {"target_modules": "(["},
    "takes longer than 0.1 s": {"target_modules": r"(.|..|...)+[A-Z]+"},
    "lora_alpha = 0, by which nothing would be added": {"lora_alpha": 0},
    "q_proj has lora_alpha = 0": {"alpha_pattern": {"q_proj": 0}},
    "use_rslora = 'false'": {"use_rslora": "false"},
    "rank_pattern = .* must be an object": {"rank_pattern": ["q_proj"]},
    "lora_alpha = 'nan', and must have a number": {"lora_alpha": float("nan")},
    "r = 'True', and must have a number": {"r": True},
    "rank -8, and must have a whole number": {"r": -8},
    "rank 7.5, and must have a whole number": {"r": 7.5},
    "target_modules = .* must be a list of names": {"target_modules": [1]},
    "lora_A twice": {"change": put(f"{Q}.lora_A.default.weight", torch.ones(8, 32))},
    r"is torch.float8_e4m3fn \(8, 32\)": {
        "change": put(f"{Q}.lora_A.weight", torch.ones(8, 32).to(torch.float8_e4m3fn))
    },
    r"is torch.float32 \(1, 8, 32\)": {"change": put(f"{Q}.lora_A.weight", torch.ones(1, 8, 32))},
    "has an? .*infinity": {"change": put(f"{Q}.lora_B.weight", torch.full((32, 8), torch.inf))},
    "the tensor ../../x is not supported": {"change": put("../../x", torch.ones(8, 32))},
}


@pytest.mark.parametrize("told", BAD)
def test_refused_by_name(base, tmp_path, told):
    folder = save_adapter(base, tmp_path / "bad", **BAD[told])
    with pytest.raises(ConfigurationError, match=told) as refused:
        applied(base, folder, "mine")
    assert "adapter mine in " in str(refused.value)


def test_pickles_and_broken_files(base, tmp_path):
    folder = save_adapter(base, tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-9])
    with pytest.raises(ConfigurationError, match="cut short"):
        read_adapter("a", str(folder))
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigurationError, match="is a pickle"):
        read_adapter("a", str(folder))
    save_adapter(base, folder)
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="no JSON object"):
        read_adapter("a", str(folder))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_adapter("a", str(tmp_path / "nowhere"))


def test_files_that_are_none(base, tmp_path):
    """Each is refused before it is read: a pipe or a device may be read for ever."""
    for number, (name, make) in enumerate(
        [
            ("adapter_config.json", lambda path: os.mkfifo(path)),
            ("adapter_model.safetensors", lambda path: os.mkfifo(path)),
            ("adapter_model.safetensors", lambda path: path.symlink_to("/dev/zero")),
            ("adapter_model.safetensors", lambda path: path.mkdir()),
            ("adapter_config.json", lambda path: path.symlink_to(path)),
        ]
    ):
        folder = save_adapter(base, tmp_path / str(number))
        (folder / name).unlink()
        make(folder / name)
        for read in (read_adapter, Adapter.in_folder):
            with pytest.raises(ConfigurationError, match=f"adapter a in .*{name} cannot be read"):
                read("a", str(folder))


def test_files_that_are_too_large_or_no_safetensors(base, tmp_path):
    folder = save_adapter(base, tmp_path / "adapter")
    for content in (b"", b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]"):
        (folder / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"is not a safetensors file|has no tensors"):
            read_adapter("a", str(folder))
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.truncate((8 << 30) + 1)  # a hole
    (folder / "adapter_config.json").write_bytes(b"{" + b" " * (1 << 20) + b"}")
    for read in (read_adapter, Adapter.in_folder):
        with pytest.raises(ConfigurationError, match=r"adapter_config.json has \d+ bytes; the maximum is 1048576"):
            read("a", str(folder))
    save_adapter(base, tmp_path / "other").joinpath("adapter_config.json").replace(folder / "adapter_config.json")
    for read in (read_adapter, Adapter.in_folder):
        with pytest.raises(ConfigurationError, match=r"safetensors has \d+ bytes; the maximum is 8589934592"):
            read("a", str(folder))


@pytest.mark.parametrize(
    "path", ["", "a\0b", "\ud800", "~nobody-of-this-name/a", "x" * 5000, "/proc/self/mem", "/dev/null", "a\nb"]
)
def test_paths_that_are_none(path):
    for read in (read_adapter, Adapter.in_folder):
        with pytest.raises(ConfigurationError, match="adapter mine in") as refused:
            read("mine", path)
        assert len(str(refused.value).encode()) < 700


def test_mixed_types_are_rounded_to_the_models(base, tmp_path):
    def halve(config, tensors):
        tensors.update({name: tensor.half() for name, tensor in tensors.items() if "lora_A" in name})

    found = applied(base, save_adapter(base, tmp_path / "mixed", change=halve))["0.qkv"].parts[0]
    assert found is not None
    assert (found.a.dtype, found.b.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("name", ["", "../up", "/etc/passwd", "a/../b", "a//b", ".hidden", "a b", "a\nb", "x" * 201])
def test_names_that_are_paths_or_none(name):
    with pytest.raises(ConfigurationError, match="lora_name"):
        check_adapter_name(name)


def test_targets_ranks_and_scales(base, tmp_path):
    everything = save_adapter(base, tmp_path / "all", target_modules="all-linear")
    by_regex = save_adapter(base, tmp_path / "regex", target_modules=r".*\.(self_attn|mlp)\.\w+", use_rslora=True)
    assert len(applied(base, everything)) == len(applied(base, by_regex)) == 8
    assert [part.scale for part in applied(base, everything)["0.qkv"].parts] == [2.0] * 3
    assert [part.scale for part in applied(base, by_regex)["0.qkv"].parts] == [16 / 8**0.5] * 3
    some = save_adapter(base, tmp_path / "some", targets=["v_proj"], alpha_pattern={"0.self_attn.v_proj": 4})
    found = applied(base, some)
    assert found.keys() == {"0.qkv", "1.qkv"}
    assert [part and part.scale for part in found["0.qkv"].parts] == [None, None, 0.5]
    assert [part and part.scale for part in found["1.qkv"].parts] == [None, None, 2.0]


def test_layers_that_were_left_out_and_others_that_miss_one(base, tmp_path):
    first = [f"{PREFIX}model.layers.1.{name}.lora_{part}.weight" for part in "AB" for name in ("self_attn.q_proj",)]
    folder = save_adapter(base, tmp_path / "first", targets=["q_proj"], change=drop(*first), layers_to_transform=[0])
    assert applied(base, folder).keys() == {"0.qkv"}


def test_the_digest_is_of_the_content(base, tmp_path):
    one, same, other = (save_adapter(base, tmp_path / name, seed=seed) for name, seed in (("1", 0), ("2", 0), ("3", 1)))
    digests = [read_adapter("a", str(folder)).digest for folder in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]


def test_an_adapter_without_effect_is_known(base, tmp_path):
    def without(config, tensors):
        tensors.update({name: value * 0 for name, value in tensors.items() if "lora_B" in name})

    assert not read_adapter("a", str(save_adapter(base, tmp_path / "none", change=without))).has_effect
    assert read_adapter("a", str(save_adapter(base, tmp_path / "some"))).has_effect


def test_copies_beside_a_quantized_model(tmp_path):
    """They are those of the folder that was quantized."""
    file = write_model("llama", tmp_path, "Q4_0").file
    made = hf_folder(file, "model")
    config = read_stated_config(json.loads((made / "config.json").read_text()))
    tables = OwnTables(ModelConfig(model=str(file)), config, made)
    for seed, is_own in ((0, True), (1, False)):
        other = save_tiny_model("llama", tmp_path / f"other{seed}", seed=seed, **SIZES, **TURNS["llama"])
        copies = load_file(other / "model.safetensors")
        for name in TABLES:
            assert (differing_row(tables.of(name), copies[f"{name}.weight"]) is None) is is_own


def test_a_tied_head_is_compared_with_the_table(tmp_path):
    tied = save_tiny_model("llama", tmp_path / "base", tie_word_embeddings=True)
    assert applied(tied, save_adapter(tied, tmp_path / "adapter", tables=TABLES))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_of_the_model_s_tables_may_be_rounded(base, tmp_path, dtype):
    def rounded(_, tensors):
        tensors.update({name: one.to(dtype) for name, one in tensors.items() if name.endswith("base_layer.weight")})

    assert applied(base, save_adapter(base, tmp_path / "adapter", tables=TABLES, change=rounded))
