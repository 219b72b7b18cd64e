"""Layout of `--help`: groups of options as plain text in two columns, as argparse has it.

rich's tables take a third of the CPU time of `holdfast serve --help`, which has 170 options.
"""

import shutil
import textwrap
from typing import Any, Final

MAX_WIDTH: Final = 100
"""Characters of a line at most; a narrower terminal sets the width."""
COLUMN: Final = 30
"""Column at which descriptions begin; a longer name has a separate line."""


class HelpPage:
    """A `help_formatter` of cyclopts 4 (`cyclopts.help.protocols.HelpFormatter`).

    cyclopts passes its console and options, which are not used, and panels: groups with a title and entries.
    """

    def __init__(self) -> None:
        self._width = min(shutil.get_terminal_size().columns, MAX_WIDTH)

    def __call__(self, console: object, options: object, panel: Any) -> None:
        """Prints one group of options, arguments or commands."""
        if panel.entries:
            print(f"\n{panel.title}:" if panel.title else "")
            for entry in panel.entries:
                print(self._entry(entry))

    def render_usage(self, _console: object, _options: object, usage: object) -> None:
        print("Usage: " + str(usage or "").strip().removeprefix("Usage: "))

    def render_description(self, _console: object, _options: object, description: object) -> None:
        for paragraph in _plain(description).split("\n\n"):
            print()
            print(textwrap.fill(paragraph, self._width, break_on_hyphens=False))

    def _entry(self, entry: Any) -> str:
        name = "  " + _name(entry)
        lines = textwrap.wrap(_about(entry), max(self._width - COLUMN, 20), break_on_hyphens=False)
        first = [name] if len(name) > COLUMN - 2 or not lines else [name.ljust(COLUMN) + lines.pop(0)]
        return "\n".join(first + [" " * COLUMN + line for line in lines])


def _name(entry: Any) -> str:
    """The names of an option, as in `--tensor-parallel-size, --tp VALUE`, or of a command or an argument."""
    options = (*entry.positive_names, *entry.positive_shorts, *entry.negative_names, *entry.negative_shorts)
    named = ", ".join(filter(None, (entry.positional_label, *options)))
    return f"{named} {entry.metavar}" if entry.metavar and any(map(_is_long, options)) else named


def _is_long(option: str) -> bool:
    return option.startswith("--")


def _about(entry: Any) -> str:
    notes = [f"choices: {', '.join(entry.choices)}"] if entry.choices else []
    notes += [f"default: {entry.default}"] if entry.default is not None else []
    notes += ["required"] if entry.required else []
    return " ".join(filter(None, (_plain(entry.description), f"[{'; '.join(notes)}]" if notes else "")))


def _plain(text: Any) -> str:
    """The characters of a rich text, or of cyclopts's lazy one."""
    return str(getattr(text, "primary_renderable", text) or "")
