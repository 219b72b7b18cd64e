"""GGUF files that cannot be served are refused by name, before anything is loaded."""

import os
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.errors import ConfigurationError, HoldfastError
from holdfast.worker.models.checkpoint_scheme import quantization_of
from holdfast.worker.models.formats.gguf_architectures import hf_config, hf_tensors
from holdfast.worker.models.formats.gguf_folder import hf_folder, source_of
from holdfast.worker.models.formats.gguf_header import read_header
from holdfast.worker.models.formats.gguf_metadata import NotUnderstood
from holdfast.worker.models.weight_files import checkpoint_digest, weight_bytes
from holdfast.worker.models.weights import resolve_model
from tests.examples import examples
from tests.worker.models.formats.gguf_files import ARCHITECTURES, ODD, Written, write_model
from tests.worker.models.formats.gguf_hybrid_files import CONVERTED, write_hybrid


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    return write_model("llama", tmp_path_factory.mktemp("model"), "Q8_0")


def copied(written: Written, folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def refused(path: Path, *words: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve_model(str(path))
    message = str(caught.value)
    assert str(path) in message or path.name in message
    for word in words:
        assert word in message, message
    return message


def test_a_truncated_file(written, tmp_path):
    content = written.file.read_bytes()
    for length in (0, 3, 10, 30, 2000, len(content) // 2, len(content) - 1):
        refused(copied(written, tmp_path, content[:length]), "model.gguf", "fetch it again")


def test_another_file_by_this_name(tmp_path):
    refused(copied(None, tmp_path, b"PK\3\4" + bytes(100)), "is not a GGUF file")
    refused(copied(None, tmp_path, b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs")


def test_another_version_and_byte_order(written, tmp_path):
    content = written.file.read_bytes()
    refused(copied(written, tmp_path, content[:4] + struct.pack("<I", 1) + content[8:]), "version 1")
    refused(copied(written, tmp_path, content[:4] + struct.pack(">I", 3) + content[8:]), "big-endian")


@pytest.mark.parametrize("kind", ["IQ4_NL", "Q2_K", "Q3_K", "TQ2_0", "I8"])
def test_types_that_are_not_read(tmp_path, kind):
    number = gguf.GGMLQuantizationType[kind]
    _, num_bytes = gguf.GGML_QUANT_SIZES[number]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, num_bytes), dtype=np.uint8), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "model.gguf", kind, "token_embd.weight", "Q4_K, Q5_K, Q6_K")


def test_a_type_that_has_no_name(written, tmp_path):
    content = bytearray(written.file.read_bytes())
    place = content.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    content[place : place + 4] = struct.pack("<I", 99)
    refused(copied(written, tmp_path, bytes(content)), "99", "blk.0.ffn_up.weight")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"general.architecture": "rwkv6"}, ("rwkv6", "granite, granitehybrid")),
        ({"llama.expert_count": 4}, ("lacks the key llama.expert_used_count",)),
        ({"llama.expert_count": 4, "llama.expert_used_count": 2}, ("blk.0.ffn_",)),
        ({"llama.expert_count": 4, "llama.expert_gating_func": 2}, ("has expert_gating_func 2",)),
        ({"llama.block_count": 3}, ("lacks", "blk.2.")),
        ({"llama.block_count": 1}, ("has a tensor blk.1.",)),
        ({"llama.feed_forward_length": 100}, ("ffn_down.weight", "(64, 100)")),
        ({"llama.attention.head_count": 8}, ("attn_", "128")),
        ({"llama.rope.dimension_count": 8}, ("shape",)),
        ({"llama.rope.scaling.type": "spiral", "llama.rope.scaling.factor": 2.0}, ("spiral",)),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, ("layer_norm_rms_epsilon", "above 0")),
        ({"llama.context_length": "long"}, ("context_length", "long")),
    ],
)
def test_metadata_that_do_not_fit(tmp_path, fields, words):
    refused(write_model("llama", tmp_path, "F32", fields=fields).file, *words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, ("mystery",)),
        ({"tokenizer.ggml.model": "rwkv"}, ("rwkv",)),
        ({"tokenizer.ggml.merges": ["Ġ t x"]}, ("merge",)),
        ({"tokenizer.ggml.merges": ["no such"]}, ("BPE",)),
        ({"tokenizer.ggml.eos_token_id": 5000}, ("eos_token_id = 5000",)),
    ],
)
def test_a_tokenizer_that_is_not_known_leaves_the_weights(tmp_path, fields, words):
    written = write_model("llama", tmp_path, "F32", fields=fields)
    assert (resolve_model(str(written.file)) / "config.json").is_file()
    with pytest.raises(ConfigurationError) as caught:
        resolve_model(str(written.file), False, needs="tokenizer.json")
    for word in words:
        assert word in str(caught.value)


def test_a_folder_with_several_files(written, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(written.file.read_bytes())
    with pytest.raises(ConfigurationError, match=r"2 GGUF files \(a\.gguf, b\.gguf\); name the one"):
        resolve_model(str(tmp_path))


def test_a_part_that_is_missing_or_another_files(tmp_path):
    write_model("llama", tmp_path, "Q8_0", parts=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    content = parts[1].read_bytes()
    parts[1].write_bytes(parts[0].read_bytes())
    refused(parts[0], "part 2 of")
    parts[1].unlink()
    refused(parts[2], parts[1].name, "not there")
    parts[1].write_bytes(content)
    assert resolve_model(str(parts[0]))


def test_there_is_no_such_file(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        resolve_model(str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigurationError, match="no such file"):
        resolve_model("none.gguf")


def test_another_file_in_its_place_is_another_model(written, tmp_path, user_folder):
    path = copied(written, tmp_path, written.file.read_bytes())
    first = resolve_model(str(path))
    assert resolve_model(str(path)) == first
    assert source_of(first) == path.resolve()
    other = bytearray(path.read_bytes())
    other[-100] ^= 1
    path.write_bytes(bytes(other))
    os.utime(path, ns=(1, 1))
    second = resolve_model(str(path))
    assert second != first
    assert len(list((user_folder / "gguf").iterdir())) == 2


def test_a_folder_that_another_process_drops_meanwhile_is_none(written, user_folder):
    """A link to nothing has no time either."""
    (user_folder / "gguf").mkdir(exist_ok=True)
    (user_folder / "gguf" / "dropped").symlink_to(user_folder / "nowhere")
    assert hf_folder(written.file, "model").is_dir()


def test_the_fingerprint_is_that_of_the_content(written, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    same = copied(written, tmp_path / "elsewhere", written.file.read_bytes())
    assert checkpoint_digest(hf_folder(same, "model")) == checkpoint_digest(hf_folder(written.file, "model"))
    changed = bytearray(same.read_bytes())
    changed[-1] ^= 1
    other = copied(written, tmp_path, bytes(changed))
    assert checkpoint_digest(hf_folder(other, "model")) != checkpoint_digest(hf_folder(written.file, "model"))


def test_the_type_of_most_weights_is_said(tmp_path):
    files = {kind: write_model("llama", tmp_path / kind, kind).file for kind in ("Q4_1", "F16")}
    said = {kind: quantization_of(hf_folder(path, "the model")) for kind, path in files.items()}
    assert said == {"Q4_1": "GGUF Q4_1", "F16": "none"}


def test_the_weights_are_counted_in_the_type_that_is_served(written):
    folder = hf_folder(written.file, "model")
    numbers = sum(tensor.numel() for tensor in written.numbers.values())
    assert weight_bytes(folder) == 2 * numbers
    assert weight_bytes(folder, "float32") == 4 * numbers


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_a_tampered_header_is_refused_or_read(written, tmp_path_factory, data):
    content = bytearray(written.file.read_bytes())
    header = content.index(b"output_norm.weight") + 200
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, header))
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("tampered") / "model.gguf"
    path.write_bytes(bytes(content))
    with suppress(HoldfastError):
        resolve_model(str(path))


@pytest.mark.parametrize("family", [*ARCHITECTURES, *CONVERTED])
def test_odd_metadata_are_refused_or_read(tmp_path, family):
    """Each key with another value in turn, and without one: no other error comes up."""
    write = write_model if family in ARCHITECTURES else write_hybrid
    header = read_header(write(family, tmp_path, "Q8_0").file, "model")
    own = [key for key in header.metadata if key.startswith(f"{header.metadata['general.architecture']}.")]
    for key in own:
        changed = [header.metadata | {key: value} for value in ODD]
        changed.append({name: value for name, value in header.metadata.items() if name != key})
        for metadata in changed:
            with suppress(NotUnderstood):
                odd = replace(header, metadata=metadata)
                hf_tensors(odd, hf_config(odd))
