"""Command of the command line as plain data: its name, help and examples, and where its function is.

It is read for every `--help` and every completion, so it imports nothing of the commands themselves.
"""

from dataclasses import dataclass
from typing import Final

ESSENTIALS: Final = "Essentials"
OPERATIONS: Final = "Operations"
MORE: Final = "More"

API_KEY: Final = "With --server, the API key is read from the variable HOLDFAST_API_KEY."


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command or subcommand of `holdfast`."""

    name: str
    """Name as typed: `serve`, `models add`."""
    target: str
    """`module:function`, the module below `holdfast.cluster.commands`."""
    help: str
    """One line, for the list of commands; the function's docstring says more."""
    examples: tuple[str, ...]
    """Command lines without the word `holdfast`."""
    details: str = ""
    """Text of the command's own help after its summary line."""
    group: str = MORE
    takes: str = ""
    """Positional arguments, as the usage line shows them."""
    has_options: bool = True
    local: str = ""
    """Reason why the command has no `--server`; empty: it has one."""

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.name.split())

    @property
    def usage(self) -> str:
        """The first line of the command's help. Written here, since cyclopts reads all settings again to derive it."""
        options = "[OPTIONS]" if self.has_options else ""
        return " ".join(filter(None, ("Usage: holdfast", self.name, options, self.takes))) + "\n"

    @property
    def description(self) -> str:
        """The text of the command's own help; a list of commands shows the first paragraph of it."""
        return "\n\n".join(filter(None, (self.help, self.details, "" if self.local else API_KEY)))

    @property
    def epilogue(self) -> str:
        """The examples, as the end of the command's help."""
        return examples_text(self.examples)


def examples_text(examples: tuple[str, ...]) -> str:
    """Examples of a subcommand for its `--help`, one a line."""
    lines = "".join(f"  holdfast {example}\n" for example in examples)
    return f"Example{'s' if len(examples) > 1 else ''}:\n\n{lines}"
