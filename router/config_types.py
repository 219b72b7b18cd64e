"""Types of settings that are written as text: files, host names, rules, origins, and the place of a store."""

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

File = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""The absolute path of a file, since the processes that read it may have another working directory."""


def parse_host_names(value: object) -> object:
    """`"a.example.org, b"` as names in lower case. Other values are left to the validator."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return value
    read = tuple(name.strip().lower() for name in names if name.strip())
    for name in read:
        if not re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:]+", name):
            raise ValueError(f"{name!r} is not a host name; write it without scheme and port, like llm.example.org")
    return read


HostNames = Annotated[tuple[str, ...], BeforeValidator(parse_host_names)]


def parse_rules(value: object) -> object:
    """`billing, date`, or `none`, or a list of rules. Other values are left to the validator."""
    items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    return () if items == ["none"] else tuple(items) if isinstance(items, list) else items


RuleNames = Annotated[tuple[Literal["billing", "date", "time", "id"], ...], BeforeValidator(parse_rules)]
"""Rules of `text/head_lines.py`."""


def parse_origins(value: object) -> object:
    """`https://app.example, http://localhost:3000`, or `*`, or a list of them, as browsers write origins."""
    items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    return tuple(_origin(item) for item in items) if isinstance(items, list | tuple) else value


def parse_store(place: str) -> str:
    """The absolute path of a folder, or `postgresql://user@host/database`. Raises ValueError."""
    if "://" not in place:
        return str(Path(place).expanduser().absolute())
    parts = urlsplit(place)
    if parts.scheme != "postgresql" or not parts.path.strip("/"):
        raise ValueError(f"{place!r} must be a folder, or a URL like postgresql://user@host/database")
    if parts.password is not None:
        raise ValueError("it must have no password, which process lists would show: put that into a file (PGPASSFILE)")
    return place


def _origin(item: object) -> str:
    parts = urlsplit(item) if isinstance(item, str) else None
    if item == "*":
        return "*"
    if parts is None or not parts.scheme or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"{item!r} must be * or an origin, such as https://app.example or http://localhost:3000")
    return f"{parts.scheme}://{parts.netloc}".lower()


Origins = Annotated[tuple[str, ...], BeforeValidator(parse_origins)]
