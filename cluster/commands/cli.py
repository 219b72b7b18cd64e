"""Entry point of the `holdfast` command: its list of commands, its exit codes, and `holdfast completion`.

Exit codes: 0 done, 1 failed, 2 the caller's mistake (usage, settings, input), 130 interrupted. The commands live in the
files beside this one and are imported only when they run, so that `--help` stays fast.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Annotated, Final, Literal

from cyclopts import App, CycloptsError, Group, Parameter

from holdfast.cluster.commands.catalogue import COMMANDS, EXAMPLES, GROUPS, find_command
from holdfast.cluster.commands.command import ESSENTIALS, MORE, OPERATIONS, examples_text
from holdfast.cluster.commands.entry import EXIT_INTERRUPTED
from holdfast.cluster.commands.help_page import HelpPage
from holdfast.worker.errors import CallerError, ConfigurationError, HoldfastError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

_GROUPS: Final = {name: Group.create_ordered(name) for name in (ESSENTIALS, OPERATIONS, MORE)}


def version() -> str:
    """Version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "a checkout that is not installed"


app = App(
    name="holdfast",
    help="LLM serving whose streams hold.",
    help_epilogue=examples_text(EXAMPLES),
    help_format="plaintext",
    help_formatter=HelpPage(),
    version=version,
    group_commands=_GROUPS[MORE],
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative_iterable=()),
)
app["--help"].group = app["--version"].group = _GROUPS[MORE]


def _register() -> None:
    """Adds every command of the catalogue to `app`; a command's function is imported when the command runs."""
    parents = {"": app}
    for name, about in GROUPS.items():
        of_group = tuple(one.examples[0] for one in COMMANDS if one.words[0] == name)
        parents[name] = App(name=name, help=about, help_epilogue=examples_text(of_group), group=_GROUPS[MORE])
        app.command(parents[name])
    for order, one in enumerate(COMMANDS):
        *parent, name = one.words
        parents[" ".join(parent)].command(
            f"holdfast.cluster.commands.{one.target}",
            name=name,
            group=None if parent else _GROUPS[one.group],
            help=one.description,
            help_epilogue=one.epilogue,
            sort_key=order,
            usage=one.usage,
        )


_register()


def main() -> None:
    """Runs this process's command line. The console script's entry is `entry.py`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. An error of another library keeps its traceback."""
    return exit_code(lambda: command(arguments))


def command(arguments: Sequence[str]) -> object:
    """Runs one command line and returns its command's result. Raises the errors that `exit_code` handles."""
    _check_server(tuple(arguments))
    *words, last = arguments or ("",)
    if last in app.help_flags and any(one.words == tuple(words) for one in COMMANDS):
        app.help_print(words)  # parsing would read all flags first: a fifth of the time
        return None
    return app(arguments, exit_on_error=False, print_error=False, result_action="return_value")


def _check_server(arguments: tuple[str, ...]) -> None:
    """Raises `ConfigurationError` for `--server` with a command that works only on its own machine."""
    found = find_command(arguments)
    if found is not None and found.local and any(word.partition("=")[0] == "--server" for word in arguments):
        raise ConfigurationError(f"{found.name} --server: this command has no --server, because {found.local}")


def exit_code(action: Callable[[], object]) -> int:
    """Runs `action` and returns the process's exit code. An error of Holdfast is printed as one line."""
    try:
        result = action()
    except CycloptsError as error:
        return _say(f"{' '.join(str(error).split())} (try `holdfast --help`)", EXIT_USAGE)
    except CallerError as error:
        return _say(str(error), EXIT_USAGE)
    except HoldfastError as error:
        return _say(str(error), EXIT_FAILED)
    except ImportError as error:
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__  # of a file that cyclopts loads
        if not isinstance(missing, ModuleNotFoundError) or find_spec("torch") is not None:
            raise
        return _say(f"this command needs {missing.name}: pip install 'holdfast[serve]'", EXIT_USAGE)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # as behind `| head`; nothing more may be written when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _say(message: str, code: int) -> int:
    print(f"holdfast: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="bash, zsh or fish")], /) -> int:
    """Print the script that completes `holdfast` in a shell.

    bash: holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast; zsh: into a file _holdfast in
    a folder of $fpath; fish: into ~/.config/fish/completions/holdfast.fish
    """
    print(app.generate_completion(prog_name="holdfast", shell=shell))
    return 0
