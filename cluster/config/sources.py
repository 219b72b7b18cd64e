"""Configuration sources: files, environment variables and flags, read and checked against a tree of pydantic models.

A source becomes a layer: dotted path (`parallel.tensor_parallel_size`) to value and origin. Layers are merged, later
ones over earlier ones, and validated once.

Not pydantic-settings: it merges values without their origins, ignores variables of unknown sections, and reads mappings
from the environment as JSON alone, so `config show` and these refusals would take more code on top of it.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from holdfast.cluster.config.layers import Layer, Setting
from holdfast.worker.errors import ConfigurationError, shortened

ENV_PREFIX: Final = "HOLDFAST_"
ENV_SEPARATOR: Final = "__"

Tree = TypeVar("Tree", bound=BaseModel)

MAX_SHOWN: Final = 500
"""Most characters of a value or a name in an error."""


def leaves(tree: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting of a tree with its dotted path, in the order of declaration."""
    for name, field in tree.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            yield from leaves(group, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting's value must not be shown."""
    return SecretStr in (field.annotation, *get_args(field.annotation))


def value_of_text(text: str, field: FieldInfo) -> str | None:
    """The value that a variable or a flag gives a setting: `none` unsets it, unless that is one of its choices."""
    return None if text.lower() == "none" and "none" not in get_args(field.annotation) else text


def file_layer(tree: type[BaseModel], path: Path) -> Layer:
    """The settings of a `.yaml`, `.yml` or `.toml` file. Raises `ConfigurationError`."""
    return mapping_layer(tree, _read_mapping(path), str(path))


def mapping_layer(tree: type[BaseModel], content: Mapping[str, object], source: str) -> Layer:
    """The settings of nested sections. Raises `ConfigurationError` for an unknown one."""
    layer: Layer = {}
    _flatten(tree, content, "", source, layer)
    return layer


def environment_layer(tree: type[BaseModel], environ: Mapping[str, str]) -> Layer:
    """The settings in variables `HOLDFAST_SECTION__KEY`.

    Names without the double underscore are left alone: Kubernetes injects such names (`HOLDFAST_PORT`) for every
    service called holdfast. Raises `ConfigurationError` for an unknown setting.
    """
    known = dict(leaves(tree))
    layer: Layer = {}
    for variable, text in environ.items():
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or ENV_SEPARATOR not in name:
            continue
        path = name.lower().replace(ENV_SEPARATOR, ".")
        if path not in known:
            raise _unknown(path, tree, variable)
        layer[path] = Setting(value_of_text(text, known[path]), variable)
    return layer


def keyword_layer(tree: type[BaseModel], keywords: Mapping[str, object], source: str) -> Layer:
    """Settings given by their last name (`block_size=16`), as in a call. Raises `ConfigurationError`."""
    paths = {path.rpartition(".")[2]: path for path, _ in leaves(tree)}
    layer: Layer = {}
    for name, value in keywords.items():
        if name not in paths:
            raise _unknown(name, tree, source)
        layer[paths[name]] = Setting(value, source)
    return layer


def resolve(tree: type[Tree], layers: Sequence[Layer]) -> tuple[Tree, dict[str, str]]:
    """The validated tree and each setting's source. Raises `ConfigurationError` with a line for each bad value."""
    chosen: Layer = {}
    for layer in layers:
        chosen.update(layer)
    nested: dict[str, object] = {}
    for path, setting in chosen.items():
        _insert(nested, path.split("."), setting.value)
    try:
        config = tree.model_validate(nested)
    except ValidationError as error:
        shown = {path: _shown(tree, path, setting) for path, setting in chosen.items()}
        raise ConfigurationError("\n".join(_explain(problem, shown) for problem in error.errors())) from None
    return config, {path: chosen[path].source if path in chosen else "default" for path, _ in leaves(tree)}


def _read_mapping(path: Path) -> Mapping[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the configuration file {path}: {error}") from error
    content = _parse(path, text)
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{path} must hold sections of settings, not a {type(content).__name__}")
    return content


def _parse(path: Path, text: str) -> object:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigurationError(f"{path}: a configuration file ends in .yaml, .yml or .toml")
    import yaml  # here, because most runs have no file

    try:
        return yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an invalid date is a ValueError
        raise ConfigurationError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _flatten(tree: type[BaseModel], content: Mapping[str, object], prefix: str, source: str, layer: Layer) -> None:
    """Adds `content` to `layer`; a section goes down a level, a setting is taken as it is."""
    known = {path for path, _ in leaves(tree)}
    for name, value in content.items():
        path = f"{prefix}{name}"
        if path in known:
            layer[path] = Setting(value, source)
        elif not any(other.startswith(f"{path}.") for other in known):
            raise _unknown(path, tree, source)
        elif isinstance(value, Mapping):
            _flatten(tree, value, f"{path}.", source, layer)
        elif value is not None:
            raise ConfigurationError(
                f"{path} = {shortened(value, MAX_SHOWN)} (from {source}): this is a section of settings"
            )


def _insert(nested: dict[str, object], path: list[str], value: object) -> None:
    for name in path[:-1]:
        section = nested.setdefault(name, {})
        assert isinstance(section, dict)
        nested = section
    nested[path[-1]] = value


def _shown(tree: type[BaseModel], path: str, setting: Setting) -> Setting:
    """The setting in the form that errors may show."""
    return Setting("(hidden)", setting.source) if is_secret(dict(leaves(tree))[path]) else setting


def _explain(problem: Mapping[str, object], chosen: Layer) -> str:
    """One line for one of pydantic's errors. An error inside a list or mapping names its setting."""
    location = problem["loc"]
    assert isinstance(location, tuple)
    path = ".".join(str(part) for part in location)
    message = str(problem["msg"]).removeprefix("Value error, ")
    setting = next((chosen[known] for known in chosen if path == known or path.startswith(f"{known}.")), None)
    if setting is None:
        return f"{path or 'configuration'}: {message}"
    return f"{path} = {shortened(setting.value, MAX_SHOWN)} (from {setting.source}): {message}"


def _unknown(path: str, tree: type[BaseModel], source: str) -> ConfigurationError:
    """Suggests the section or setting that is spelled most like `path`, or else most like its last part."""
    path = path[:MAX_SHOWN]
    known = [known for known, _ in leaves(tree)]
    by_last_name = {known.rpartition(".")[2]: known for known in reversed(known)}
    sections = {known.rpartition(".")[0] for known in known}
    near = difflib.get_close_matches(path, {*known, *sections}, n=1, cutoff=0.75)
    near = near or [
        by_last_name[name] for name in difflib.get_close_matches(path.rpartition(".")[2], by_last_name, n=1)
    ]
    hint = f"did you mean {near[0]}?" if near else "`holdfast config show` lists them all"
    return ConfigurationError(f"unknown setting {path} (from {source}); {hint}")
