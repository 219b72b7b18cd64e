"""The gate and what it is made of, without IO: keys, callers, rates in a time that is moved by hand."""

import json
import logging
import os
import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.router.request import GenerationRequest
from holdfast.router.security import api_keys
from holdfast.router.security.api_keys import (
    ApiKey,
    KeyFile,
    KeyRing,
    digest_of,
    read_keys,
    write_keys,
)
from holdfast.router.security.gate import TRUSTED, UNKNOWN, Gate, bearer
from holdfast.router.token_bucket import BURST_S
from holdfast.worker.errors import AuthenticationError, ConfigurationError, PermissionDeniedError, RateLimitError
from holdfast.worker.request import Priority
from tests.examples import examples


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key_of(name: str, **rights: object) -> ApiKey:
    return ApiKey(name=name, sha256=digest_of(secret_of(name)).hex(), **rights)


def secret_of(name: str) -> str:
    return f"hfk_secret-of-{name}"


class Keys:
    """A source whose keys a test replaces."""

    def __init__(self, *keys: ApiKey) -> None:
        self.now = KeyRing(keys)

    def ring(self) -> KeyRing:
        return self.now


# --- keys ---


def test_a_key_is_found_by_itself_alone():
    ring = KeyRing([key_of("a"), key_of("b")])
    assert ring.find(secret_of("a")).name == "a"
    for wrong in ("", secret_of("a")[:-1], secret_of("a") + "x", digest_of(secret_of("a")).hex(), "hfk_"):
        assert ring.find(wrong) is None


def test_a_file_has_hashes_and_no_keys_and_is_read_as_it_was_written(tmp_path):
    ring = KeyRing([key_of("a", tenant="t", models=["m"], requests_per_minute=6, max_priority="high", operator=True)])
    write_keys(tmp_path / "keys.json", ring)
    text = (tmp_path / "keys.json").read_text()
    assert secret_of("a") not in text
    assert read_keys(tmp_path / "keys.json").keys == ring.keys
    assert (tmp_path / "keys.json").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


WRONG_FILES = (
    "",
    "[]",
    '{"keys": 1}',
    '{"keys": [{"name": "a", "sha256": "abcsecret"}]}',
    '{"keys": [{"name": "a", "extra": 1}]}',
    json.dumps({"keys": [key_of("a").model_dump(), key_of("a").model_dump()]}),
)


@pytest.mark.parametrize("content", WRONG_FILES)
def test_a_file_that_is_wrong_is_refused_without_telling_a_hash(content):
    with pytest.raises(ConfigurationError, match=r"security\.api_keys: keys\.json") as refused:
        KeyRing.read(content, "keys.json")
    assert "abcsecret" not in str(refused.value)
    assert key_of("a").sha256 not in str(refused.value)


def test_keys_of_a_file_are_exchanged_without_a_restart(tmp_path, caplog):
    path, clock = tmp_path / "keys.json", Clock()
    write_keys(path, KeyRing([key_of("a")]))
    gate = Gate(KeyFile(path, clock), clock=clock)
    assert gate.enter(secret_of("a")).name == "a"
    write_keys(path, KeyRing([key_of("b")]))
    assert gate.enter(secret_of("a")).name == "a"  # it is looked for once a second
    clock.now += 1.0
    with pytest.raises(AuthenticationError):
        gate.enter(secret_of("a"))
    assert gate.enter(secret_of("b")).name == "b"
    path.write_text('{"keys": [half of a fi')
    clock.now += 1.0
    with caplog.at_level(logging.ERROR):
        assert gate.enter(secret_of("b")).name == "b"
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    os.unlink(path)
    clock.now += 1.0
    assert gate.enter(secret_of("b")).name == "b"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        KeyFile(path, clock)


# --- no difference between keys ---


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """Every hash and comparison that is made, by its kind."""
    made: list[str] = []

    class Hashes:
        def sha256(self, data: bytes):
            made.append("hash")
            return _hashlib.sha256(data)

    class Compares:
        def compare_digest(self, one: bytes, other: bytes) -> bool:
            assert len(one) == len(other) == 32
            made.append("compare")
            return _hmac.compare_digest(one, other)

    _hashlib, _hmac = api_keys.hashlib, api_keys.hmac
    monkeypatch.setattr(api_keys, "hashlib", Hashes())
    monkeypatch.setattr(api_keys, "hmac", Compares())
    return made


@settings(max_examples=examples(200))
@given(st.text(max_size=60), st.integers(0, 30))
def _fuzzed(gate: Gate, counted: list[str], noise: str, length: int) -> None:
    for presented in (noise, secret_of("a")[:length] + noise, secret_of("a")[: -1 - length % 5]):
        if presented in (secret_of("a"), secret_of("b")):
            continue
        counted.clear()
        with pytest.raises(AuthenticationError) as refused:
            gate.enter(presented)
        assert str(refused.value) == UNKNOWN
        assert counted == ["hash", "compare"]


def test_every_key_takes_one_hash_and_one_comparison_whatever_it_is(counted):
    gate = Gate(Keys(key_of("a"), key_of("b")), cluster_token=secrets.token_hex())
    gate.enter(secret_of("a"))
    counted.clear()
    gate.enter(secret_of("a"))
    assert counted == ["hash", "compare"]
    _fuzzed(gate, counted)


# --- who asks, and for what ---


def test_without_keys_all_may_come_and_name_their_tenant():
    caller = Gate().enter("anything")
    assert caller.charged(GenerationRequest(prompt="x", tenant="t"), 0.0).tenant == "t"
    assert Gate().caller().is_operator


def test_a_api_that_did_not_ask_lets_nobody_in():
    import contextvars

    gate = Gate(Keys(key_of("a")))
    with pytest.raises(AuthenticationError):
        contextvars.Context().run(gate.caller)


def test_who_presents_no_valid_key_is_not_the_caller_that_the_context_had():
    gate = Gate(Keys(key_of("a")))
    gate.enter(secret_of("a"))
    assert gate.has_entered
    with pytest.raises(AuthenticationError):
        gate.enter("hfk_wrong")
    assert not gate.has_entered
    with pytest.raises(AuthenticationError):
        gate.caller()


def test_a_request_is_charged_to_the_tenant_of_its_key():
    gate = Gate(Keys(key_of("a", tenant="t"), key_of("b")))
    for name, tenant in (("a", "t"), ("b", "b")):
        caller = gate.enter(secret_of(name))
        assert caller.charged(GenerationRequest(prompt="x"), 0.0).tenant == tenant
        assert caller.charged(GenerationRequest(prompt="x", tenant=tenant), 0.0).tenant == tenant
        with pytest.raises(PermissionDeniedError, match="another tenant"):
            caller.charged(GenerationRequest(prompt="x", tenant="other"), 0.0)


def test_models_and_priorities_are_those_of_the_key():
    caller = Gate(Keys(key_of("a", models=["m"], max_priority="high"))).enter(secret_of("a"))
    for priority in (Priority.HIGH, Priority.NORMAL, Priority.LOW):
        caller.charged(GenerationRequest(prompt="x", model="m", priority=priority), 0.0)
    with pytest.raises(PermissionDeniedError, match="high at most, not for critical"):
        caller.charged(GenerationRequest(prompt="x", model="m", priority=Priority.CRITICAL), 0.0)
    with pytest.raises(PermissionDeniedError, match="model 'n'"):
        caller.charged(GenerationRequest(prompt="x", model="n"), 0.0)
    with pytest.raises(PermissionDeniedError, match="not an operator"):
        caller.check_operator()


def test_the_clusters_token_opens_the_gate_and_may_act_for_any_tenant():
    gate = Gate(Keys(key_of("a")), cluster_token="the cluster's")
    assert gate.enter("the cluster's") is TRUSTED
    assert TRUSTED.charged(GenerationRequest(prompt="x", tenant="t"), 0.0).tenant == "t"


@pytest.mark.parametrize(
    ("header", "key"),
    [("Bearer k", "k"), ("bearer  k ", "k"), ("Basic k", ""), ("k", ""), ("", ""), ("Bearer", "")],
)
def test_a_bearer_is_read(header, key):
    assert bearer(header) == key


# --- rates ---


def test_a_rate_of_requests_is_kept_exactly_and_says_when_to_come_again():
    clock = Clock()
    gate = Gate(Keys(key_of("a", requests_per_minute=60)), clock=clock)
    request, num_taken, end = GenerationRequest(prompt="x"), 0, clock.now + 99.5
    while clock.now < end:
        try:
            gate.enter(secret_of("a")).charged(request, clock.now)
            num_taken += 1
        except RateLimitError as refused:
            clock.now += refused.retry_after_s
    assert num_taken == 99 + BURST_S


def test_tokens_that_are_known_at_the_end_are_paid_back_before_the_next_request():
    clock = Clock()
    caller = Gate(Keys(key_of("a", tokens_per_minute=600)), clock=clock).enter(secret_of("a"))
    caller.charged(GenerationRequest(prompt="x"), clock.now)
    caller.took_tokens(20, clock.now)
    caller.charged(GenerationRequest(prompt="x"), clock.now)
    caller.took_tokens(1080, clock.now)  # the bucket holds 100: 1000 are owed, at 10 a second
    with pytest.raises(RateLimitError, match="tokens_per_minute") as refused:
        caller.charged(GenerationRequest(prompt="x"), clock.now)
    assert refused.value.retry_after_s == pytest.approx(100, rel=1e-3)
    clock.now += refused.value.retry_after_s
    caller.charged(GenerationRequest(prompt="x"), clock.now)


def test_a_change_of_the_file_keeps_what_a_key_has_used_up_unless_its_rate_is_another():
    clock, keys = Clock(), Keys(key_of("a", requests_per_minute=6))
    gate = Gate(keys, clock=clock)
    request = GenerationRequest(prompt="x")
    gate.enter(secret_of("a")).charged(request, clock.now)
    keys.now = KeyRing([key_of("a", requests_per_minute=6), key_of("b")])
    with pytest.raises(RateLimitError):
        gate.enter(secret_of("a")).charged(request, clock.now)
    keys.now = KeyRing([key_of("a", requests_per_minute=12)])
    gate.enter(secret_of("a")).charged(request, clock.now)
