"""Keys, tokens and prompts are in nothing that a server writes, and in nothing that `holdfast config show` prints."""

import os
import subprocess
import sys

import pytest

from holdfast.cluster.commands.cli import run
from holdfast.cluster.config.config import load_config
from holdfast.router.security.api_keys import KEY_PREFIX, ApiKey, KeyRing, digest_of, write_keys
from holdfast.worker.errors import ConfigurationError
from tests.certificates import Authority

KEY = f"{KEY_PREFIX}7pVq-a-valid-key-that-nobody-may-read-Zk3"
WRONG_KEY = f"{KEY_PREFIX}9xWr-another-key-sent-by-mistake-Qm8"
TOKEN = "5hTd-the-token-of-the-cluster-which-stays-inside-Lw2"
PROMPT = "my-most-private-question-about-the-zebra"


def test_nothing_that_a_server_writes_has_a_key_a_token_or_a_prompt(tmp_path):
    authority = Authority(tmp_path)
    authority.pair("good")
    write_keys(tmp_path / "keys.json", KeyRing([ApiKey(name="someone", sha256=digest_of(KEY).hex(), operator=True)]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.serve.served_secrets", str(tmp_path), KEY, WRONG_KEY, TOKEN, PROMPT],
        env={**os.environ, "GRPC_VERBOSITY": "info"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    written = done.stdout + done.stderr
    assert done.returncode == 0, written
    assert "a call failed: internal error" in done.stderr
    assert "builtins.TypeError" in done.stderr
    assert "holdfast_requests_total" in done.stdout
    assert "Thread" in done.stderr
    private_key = (tmp_path / "good.key").read_text().splitlines()[1]
    for secret in (KEY, WRONG_KEY, TOKEN, PROMPT, private_key, digest_of(KEY).hex(), digest_of(TOKEN).hex()):
        assert secret not in written, [line for line in written.splitlines() if secret in line][:3]
        assert secret[6:24] not in written, [line for line in written.splitlines() if secret[6:24] in line][:3]


def test_config_show_redacts(monkeypatch, capsys):
    for variable in ("HOLDFAST_API_KEY", "HOLDFAST_CLIENT__API_KEY"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, KEY)
            assert run(["config", "show"]) == 0
            shown = capsys.readouterr().out
            assert f"client.api_key = **********  # {variable}" in shown
            assert KEY not in shown
            config = load_config().config
            assert config.client.options == {"api_key": KEY}
            assert KEY not in repr(config) + str(config.model_dump()) + config.model_dump_json()


def test_an_error_of_the_settings_tells_no_key(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(f"client: {{api_key: [{KEY}]}}\n")
    with pytest.raises(ConfigurationError, match=r"client\.api_key = '\(hidden\)'") as refused:
        load_config(file=path)
    assert KEY not in str(refused.value)


def test_a_key_is_printed_once_and_is_no_flag(tmp_path, capsys):
    path = str(tmp_path / "keys.json")
    assert run(["keys", "add", "someone", "--file", path, "--models", "m", "--requests-per-minute", "6"]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith(KEY_PREFIX)
    assert len(key) >= 43
    assert key not in (tmp_path / "keys.json").read_text()
    assert run(["keys", "list", "--file", path]) == 0
    shown = capsys.readouterr().out
    assert shown == "someone: tenant someone, models m, 6 requests a minute, up to normal\n"
    assert run(["keys", "add", "someone", "--file", path]) == 2
    assert "revoke it first" in capsys.readouterr().err
    assert run(["keys", "revoke", "someone", "--file", path]) == 0
    assert run(["keys", "revoke", "someone", "--file", path]) == 2
    assert run(["generate", "x", "--server", "localhost:1", "--api-key", KEY]) == 2
    assert "--api-key" in capsys.readouterr().err
