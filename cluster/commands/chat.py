"""Command `holdfast chat`: a conversation in the terminal, with a model in this process or on a server."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from holdfast.cluster.commands.sampling_flags import SamplingFlags
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer
from holdfast.worker.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig
    from holdfast.cluster.offline.outputs import RequestOutput
    from holdfast.router.chat import Message
    from holdfast.worker.sampling_params import SamplingParams

    Answerer = Callable[[Sequence[Message], Callable[[str], None]], str]
    """`answer(messages, show)`: calls `show` with each new piece, and returns the whole."""

_FLAGS: Any = SamplingFlags  # a class made from the declarations
_DEFAULTS: Final = _FLAGS(max_tokens=512)
_HELP: Final = """\
/new          forget the conversation
/retry        answer the last message again
/undo         forget the last message and its answer
/system TEXT  set the system prompt of the following answers
/save FILE    write the conversation, as JSON
/help         this list
/quit         end, as Ctrl-D does; Ctrl-C ends an answer"""


@takes_settings("model", "parallel", "cache", "scheduler", "speculation", "client", without=("model.seed",))
def chat(
    *,
    server: Annotated[
        str | None,
        Parameter(
            group=ESSENTIALS, help="host:port of routers, separated by commas; unset: load the model in this process"
        ),
    ] = None,
    system: Annotated[str | None, Parameter(group=ESSENTIALS, help="system message of the conversation")] = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    sampling: Annotated[SamplingFlags, Parameter(name="*")] = _DEFAULTS,
    settings: Layer,
) -> int:
    """Talk to a model. Answers are streamed; each message is sent with the whole conversation.

    Lines that are piped in are messages, one each. /help lists what else can be typed. Answers have up to 512 tokens
    unless --max-tokens says otherwise.
    """
    from holdfast.cluster.commands.generate import check_for_server, clients_options
    from holdfast.cluster.config.config import load_config

    params = sampling.params()
    if server is not None:
        check_for_server(settings, config)
        model = settings.get("model.model")
        answering = answering_server(server, str(model.value) if model else "", params, clients_options(settings))
    else:
        answering = answering_here(load_config(settings, config).config, params)
    with answering as answer:
        conversation = Conversation(answer, system)
        return conversation.run(_reader(), sys.stdin.isatty())


class Conversation:
    """A conversation and the loop that continues it."""

    def __init__(self, answer: "Answerer", system: str | None = None) -> None:
        self._answer = answer
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def run(self, read: Callable[[], str], is_terminal: bool) -> int:
        """Until `read` raises `EOFError`, or says so. Returns the exit code."""
        if is_terminal:
            print("Ctrl-D ends, /help lists commands.", file=sys.stderr)
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                return 0
            if line in ("/quit", "/exit"):
                return 0
            try:
                self.take(line)
            except HoldfastError as error:
                print(f"holdfast: {error}", file=sys.stderr)
                if not is_terminal:
                    return 1

    def take(self, line: str) -> None:
        """A command or a message. Raises what answering raises; then the message is forgotten."""
        command, _, rest = line.partition(" ")
        match command:
            case "":
                return
            case "/help":
                print(_HELP, file=sys.stderr)
            case "/new":
                self.messages = [one for one in self.messages if one["role"] == "system"]
            case "/undo":
                self._forget_last()
            case "/system":
                others = [one for one in self.messages if one["role"] != "system"]
                self.messages = [{"role": "system", "content": rest}, *others] if rest else others
            case "/save":
                self._save(rest)
            case "/retry":
                last = self._forget_last()
                if last is not None:
                    self._say(last)
            case _ if command.startswith("/") and command[1:].isalpha():
                raise ConfigurationError(f"{command}: unknown command; type /help for a list")
            case _:
                self._say(line)

    # --- inside ---

    def _say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            answered = self._answer(self.messages, lambda piece: print(piece, end="", flush=True))
        except HoldfastError:
            self.messages.pop()
            raise
        print(flush=True)
        self.messages.append({"role": "assistant", "content": answered})

    def _forget_last(self) -> str | None:
        """The last message of the user, which is forgotten with its answer."""
        while self.messages and self.messages[-1]["role"] != "system":
            last = self.messages.pop()
            if last["role"] == "user":
                return str(last["content"])
        return None

    def _save(self, path: str) -> None:
        import json

        if not path:
            raise ConfigurationError("/save: needs the name of a file")
        try:
            Path(path).expanduser().write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            raise ConfigurationError(f"/save {path}: cannot be written ({error.strerror})") from error


def _reader() -> Callable[[], str]:
    """Lines of the terminal with editing and history, or of a pipe."""
    if not sys.stdin.isatty():
        return input
    with suppress(ImportError):
        import readline  # noqa: F401  # `input` edits lines by it, and the arrows bring earlier ones back
    return lambda: input("> ")


@contextmanager
def answering_here(config: "HoldfastConfig", params: "SamplingParams") -> "Iterator[Answerer]":
    """Loads the model first."""
    from holdfast.cluster.commands.generate import engine_here
    from holdfast.cluster.offline.calls import chat_list

    engine = engine_here(config)

    def answer(messages: "Sequence[Message]", show: Callable[[str], None]) -> str:
        shown = 0

        def take(output: "RequestOutput") -> None:
            nonlocal shown
            text = output.outputs[0].text
            show(text[shown:])
            shown = len(text)

        handle = engine.submit_request(chat_list(engine.tokenizer, messages)[0].prompt, params, callback=take)
        try:
            output = handle.result()
        except KeyboardInterrupt:
            handle.cancel()
            output = handle.result()
        return str(output.outputs[0].text)

    try:
        yield answer
    finally:
        engine.stop()


@contextmanager
def answering_server(
    server: str, model: str, params: "SamplingParams", options: Mapping[str, Any]
) -> "Iterator[Answerer]":
    """Answers of a server; `server` may be several addresses with commas between them. A context."""
    from holdfast.cluster.client.blocking_client import Client

    with Client(server.split(","), **options) as client:

        def answer(messages: "Sequence[Message]", show: Callable[[str], None]) -> str:
            pieces: list[str] = []
            chunks = client.stream(messages=list(messages), params=params, model=model)
            try:
                for chunk in chunks:
                    pieces.append(chunk.text)
                    show(chunk.text)
            except KeyboardInterrupt:
                print("[ended]", file=sys.stderr)
            return "".join(pieces)

        yield answer
