"""Entry point of the `holdfast` command: its list of commands, and the exit codes of the process.

Exit codes: 0 done, 1 failed, 2 the caller's mistake (usage, settings, input), 130 interrupted. The commands live in the
files beside this one and are imported only when they run, so that `--help` stays fast.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from cyclopts import App, CycloptsError, Group

from holdfast.cluster.commands.entry import EXIT_INTERRUPTED
from holdfast.worker.errors import CallerError, HoldfastError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

_FIRST = Group.create_ordered("Essentials")
_OPERATE = Group.create_ordered("Operations")
_MORE = Group.create_ordered("More")

_EXAMPLES = """\
Examples:

  holdfast generate "The capital of France is"
  holdfast serve --replicas 2 --tp 2
  holdfast generate --server localhost:50051 "The capital of France is"
  holdfast config show --config serve.yaml
"""


_WORDS = {
    "serve": "[MODEL]",
    "generate": "PROMPT",
    "apply": "CONFIG",
    "estimate": "[MODEL]",
    "logs": "[PROCESS]",
    "completion": "SHELL",
    "drain": "REPLICA",
    "undrain": "REPLICA",
    "pause": "MODEL",
    "resume": "MODEL",
    "log-level": "LEVEL",
    "models update": "NAME",
    "models rollback": "NAME",
    "models add": "MODEL",
    "models remove": "NAME",
    "keys add": "NAME",
    "keys revoke": "NAME",
}
"""What a command takes besides options."""


def _usage(command: str) -> str:
    """The first line of a command's help. Said here, since cyclopts goes through all settings once more to find it."""
    options = "" if command == "completion" else "[OPTIONS]"
    return " ".join(filter(None, ("Usage: holdfast", command, options, _WORDS.get(command, "")))) + "\n"


def version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "a checkout that is not installed"


app = App(
    name="holdfast",
    help="LLM serving whose streams hold.",
    help_epilogue=_EXAMPLES,
    help_format="plaintext",
    version=version,
    group_commands=_MORE,
    suppress_keyboard_interrupt=False,
)
models_app = App(name="models", help="Add models to a running cluster, update, remove and list them.", group=_MORE)
_DRAIN_NODE = "Drain this machine's Ray node: end its routers and replicas gracefully."
keys_app = App(name="keys", help="Make API keys, list and revoke them.", group=_MORE)
config_app = App(name="config", help="Look at the settings.", group=_MORE)
app["--help"].group = app["--version"].group = _MORE

_ADMIN = (
    ("drain", "drain", "Take a replica out of service."),
    ("undrain", "undrain", "Put a replica back into service."),
    ("pause", "pause", "Let new requests of a model wait, or refuse them."),
    ("resume", "resume", "End a pause of a model."),
    ("log-level", "log_level", "Change what routers and replicas log."),
    ("dump", "dump", "Write what routers know, for a bug report."),
)
_COMMANDS = (
    ("serve", _FIRST, "Start a cluster, or join one, and serve models over gRPC and HTTP."),
    ("generate", _FIRST, "Complete a prompt, in this process or on a server."),
    ("demo", _FIRST, "Start a local cluster, stream four prompts at once, and stop it."),
    ("apply", _MORE, "Show how a running cluster's models differ from a configuration, and change them."),
    ("bench", _MORE, "Put a load on a server, ours or another's, and report what its clients see."),
    ("chat", _FIRST, "Talk to a model in the terminal, in this process or on a server."),
    ("status", _FIRST, "Show whether a cluster is well: routers, replicas, load and caches."),
    ("logs", _MORE, "Show what the processes of a cluster on this machine have written."),
    ("doctor", _MORE, "Look at this machine, and say what to do about each finding."),
    ("front", _MORE, "Serve HTTP before several routers, so that stock clients' streams outlive one of them."),
    ("completion", _MORE, "Print the script by which a shell completes commands and flags."),
    ("stats", _MORE, "Show how busy a running cluster's replicas are, and what their caches do."),
    ("simulate", _MORE, "Run the cluster's deciders in virtual time under faults, and check every token."),
    ("estimate", _MORE, "Say how much memory a model needs, without loading it."),
)
for _order, (_name, _group, _help) in enumerate(_COMMANDS):
    app.command(
        f"holdfast.cluster.commands.{_name}:{_name}",
        name=_name,
        group=_group,
        help=_help,
        sort_key=_order,
        usage=_usage(_name),
    )
app.command(
    "holdfast.cluster.commands.drain_node:drain_node",
    name="drain-node",
    group=_MORE,
    help=_DRAIN_NODE,
    usage=_usage("drain-node"),
)
for _name, _function, _help in _ADMIN:
    app.command(
        f"holdfast.cluster.commands.admin:{_function}", name=_name, group=_OPERATE, help=_help, usage=_usage(_name)
    )
app.command(models_app)
app.command(config_app)
app.command(keys_app)
for _name in ("update", "rollback"):
    models_app.command(
        f"holdfast.cluster.commands.updates:{_name}", name=_name, sort_key=_order, usage=_usage(f"models {_name}")
    )
for _name, _function in (("add", "add"), ("remove", "remove"), ("list", "show")):
    models_app.command(
        f"holdfast.cluster.commands.models:{_function}", name=_name, sort_key=_order, usage=_usage(f"models {_name}")
    )
for _name, _function in (("add", "add"), ("list", "show"), ("revoke", "revoke")):
    keys_app.command(
        f"holdfast.cluster.commands.keys:{_function}", name=_name, sort_key=_order, usage=_usage(f"keys {_name}")
    )
config_app.command(
    "holdfast.cluster.commands.config_show:show",
    name="show",
    help="Print every setting's value and where it came from.",
    usage=_usage("config show"),
)


def main() -> None:
    """Runs this process's command line. The console script's entry is `entry.py`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. What is not an error of Holdfast's own keeps its traceback."""
    return exit_code(lambda: command(arguments))


def command(arguments: Sequence[str]) -> object:
    """Runs one command line and returns what its command returns. Raises what `exit_code` has a code for."""
    return app(arguments, exit_on_error=False, print_error=False, result_action="return_value")


def exit_code(action: Callable[[], object]) -> int:
    """The exit code that an action's end means. Holdfast's own errors are printed, in a line each."""
    try:
        result = action()
    except CycloptsError as error:
        return _say(f"{' '.join(str(error).split())} (try `holdfast --help`)", EXIT_USAGE)
    except CallerError as error:
        return _say(str(error), EXIT_USAGE)
    except HoldfastError as error:
        return _say(str(error), EXIT_FAILED)
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
