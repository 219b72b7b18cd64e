"""Hooks of the documentation's site (`make docs`): the pages of `reference/`, made from settings,
commands, protos and the docstrings of public names.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

ROOT: Final = Path(__file__).resolve().parent.parent
PROTO: Final = ROOT / "proto"
REPOSITORY_PAGES: Final = ("../README.md",)
"""Linked from pages, and no pages themselves: on the site they are the start."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = (("settings", settings()), ("commands", commands()), ("rpcs", rpcs()), ("python", python_names()))
    for name, text in pages:
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for link in REPOSITORY_PAGES:
        markdown = markdown.replace(f"]({link})", "](index.md)")
    return markdown


# --- Python ---


def python_names() -> str:
    """What `import holdfast` offers: mkdocstrings puts the signature and the docstring of each name in."""
    from holdfast import HOMES

    lines = ["# Python", "", "The names of `import holdfast`."]
    for name in sorted(HOMES, key=str.lower):
        lines += ["", f"::: {HOMES[name]}.{name}"]
    return "\n".join(lines) + "\n"


# --- settings ---


def settings() -> str:
    """Every section of a configuration file, and its settings."""
    from holdfast.cluster.config.config import HoldfastConfig

    lines = [
        "# Settings",
        "",
        "Of a file (`--config`), of the environment (`HOLDFAST_SECTION__NAME`) or of flags (`holdfast serve --help`).",
        "`holdfast config show` tells which of them hold, and where each comes from.",
    ]
    for section, field in HoldfastConfig.model_fields.items():
        lines += ["", f"## {section}", "", *_section(field.annotation)]
    return "\n".join(lines) + "\n"


def _section(model: Any) -> Iterator[str]:
    assert issubclass(model, BaseModel), "a configuration has sections"
    yield (model.__doc__ or "").strip()
    yield ""
    yield "| setting | default | |"
    yield "|---|---|---|"
    for name, field in model.model_fields.items():
        default = "" if field.is_required() else _shown(field.get_default(call_default_factory=True))
        yield f"| `{name}` | {default} | {_cell(field.description or '')} |"


def _shown(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "unset"
    shown = str(value) if isinstance(value, str | int | float) else repr(value)
    return f"`{_cell(shown)}`" if shown else "empty"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


# --- commands ---


def commands() -> str:
    """What `--help` of each command says."""
    from holdfast.cluster.commands.cli import app

    text = app.generate_docs(output_format="markdown", recursive=True)
    text = re.sub(r"^## Table of Contents$.*?(?=^## )", "", text, count=1, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^# .*$", "# Commands", text, count=1, flags=re.MULTILINE)


# --- RPCs ---

_KINDS: Final = ("", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group",
                 "message", "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64")  # fmt: skip
_OF_FILE: Final = {"messages": 4, "enums": 5, "services": 6}
"""Numbers of the fields of a `FileDescriptorProto`, by which comments name what they are of."""


def rpcs() -> str:
    """The services and messages of `holdfast.v1`, with the comments of their protos."""
    lines = [
        "# RPCs",
        "",
        "Package `holdfast.v1`. Reflection is on at every port, so `buf curl` and `grpcurl` know all of it.",
    ]
    for file in _files():
        comments = {tuple(one.path): one.leading_comments for one in file.source_code_info.location}
        for index, service in enumerate(file.service):
            place = (_OF_FILE["services"], index)
            lines += ["", f"## {service.name}", "", _comment(comments, place), "", "| method | | |", "|---|---|---|"]
            for number, method in enumerate(service.method):
                taken = f"{'stream ' * method.client_streaming}{_short(method.input_type)}"
                given = f"{'stream ' * method.server_streaming}{_short(method.output_type)}"
                lines.append(f"| `{method.name}` | `{taken}` → `{given}` | {_comment(comments, (*place, 2, number))} |")
        for index, message in enumerate(file.message_type):
            lines += _message(message, comments, (_OF_FILE["messages"], index))
    return "\n".join(lines) + "\n"


def _files() -> Iterator[Any]:
    """Those of the public API: the link between routers and replicas is no client's."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "all"
        sources = [str(path.relative_to(PROTO)) for path in sorted((PROTO / "holdfast" / "v1").glob("*.proto"))]
        words = ["protoc", f"-I{PROTO}", "--include_source_info", f"--descriptor_set_out={out}", *sources]
        if protoc.main(words) != 0:
            raise SystemExit("protoc failed")
        found = FileDescriptorSet.FromString(out.read_bytes())
    yield from sorted((file for file in found.file if not file.name.endswith("engine.proto")), key=lambda one: one.name)


def _message(message: Any, comments: dict[tuple[int, ...], str], place: tuple[int, ...]) -> Iterator[str]:
    yield from ("", f"### {message.name}", "", _comment(comments, place), "")
    if message.field:
        yield "| field | type | |"
        yield "|---|---|---|"
    for number, field in enumerate(message.field):
        kind = _short(field.type_name) if field.type_name else _KINDS[field.type]
        many = "repeated " if field.label == field.LABEL_REPEATED else ""
        yield f"| `{field.name}` | `{many}{kind}` | {_comment(comments, (*place, 2, number))} |"


def _comment(comments: dict[tuple[int, ...], str], place: tuple[int, ...]) -> str:
    return _cell(" ".join(comments.get(place, "").split()))


def _short(name: str) -> str:
    return name.rpartition(".")[2]
