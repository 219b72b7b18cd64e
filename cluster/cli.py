"""The `holdfast` command: which commands there are, and what the process answers to the shell.

Exit codes: 0 done, 1 failed, 2 the caller's mistake (usage, settings, input), 130 interrupted. Commands live in
`commands/` and are imported only when they run, so that `--help` stays fast.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from cyclopts import App, CycloptsError, Group

from worker.errors import CallerError, HoldfastError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

_FIRST = Group.create_ordered("Essentials")
_MORE = Group.create_ordered("More")

_EXAMPLES = """\
Examples:

  holdfast generate "The capital of France is"
  holdfast serve --replicas 2 --tp 2
  holdfast generate --server localhost:50051 "The capital of France is"
  holdfast config show --config serve.yaml
"""

app = App(
    name="holdfast",
    help="LLM serving whose streams hold.",
    help_epilogue=_EXAMPLES,
    help_format="plaintext",
    version=lambda: version("holdfast"),
    group_commands=_MORE,
    suppress_keyboard_interrupt=False,
)
config_app = App(name="config", help="Look at the settings.", group=_MORE)
app["--help"].group = app["--version"].group = _MORE

for _name, _help in {
    "serve": "Start a cluster, or join one, and serve a model over gRPC.",
    "generate": "Complete a prompt, in this process or on a server.",
    "demo": "Start a local cluster, stream four prompts at once, and stop it.",
}.items():
    app.command(f"cluster.commands.{_name}:{_name}", name=_name, help=_help, group=_FIRST)
app.command(
    "cluster.commands.estimate:estimate", name="estimate", help="Say how much memory a model needs, without loading it."
)
config_app.command(
    "cluster.commands.config_show:show", name="show", help="Print every setting's value and where it came from."
)
app.command(config_app)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. What is not an error of ours keeps its traceback."""
    try:
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _say(f"{' '.join(str(error).split())} (try `holdfast --help`)", EXIT_USAGE)
    except CallerError as error:
        return _say(str(error), EXIT_USAGE)
    except HoldfastError as error:
        return _say(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)
    return result if isinstance(result, int) else 0


def _say(message: str, code: int) -> int:
    print(f"holdfast: {message}", file=sys.stderr)
    return code
