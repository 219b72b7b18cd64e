"""Schemas of Kubernetes kinds with unknown fields refused: core kinds by kubernetes-validate, others by their CRDs.

As an API server does, defaults are filled in first. CEL rules (`x-kubernetes-validations`) are not evaluated.
"""

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

VERSION = "1.34"
SCHEMAS = "v1.34.0-local-strict"
CORE = ("", "apps", "batch", "policy", "networking.k8s.io")

Schema = dict[str, Any]
Manifest = dict[str, Any]


def group_of(manifest: Manifest) -> str:
    return str(manifest["apiVersion"].rpartition("/")[0])


@functools.cache
def _core_schema(name: str) -> Schema:
    """Of kubernetes-validate's, whose own `validate` reads all of them for each manifest."""
    return dict(schema_contents(f"kubernetes-json-schema/{SCHEMAS}/{name}.json", VERSION))


@functools.cache
def _core_validator(kind: str, version: str) -> Draft202012Validator:
    group, _, name = version.rpartition("/")
    schema = _core_schema("-".join(filter(None, [kind.lower(), group.split(".")[0], name])))
    registry = Resource.from_contents(schema) @ (Resource.from_contents(_core_schema("_definitions")) @ Registry())
    return Draft202012Validator(schema, registry=registry)


def core_errors(manifest: Manifest) -> list[str]:
    return _core_errors(json.dumps(manifest, sort_keys=True))


@functools.cache
def _core_errors(manifest: str) -> list[str]:
    """Overlays have most of their manifests in common."""
    made = json.loads(manifest)
    errors = _core_validator(made["kind"], made["apiVersion"]).iter_errors(made)
    return [f"{'/'.join(map(str, one.absolute_path))}: {one.message}" for one in errors]


@functools.cache
def _definition(folder: Path, group: str, kind: str) -> Manifest | None:
    """None where there is none. Files are named as `kubectl` and controller-gen name them."""
    for path in folder.glob(f"{group}_{kind.lower()}*.yaml"):
        found = yaml.load(path.read_text(), yaml.CSafeLoader)
        if found["spec"]["names"]["kind"] == kind:
            return dict(found)
    return None


def has_schema(folder: Path, manifest: Manifest) -> bool:
    return _definition(folder, group_of(manifest), manifest["kind"]) is not None


@functools.cache
def _validator(folder: Path, group: str, kind: str, version: str) -> Draft202012Validator:
    definition = _definition(folder, group, kind)
    assert definition is not None
    versions = definition["spec"]["versions"]
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == version and one["served"]]
    return Draft202012Validator(strict(schema))


def custom_errors(folder: Path, manifest: Manifest) -> list[str]:
    version = manifest["apiVersion"].rpartition("/")[2]
    validator = _validator(folder, group_of(manifest), manifest["kind"], version)
    filled = copy.deepcopy(manifest)
    fill(filled, validator.schema)
    return [f"{'/'.join(map(str, one.absolute_path))}: {one.message}" for one in validator.iter_errors(filled)]


def strict(schema: Schema) -> Schema:
    """Refuses fields that are not declared, but for metadata, whose schema CRDs leave to the server."""
    made = dict(schema)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if made.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    if "properties" in made:
        made["properties"] = {name: strict(inner) for name, inner in made["properties"].items()}
        is_open = made.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in made
        if not is_open:
            made["additionalProperties"] = False
    if isinstance(made.get("items"), dict):
        made["items"] = strict(made["items"])
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(made["additionalProperties"])
    return made


def fill(value: Any, schema: Schema) -> None:
    """Sets `default`s in place."""
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = copy.deepcopy(inner["default"])
            if name in value:
                fill(value[name], inner)
    elif isinstance(value, list):
        for one in value:
            fill(one, schema.get("items", {}))


def paths(value: Any, name: str) -> Iterator[Any]:
    """Every value of a field of this name, however deep."""
    if isinstance(value, dict):
        for field, inner in value.items():
            if field == name:
                yield inner
            yield from paths(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, name)
