"""What a newcomer gets wrong in the first hour: found before Ray starts, in one line that says what to do next."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.commands.cli import run
from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.layers import Setting
from holdfast.cluster.config.machine import MAX_RANKS_PER_CORE, RANK_BYTES, Machine, check_fits, crowding
from holdfast.cluster.config.model_files import check_files, check_hub
from holdfast.cluster.serve.examination import Level, examine
from holdfast.cluster.serve.local import check_reachable, plain_ray_errors
from holdfast.cluster.serve.preflight import check_ports, check_socket_paths
from holdfast.router.text.chat import render_chat
from holdfast.router.wire.statuses import CallStatus, error_of
from holdfast.worker.errors import ConfigurationError, HoldfastError, InvalidRequestError, ReplicaError
from holdfast.worker.models.weight_files import weight_bytes
from holdfast.worker.models.weights import resolve_model
from holdfast.worker.wire.loopback import check_loopback, host_port

GIB = 2**30
LAPTOP = Machine(num_cores=2, available_bytes=8 * GIB, num_gpus=0)
SERVER = Machine(num_cores=64, available_bytes=500 * GIB, num_gpus=4)


def config(**settings) -> HoldfastConfig:
    return load_config({path.replace("__", "."): Setting(value, "test") for path, value in settings.items()}).config


def refusal(check, *arguments) -> str:
    with pytest.raises(HoldfastError) as found:
        check(*arguments)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model's folder that a test may break."""
    for path in bundled_path("demo").iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


# --- the model ---


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "~/nowhere"])
def test_a_folder_that_is_not_there(name):
    assert refusal(check_files, config(model__model=name)) == f"model.model = {name!r}: there is no such folder"


@pytest.mark.parametrize("name", ["models/llama/7b", "my model", "a//b"])
def test_a_name_that_is_neither_a_folder_nor_a_hub_id(name):
    assert "config.json, tokenizer.json and *.safetensors, a GGUF file, a hub id, or demo" in refusal(
        check_files, config(model__model=name)
    )


def test_a_file_instead_of_its_folder(folder):
    said = refusal(check_files, config(model__model=str(folder / "config.json")))
    assert "give its folder" in said


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("config.json", "no config.json"), ("model.safetensors", "no *.safetensors"), ("tokenizer.json", "--tokenizer")],
)
def test_a_folder_without_one_of_its_files(folder, missing, expected):
    (folder / missing).unlink()
    assert expected in refusal(check_files, config(model__model=str(folder)))


def test_weights_in_another_format_are_named(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "*.bin are not read" in refusal(check_files, config(model__model=str(folder)))


@pytest.mark.parametrize("text", ["nonsense", "[]"])
def test_a_config_that_is_none(folder, text):
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(check_files, config(model__model=str(folder)))


def test_a_tensor_parallel_size_that_the_heads_do_not_allow():
    said = refusal(check_files, config(parallel__tensor_parallel_size=3))
    assert "4 query and 2 KV heads cannot be shared by 3 ranks" in said
    assert "tensor_parallel_size" in said


def test_a_model_that_the_hub_does_not_give_and_one_whose_heads_do_not_fit(monkeypatch, tmp_path):
    import huggingface_hub

    def no_network(*arguments, **options):
        raise OSError("no such\nhost")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    wanted = config(model__model="no/such", parallel__tensor_parallel_size=3)
    check_files(wanted)
    said = refusal(check_hub, wanted)
    assert "no such host" in said
    assert "HF_TOKEN" in said
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *arguments, **options: str(tmp_path))
    assert "cannot be shared by 3 ranks" in refusal(check_hub, wanted)


def test_a_hub_id_that_only_loading_looks_up_is_one_line_too(monkeypatch):
    import huggingface_hub

    def no_network(*arguments, **options):
        raise OSError("no such\nhost. ")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    said = refusal(resolve_model, "no/such")
    assert "no such host. Is the name right" in said
    assert "HF_TOKEN" in said


def test_the_bundled_model_passes():
    check_files(config())
    check_hub(config())
    check_fits([config()], LAPTOP)


# --- the machine ---


def test_cuda_without_a_gpu():
    said = refusal(check_fits, [config(model__device="cuda")], LAPTOP)
    assert "no NVIDIA GPU" in said
    assert "set it to cpu" in said


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus(device):
    two = config(model__device=device, cluster__replicas=3, parallel__tensor_parallel_size=2)
    assert "needs 6 GPUs, one for each rank, and this machine has 4" in refusal(check_fits, [two], SERVER)
    check_fits([config(model__device=device, cluster__replicas=2, parallel__tensor_parallel_size=2)], SERVER)
    check_fits([config(model__device="cpu", cluster__replicas=6)], SERVER)


def test_keys_and_values_in_fp8_need_a_gpu():
    wanted = config(cache__kv_cache_dtype="fp8")
    check_fits([wanted], SERVER)
    said = refusal(check_fits, [wanted], LAPTOP)
    assert said.startswith("cache.kv_cache_dtype = 'fp8': the model runs on a CPU")


def test_keys_and_values_in_int8_need_a_cpu():
    wanted = config(cache__kv_cache_dtype="int8")
    check_fits([wanted], LAPTOP)
    assert refusal(check_fits, [wanted], SERVER).startswith("cache.kv_cache_dtype = 'int8': the model runs on a GPU")


def test_more_replicas_than_the_memory_holds():
    most = LAPTOP.available_bytes // RANK_BYTES
    said = refusal(check_fits, [config(cluster__replicas=most + 1)], LAPTOP)
    assert f"cluster.replicas = {most + 1}" in said
    assert "8 GiB left; lower --replicas" in said
    check_fits([config(cluster__replicas=most // 2)], LAPTOP)


def test_a_cache_larger_than_the_memory():
    said = refusal(check_fits, [config(cache__kv_cache_memory="9GiB")], LAPTOP)
    assert said.startswith("cache.kv_cache_memory = 9 GiB: this machine has 8 GiB of memory left")
    twice = config(cache__kv_cache_memory="5GiB", cluster__replicas=2)
    assert "needs about 10.4 GiB" in refusal(check_fits, [twice], LAPTOP)


def test_weights_larger_than_the_memory(folder):
    large = folder / "model-00002-of-00002.safetensors"
    large.touch()
    with large.open("r+b") as file:
        file.truncate(9 * GIB)  # a sparse file
    said = refusal(check_fits, [config(model__model=str(folder))], LAPTOP)
    assert "its weights are 9.0" in said
    assert "holdfast estimate" in said
    check_fits([config(model__model=str(folder), model__load_format="dummy")], LAPTOP)


def test_weights_count_in_the_type_that_they_are_served_in(tmp_path):
    """The bundled model's file is in bfloat16."""
    file = bundled_path("demo") / "model.safetensors"
    (tmp_path / "model.safetensors").symlink_to(file)
    stored = weight_bytes(tmp_path)
    assert 0.99 * file.stat().st_size < stored < file.stat().st_size, "all but the header"
    (tmp_path / "consolidated.safetensors").symlink_to(file)  # the same once more, in a publisher's own format
    assert weight_bytes(tmp_path) == weight_bytes(tmp_path, "float16") == stored
    assert weight_bytes(tmp_path, "float32") == 2 * stored
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    assert weight_bytes(tmp_path) == 2 * stored
    assert weight_bytes(tmp_path, "bfloat16") == stored
    (tmp_path / "other.safetensors").write_bytes(b"no header")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other.safetensors"}}')
    assert weight_bytes(tmp_path) == len(b"no header")


def test_a_type_that_makes_the_weights_too_large():
    stored = weight_bytes(bundled_path("demo"), "bfloat16")
    machine = Machine(num_cores=2, available_bytes=RANK_BYTES + stored * 3 // 2, num_gpus=0)
    check_fits([config(model__dtype="bfloat16")], machine)
    assert "needs about" in refusal(check_fits, [config(model__dtype="float32")], machine)


def test_many_ranks_on_few_cores_are_told_of():
    most = LAPTOP.num_cores * MAX_RANKS_PER_CORE
    assert crowding([config(cluster__replicas=most)], LAPTOP) is None
    message = crowding([config(cluster__replicas=most, parallel__tensor_parallel_size=2)], LAPTOP)
    assert f"{2 * most} ranks share 2 cores" in message
    assert "lower --replicas" in message
    assert crowding([config(cluster__replicas=most + 1)], SERVER) is None, "each has a GPU, or is refused"


def test_the_machine_says_what_it_has():
    here = Machine.here()
    assert here.num_cores >= 1
    assert 2**20 < here.available_bytes < 2**50


# --- from the command line ---


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--model", "/nowhere"], "there is no such folder"),
        (["serve", "--tp", "3"], "cannot be shared by 3 ranks"),
        (["serve", "--replicas", "100000"], "lower --replicas"),
        (["serve", "--kv-cache-memory", "999999GiB"], "lower --kv-cache-memory"),
        (["generate", "hello", "--model", "a/b/c"], "neither a folder on this machine nor a Hugging Face hub id"),
        (["generate", "hello", "--kv-cache-memory", "999999GiB"], "lower --kv-cache-memory"),
    ],
)
def test_commands_refuse_in_one_line_before_anything_is_started(arguments, expected, capsys):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert len(err.splitlines()) == 1
    assert not out


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port} is not free" in said
    assert "Choose another by --port" in said


def test_looking_takes_neither_torch_nor_ray():
    program = """
import sys
from holdfast.cluster.config.config import load_config
from holdfast.cluster.serve.preflight import check_model_files
check_model_files(load_config({}).config)
print({"torch", "ray", "transformers", "numpy"} & sys.modules.keys())
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


# --- Ray, and servers ---


@pytest.mark.parametrize(("address", "expected"), [(None, "holdfast doctor"), ("10.0.0.1:6379", "ray status")])
def test_a_ray_that_does_not_start_is_one_line(address, expected):
    with pytest.raises(ReplicaError) as found, plain_ray_errors(address):
        raise RuntimeError("Traceback\n  of many lines\nThe current node timed out during startup.")
    assert "The current node timed out during startup." in str(found.value)
    assert expected in str(found.value)
    assert "\n" not in str(found.value)


def test_a_ray_where_nothing_listens_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        check_reachable(address)
    said = refusal(check_reachable, address)
    assert said.startswith(f"cluster.address = {address!r}: no Ray can be joined there")
    assert "ray start --head" in said
    assert "65536" in refusal(check_reachable, "127.0.0.1:65536")
    for looked_up in ("auto", "local", "ray://127.0.0.1:1"):
        check_reachable(looked_up)


def test_a_server_that_is_not_there_is_one_line():
    import grpc

    error = error_of(CallStatus(code=grpc.StatusCode.UNAVAILABLE, message="refused"))
    assert str(error) == "no router answers (refused): is `holdfast serve` running there?"


def test_a_chat_without_a_template_says_what_to_do():
    with pytest.raises(InvalidRequestError, match=r"no chat template; .*--chat-template"):
        render_chat(None, [{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_whose_path_is_too_long_for_sockets_is_named(monkeypatch, variable):
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "/" + "x" * 37)
    check_socket_paths()
    monkeypatch.setenv(variable, "/" + "x" * 60)
    with pytest.raises(ConfigurationError, match=rf"^{variable}: .*65 characters long.* 39 at most"):
        check_socket_paths()


def test_a_doctor_tells_of_proxies_homes_and_long_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 60)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = {finding.what: finding for finding in examine(config(), quick=True)}
    assert (found["proxy"].level, "http_proxy" in found["proxy"].found) == (Level.NOTE, True)
    assert (found["home"].level, f"holdfast-{os.getuid()}" in found["home"].found) == (Level.NOTE, True)
    assert (found["sockets"].level, "TMPDIR" in found["sockets"].found) == (Level.BAD, True)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"])
def test_a_doctor_finds_files_that_are_not_whole(tmp_path, content):
    folder = shutil.copytree(bundled_path("demo"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    found = {finding.what: finding for finding in examine(config(model__model=str(folder)), quick=True)}
    files = next(finding for what, finding in found.items() if what.startswith("files of"))
    assert (files.level, "model.safetensors is " in files.found) == (Level.BAD, True)


def test_a_machine_without_the_loopback_of_ipv4_is_told_so():
    check_loopback()
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1 .*ip addr add"):
        check_loopback("192.0.2.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ports_are_looked_at_in_the_family_of_their_host(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} is not free"):
            check_ports(config(cluster__host=host, cluster__port=port, cluster__routers=1))
    check_ports(config(cluster__host=host, cluster__port=0, cluster__http_port=None))


@pytest.mark.parametrize(("host", "address"), [("::1", "[::1]:5"), ("127.0.0.1", "127.0.0.1:5"), ("a.b", "a.b:5")])
def test_addresses_of_ipv6_are_in_brackets(host, address):
    assert host_port(host, 5) == address
