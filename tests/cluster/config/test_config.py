import re
from pathlib import Path
from typing import get_args

import pytest

from holdfast.cluster.config.config import HoldfastConfig, LoadedConfig, load_config
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.cluster.config.sources import keyword_layer, leaves
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.settings import MAX_BYTES, MAX_WHOLE


def load(flags: Layer | None = None, file: Path | None = None, **environ: str) -> LoadedConfig:
    return load_config(flags, file, environ)


def flag(path: str, value: object, source: str = "--flag") -> Layer:
    return {path: Setting(value, source)}


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("parallel:\n  tensor_parallel_size: 2\nscheduler:\n  max_num_seqs: 8\n")
    return path


def test_without_any_source_all_settings_are_defaults():
    loaded = load()
    assert loaded.config == HoldfastConfig()
    assert set(loaded.sources.values()) == {"default"}


def test_later_sources_win_and_each_value_knows_its_source(yaml_file):
    loaded = load(
        flag("parallel.tensor_parallel_size", "8", "--tp"),
        yaml_file,
        HOLDFAST_PARALLEL__TENSOR_PARALLEL_SIZE="4",
        HOLDFAST_MODEL__DTYPE="bfloat16",
    )
    assert loaded.config.parallel.tensor_parallel_size == 8
    assert loaded.sources["parallel.tensor_parallel_size"] == "--tp"
    assert loaded.config.model.dtype == "bfloat16"
    assert loaded.sources["model.dtype"] == "HOLDFAST_MODEL__DTYPE"
    assert loaded.config.scheduler.max_num_seqs == 8
    assert loaded.sources["scheduler.max_num_seqs"] == str(yaml_file)


def test_toml_says_the_same_as_yaml(tmp_path, yaml_file):
    toml_file = tmp_path / "serve.toml"
    toml_file.write_text("[parallel]\ntensor_parallel_size = 2\n[scheduler]\nmax_num_seqs = 8\n")
    assert load(file=toml_file).config == load(file=yaml_file).config


def test_the_environment_names_a_file(yaml_file):
    assert load(HOLDFAST_CONFIG=str(yaml_file)).config.scheduler.max_num_seqs == 8


def test_none_unsets_a_setting(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model:\n  max_model_len: 64\n")
    assert load(file=path, HOLDFAST_MODEL__MAX_MODEL_LEN="none").config.model.max_model_len is None


def test_none_is_a_choice_where_it_is_among_them(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("speculation:\n  speculative: ngram\n")
    assert load(file=path, HOLDFAST_SPECULATION__SPECULATIVE="none").config.speculation.speculative == "none"


def test_variables_that_kubernetes_injects_are_left_alone():
    load(HOLDFAST_PORT="tcp://10.0.0.1:50051", HOLDFAST_ROUTER_SERVICE_HOST="10.0.0.1")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("paralel:\n  tensor_parallel_size: 2", ["paralel", "did you mean parallel"]),
        ("parallel:\n  tensor_parallel: 2", ["parallel.tensor_parallel", "did you mean parallel.tensor_parallel_size"]),
        ("tensor_parallel_size: 2", ["did you mean parallel.tensor_parallel_size"]),
        ("parallel: 2", ["parallel = 2", "section"]),
        ("- a\n- b", ["sections"]),
        ("a: [", ["not valid YAML"]),
        ("parallel:\n  tensor_parallel_size: 0", ["parallel.tensor_parallel_size = 0", "greater than or equal to 1"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, content, expected):
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError) as raised:
        load(file=path)
    assert all(part in str(raised.value) for part in [*expected, str(path)])


def test_a_file_of_another_kind_or_none_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read"):
        load(file=tmp_path / "missing.yaml")
    path = tmp_path / "serve.ini"
    path.write_text("")
    with pytest.raises(ConfigurationError, match=r"\.yaml, \.yml or \.toml"):
        load(file=path)


def test_an_unknown_variable_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigurationError) as raised:
        load(HOLDFAST_SCHEDULER__MAX_NUM_SEQ="8")
    message = str(raised.value)
    assert "HOLDFAST_SCHEDULER__MAX_NUM_SEQ" in message
    assert "did you mean scheduler.max_num_seqs?" in message


def test_a_bad_value_names_setting_value_and_source():
    with pytest.raises(ConfigurationError) as raised:
        load(flag("parallel.tensor_parallel_size", "two", "--tp"))
    message = str(raised.value)
    assert all(part in message for part in ("parallel.tensor_parallel_size", "'two'", "--tp", "integer"))


@pytest.mark.parametrize("shares", ["gold=4, free=0.5", {"gold": 4, "free": 0.5}])
def test_shares_of_tenants_are_written_as_text_or_as_a_mapping(shares):
    config = load(flag("scheduler.tenant_shares", shares, "--tenant-shares")).config
    assert config.scheduler.tenant_shares == {"gold": 4.0, "free": 0.5}


@pytest.mark.parametrize("shares", ["gold", "gold=0", "gold=inf", "gold=much", {"gold": -1}])
def test_bad_shares_are_refused_by_the_name_of_the_setting(shares):
    with pytest.raises(ConfigurationError, match=r"scheduler.tenant_shares.*from --tenant-shares"):
        load(flag("scheduler.tenant_shares", shares, "--tenant-shares"))


@pytest.mark.parametrize(
    "text", [" fast_disk=1, accelerator_type:H100=0.001 ", "fast_disk=1,accelerator_type:H100=1e-3,"]
)
def test_custom_resources_are_written_as_text_or_as_a_mapping(text):
    resources = {"fast_disk": 1.0, "accelerator_type:H100": 0.001}
    assert load(flag("cluster.rank_resources", text)).config.cluster.rank_resources == resources
    assert load(flag("cluster.router_resources", resources)).config.cluster.router_resources == resources
    assert load(HOLDFAST_CLUSTER__RANK_RESOURCES="").config.cluster.rank_resources == {}


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ("fast_disk", "write it like"),
        ("=1", "write it like"),
        ("fast_disk=much", "number"),
        ("fast_disk=0", "greater than or equal to 0.0001"),
        ("fast_disk=inf", "finite"),
        ("GPU=1", "GPU is not a custom resource"),
        ({"CPU": 1}, "CPU is not a custom resource"),
        ({"memory": 1e9}, "memory is not a custom resource"),
    ],
)
@pytest.mark.parametrize("setting", ["cluster.rank_resources", "cluster.router_resources"])
def test_bad_resources_are_refused_by_the_name_of_the_setting(setting, resources, why):
    with pytest.raises(ConfigurationError, match=rf"{setting}.*from --flag.*{why}"):
        load(flag(setting, resources))


def test_labels_of_nodes_are_written_as_text_or_as_a_mapping():
    labels = {"holdfast/pool": "chat", "zone": "!a"}
    assert load(flag("cluster.rank_labels", " holdfast/pool=chat, zone=!a")).config.cluster.rank_labels == labels
    assert load(flag("cluster.router_labels", labels)).config.cluster.router_labels == labels


@pytest.mark.parametrize("labels", ["chat", "=chat", {"pool": 1}])
def test_bad_labels_are_refused_by_the_name_of_the_setting(labels):
    with pytest.raises(ConfigurationError, match=r"cluster.rank_labels.*from --flag"):
        load(flag("cluster.rank_labels", labels))


def test_every_bad_value_gets_a_line():
    bad = flag("model.dtype", "int3", "--dtype") | flag("cache.kv_cache_memory", "lots", "--kv-cache-memory")
    with pytest.raises(ConfigurationError) as raised:
        load(bad)
    assert len(str(raised.value).splitlines()) == 2


def test_last_names_are_unique_so_that_flags_and_keywords_need_no_section():
    names = [path.rpartition(".")[2] for path, _ in leaves(HoldfastConfig)]
    assert len(names) == len(set(names))


def test_every_setting_is_described():
    assert [path for path, field in leaves(HoldfastConfig) if not field.description] == []


def test_keywords_reach_their_setting_and_unknown_ones_are_refused():
    layer = keyword_layer(HoldfastConfig, {"block_size": 32}, "LLM(...)")
    assert load(layer).config.cache.block_size == 32
    with pytest.raises(ConfigurationError, match=r"blok_size \(from LLM.*did you mean cache.block_size"):
        keyword_layer(HoldfastConfig, {"blok_size": 32}, "LLM(...)")


# --- several models ---

TWO_MODELS = """
parallel: {tensor_parallel_size: 2}
model: {dtype: float32}
cluster:
  replicas: 3
  models:
    - {model: {model: ./a}, replicas: 1}
    - {model: {model: ./b, dtype: bfloat16}, parallel: {tensor_parallel_size: 4}}
    - org/c
"""


def file_of(folder: Path, text: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(text)
    return path


def test_each_model_has_its_own_settings_over_those_of_all(tmp_path):
    one, two, three = load(file=file_of(tmp_path, TWO_MODELS)).config.each_model
    assert [each.model.name for each in (one, two, three)] == ["a", "b", "c"]
    assert [each.model.dtype for each in (one, two, three)] == ["float32", "bfloat16", "float32"]
    assert [each.parallel.tensor_parallel_size for each in (one, two, three)] == [2, 4, 2]
    assert [each.cluster.replicas for each in (one, two, three)] == [1, 3, 3]
    assert all(not each.cluster.models for each in (one, two, three))


def test_without_a_list_there_is_the_one_model():
    config = load(flag("model.model", "./a")).config
    assert config.each_model == (config,)


def test_names_of_models_may_come_from_a_flag_or_the_environment():
    config = load(HOLDFAST_CLUSTER__MODELS="./a, org/b").config
    assert [one.model.model for one in config.each_model] == ["./a", "org/b"]


def test_two_models_of_one_name_are_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"cluster.models: two models are named 'a'; give one"):
        load(flag("cluster.models", ["./a", "/elsewhere/a"]))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"model": {"model": "./a"}, "router": {}}, r"cluster.models.0.router = "),
        ({"parallel": {"tensor_parallel_size": 0}}, r"cluster.models.0.parallel.tensor_parallel_size = "),
        ({"model": {"modell": "./a"}}, r"cluster.models.0.model.modell = "),
        (7, r"cluster.models.0 = "),
    ],
)
def test_a_wrong_entry_is_told_by_its_place(entry, message):
    with pytest.raises(ConfigurationError, match=message):
        load(flag("cluster.models", [entry]))


def test_scaling_is_for_all_models_or_for_one():
    tree = {
        "scaling": {"max_replicas": 4},
        "cluster": {"models": [{"model": {"model": "a"}}, {"model": {"model": "b"}, "scaling": {"min_replicas": 0}}]},
    }
    one, two = HoldfastConfig.model_validate(tree).each_model
    assert (one.scaling.min_replicas, one.first_replicas, one.most_replicas) == (1, 1, 4)
    assert (two.scaling.min_replicas, two.scaling.sleeps, two.first_replicas) == (0, True, 1)


def test_more_replicas_than_scaling_allows_are_refused():
    tree = {"scaling": {"max_replicas": 2}, "cluster": {"replicas": 3}}
    with pytest.raises(
        ValueError, match=r"cluster.replicas = 3 of model 'demo' must be at most scaling.max_replicas = 2"
    ):
        HoldfastConfig.model_validate(tree)


WHOLE = (-(2**63) - 1, -(2**63), -(2**31) - 1, -1, 0, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64)
LARGE = (*map(str, WHOLE), "1e400", "inf", "nan", "9" * 5000)


def is_numeric(kind: object) -> bool:
    return kind in (int, float) or any(map(is_numeric, get_args(kind)))


NUMBERS = [path for path, field in leaves(HoldfastConfig) if is_numeric(field.annotation)]
SIZES = re.compile(r".*(bytes|memory)|router.gzip_above|model.seed")
"""Numbers that may be larger than a 32-bit integer."""


@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_of_any_size_is_kept_exactly_or_refused_by_name(path: str):
    for text in LARGE:
        problem = ""
        try:
            value = load(flag(path, text)).config
        except ConfigurationError as error:
            problem = str(error)
        if problem:
            assert {path.partition(".")[0], path.rpartition(".")[2]} <= set(re.findall(r"\w+", problem)), text
            assert text[:20] in problem
            continue
        for name in path.split("."):
            value = getattr(value, name)
        assert value in (float(text), int(text)), "it was rounded"
        assert value <= (MAX_BYTES if SIZES.fullmatch(path) else MAX_WHOLE)


def test_pinned_adapters_are_some_of_those_that_are_loaded_at_the_start():
    loras = {"HOLDFAST_MODEL__LORA": "sql=./a,legal=./b", "HOLDFAST_MODEL__MAX_LORAS": "2"}
    assert load(flag("model.pinned_loras", "legal"), **loras).config.model.pinned_loras == ("legal",)
    with pytest.raises(ConfigurationError, match="'poems' must be a name in lora"):
        load(flag("model.pinned_loras", "legal, poems"), **loras)
    with pytest.raises(ConfigurationError, match="2 must be fewer than max_loras, 2: a slot must stay"):
        load(flag("model.pinned_loras", "legal,sql"), **loras)
