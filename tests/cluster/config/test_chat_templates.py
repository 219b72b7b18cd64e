"""Chat templates of settings: files or texts, read and checked before anything starts."""

import pytest

from holdfast.cluster.config.chat_templates import template_text, with_template_texts
from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.sources import mapping_layer
from holdfast.cluster.serve import serving
from holdfast.cluster.serve.app import build_app, build_model
from holdfast.worker.errors import ConfigurationError

TEXT = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def config(**tree) -> HoldfastConfig:
    return load_config(mapping_layer(HoldfastConfig, tree, "here")).config


def test_a_template_may_be_a_file_or_its_text(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(TEXT)
    assert template_text(TEXT) == template_text(str(file)) == template_text(file) == TEXT
    assert template_text("nothing to fill in\n") == "nothing to fill in\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing.jinja", r"model\.chat_template = 'missing\.jinja': is neither a template nor a file with one"),
        ("", r"model\.chat_template = .*is neither"),
        ("{% for m in messages %}", r"model\.chat_template = '\{% for.*does not compile: .*endfor.* \(line 1\)"),
        ("a\n{{ m. }}", r"does not compile: .*\(line 2\)"),
        ("{% endfor %}" + "x" * 500, r"model\.chat_template = '\{% endfor %\}x{88}'\.\.\.: the template"),
    ],
)
def test_what_is_wrong_is_said_before_ray_starts(given, message, monkeypatch):
    started = []
    monkeypatch.setattr(serving, "ray_connection", lambda *_: started.append(1))
    several = {"cluster": {"models": [{"model": {"model": "demo"}}, {"model": {"model": "x", "chat_template": given}}]}}
    for tree in ({"model": {"chat_template": given}}, several):
        with pytest.raises(ConfigurationError, match=message), serving.serving(config(**tree), lambda *_: None):
            pass
    for build in (build_app, build_model):
        with pytest.raises(ConfigurationError, match=message):
            build({"model": {"chat_template": given}})
    with pytest.raises(ConfigurationError, match=message):
        serving.add_model(config(model={"chat_template": given}), lambda *_: None)
    assert started == []


def test_a_file_without_a_template_is_refused(tmp_path):
    (tmp_path / "empty").write_text("hello")
    with pytest.raises(ConfigurationError, match="the file has no template"):
        template_text(tmp_path / "empty")
    (tmp_path / "bytes").write_bytes(b"\xff{{")
    with pytest.raises(ConfigurationError, match="is neither"):
        template_text(tmp_path / "bytes")


def test_each_model_has_its_own_or_that_of_all(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(TEXT)
    entries = [{"model": {"model": "a"}}, {"model": {"model": "b", "chat_template": str(file)}}]
    read = with_template_texts(config(model={"chat_template": "{{ all }}"}, cluster={"models": entries}))
    assert [one.worker.model.chat_template for one in read.each_model] == ["{{ all }}", TEXT]
    assert with_template_texts(read) == read
    none = with_template_texts(config(cluster={"models": entries[:1]}))
    assert [one.worker.model.chat_template for one in none.each_model] == [None]
