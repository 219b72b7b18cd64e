"""Nothing listens where others reach it without asking who they are, and no code of a checkpoint runs: found before Ray
starts.
"""

import ast
import re
from pathlib import Path

import pytest

from holdfast.cluster.commands.cli import run
from holdfast.cluster.config.config import load_config
from holdfast.cluster.serve import serving as launcher
from holdfast.cluster.serve import supervisor
from holdfast.cluster.serve.security import cluster_token
from holdfast.router.config import SecurityConfig
from holdfast.router.security.api_keys import KeyRing, write_keys
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.wire.loopback import is_loopback
from tests.certificates import Authority
from tests.router.security.test_gate import key_of

ROOT = Path(__file__).parents[3]


class RayHasStarted(Exception):
    """What a start comes to that was not refused before."""


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    def start(*_: object) -> None:
        raise RayHasStarted

    monkeypatch.setattr(launcher, "ray_connection", start)
    monkeypatch.setattr(supervisor, "supervise", start)


@pytest.fixture
def keys(tmp_path) -> str:
    write_keys(tmp_path / "keys.json", KeyRing([key_of("a")]))
    return str(tmp_path / "keys.json")


def starts(*arguments: str) -> bool:
    try:
        assert run(["serve", "--port", "0", *arguments]) == 2
    except RayHasStarted:
        return True
    return False


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_a_wide_address_needs_keys_or_a_word(host, keys, capsys):
    assert not starts("--host", host)
    message = capsys.readouterr().err
    for part in (f"cluster.host = '{host}'", "holdfast keys add", "--api-keys", "--insecure", "127.0.0.1"):
        assert part in message
    if host == "0.0.0.0":
        assert starts("--host", host, "--insecure")
        assert starts("--host", host, "--api-keys", keys)


def test_loopback_needs_nothing():
    assert starts()
    assert starts("--host", "127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")


def test_a_cluster_of_others_is_wide_by_default(capsys):
    assert not starts("--address", "auto")
    assert "cluster.host = '0.0.0.0'" in capsys.readouterr().err
    assert starts("--address", "auto", "--host", "127.0.0.1")
    assert starts("--address", "auto", "--insecure")


def test_files_that_cannot_be_used_are_found_before_ray_starts(keys, tmp_path, capsys):
    authority = Authority(tmp_path)
    one, other = authority.pair("one"), authority.pair("other")
    short = tmp_path / "short"
    short.write_text("tiny\n")
    for arguments, message in (
        (("--api-keys", "/nowhere.json"), "security.api_keys = '/nowhere.json': cannot be read"),
        (("--tls-cert", str(one.cert)), "tls_cert and tls_key must be set together"),
        (("--tls-client-ca", str(authority.cert)), "tls_client_ca must come with tls_cert"),
        (("--tls-cert", str(one.cert), "--tls-key", str(other.key)), "do not match"),
        (("--link-cert", str(one.cert), "--link-key", str(one.key)), "must be set together"),
        (("--cluster-token-file", str(short)), "at least 32 printable ASCII characters"),
        (("--cluster-token-file", "/nowhere"), "cannot be read"),
    ):
        assert not starts(*arguments)
        said = capsys.readouterr().err
        assert message in said
        assert "tiny" not in said
    assert starts("--api-keys", keys, "--tls-cert", str(one.cert), "--tls-key", str(one.key))


def test_a_token_of_a_file_is_taken_and_another_is_made(tmp_path):
    (tmp_path / "token").write_text("t" * 40 + "\n")
    assert cluster_token(SecurityConfig(cluster_token_file=tmp_path / "token")) == "t" * 40
    assert cluster_token(SecurityConfig()) != cluster_token(SecurityConfig())


def test_security_is_the_clusters_and_not_a_models(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("cluster: {models: [{model: {model: ./a}, security: {insecure: true}}]}\n")
    with pytest.raises(ConfigurationError, match="security"):
        load_config(file=path)


@pytest.mark.slow
def test_code_of_a_checkpoint_is_never_run(tmp_path):
    from holdfast.worker.errors import UnsupportedModelError
    from holdfast.worker.models.weights import read_config

    (tmp_path / "configuration_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    auto = '{"AutoConfig": "configuration_evil.Evil"}'
    (tmp_path / "config.json").write_text(f'{{"model_type": "evil", "auto_map": {auto}}}')
    with pytest.raises(UnsupportedModelError, match="is never run"):
        read_config(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_whatever_loads_a_checkpoint_says_that_its_code_is_not_trusted():
    texts = {path: path.read_text() for name in ("worker", "router", "cluster") for path in (ROOT / name).rglob("*.py")}
    found = {path: text for path, text in texts.items() if "Auto" in text}
    assert len(found) > 1
    for path, text in found.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and re.match(r"Auto[A-Z]", ast.unparse(node.func)):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}: {ast.unparse(node)}"
