"""Command `holdfast config show`: every setting's value, and which source it came from."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from holdfast.cluster.config.flags import ESSENTIALS, SECTIONS, takes_settings
from holdfast.cluster.config.layers import Layer

if TYPE_CHECKING:
    from holdfast.cluster.config.config import LoadedConfig


@takes_settings(*SECTIONS)
def show(
    *,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Print every setting's value and where it came from.

    Later sources win: defaults, the file, the environment (HOLDFAST_SECTION__KEY), flags.
    """
    from holdfast.cluster.config.config import HoldfastConfig, load_config
    from holdfast.cluster.config.sources import leaves

    loaded = load_config(settings, config)
    rows = [(path, _value(loaded, path), loaded.sources[path]) for path, _ in leaves(HoldfastConfig)]
    if sys.stdout.isatty():
        _print_table(rows)
    else:
        for path, value, source in rows:
            print(f"{path} = {value}  # {source}")
    return 0


def _value(loaded: "LoadedConfig", path: str) -> str:
    section, _, name = path.partition(".")
    value = getattr(getattr(loaded.config, section), name)
    return "unset" if value is None else str(value)


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for path, value, source in rows:
        style = "dim" if source == "default" else "bold"
        table.add_row(Text(path), Text(value, style=style), Text(source, style=style))
    Console().print(table)
