"""Command `holdfast generate`: completes a prompt, in this process or on a server; a single completion is streamed."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from cyclopts import Parameter

from holdfast.cluster.commands.sampling_flags import SamplingFlags
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.process_memory import importing

if TYPE_CHECKING:
    from holdfast.cluster.call_options import ServiceOptions
    from holdfast.cluster.client.async_client import AsyncClient
    from holdfast.cluster.config.config import HoldfastConfig
    from holdfast.cluster.offline.inference_engine import InferenceEngine, Prompt
    from holdfast.cluster.offline.outputs import Logprob, RequestOutput
    from holdfast.router.chat import Message
    from holdfast.worker.request import TokenLogprob
    from holdfast.worker.sampling_params import SamplingParams


# --- what is printed ---


class WholeCompletion(Protocol):
    """The shown form of a finished completion."""

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def cumulative_logprob(self) -> float | None: ...


class Printer:
    """Prints a text as it grows, or several that are complete, and keeps the time."""

    def __init__(self) -> None:
        self.text = ""
        self._started_s = time.perf_counter()
        self._first_s = 0.0
        self._num_tokens = 0

    def add(self, text: str, num_tokens: int) -> None:
        """`text` is new, and so are `num_tokens` tokens."""
        if not self._num_tokens:
            self._first_s = time.perf_counter() - self._started_s
        self._num_tokens += num_tokens
        self.text += text
        print(text, end="", flush=True)

    def finish(self, reason: str) -> None:
        total_s = time.perf_counter() - self._started_s
        print(flush=True)
        speed = f"{self._num_tokens / total_s:.0f} tokens/s, first after {1000 * self._first_s:.0f} ms"
        print(f"{self._num_tokens} tokens in {total_s:.2f} s, {speed}, ended by {reason}", file=sys.stderr)

    def show(self, completions: Sequence[WholeCompletion]) -> None:
        """Each text after its number, and a line on each."""
        total_s = time.perf_counter() - self._started_s
        for index, completion in enumerate(completions):
            print(f"[{index}] {completion.text}", flush=True)
        for index, completion in enumerate(completions):
            known = completion.cumulative_logprob
            likely = "" if known is None else f", log-probability {known:.3f}"
            ending = f"{len(completion.token_ids)} tokens, ended by {completion.finish_reason}{likely}"
            print(f"[{index}] {ending}", file=sys.stderr)
        print(f"{len(completions)} completions in {total_s:.2f} s", file=sys.stderr)


def print_logprobs(title: str, items: "Sequence[TokenLogprob | None]", text_of: Callable[[int], str]) -> None:
    """A table on stderr, a row for each token: how likely it was, and the best ones at its place.

    `text_of` gives a token id's text. None stands for a token of which nothing can be said.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("#", "token", "logprob", "rank", "best", title=title, title_justify="left")
    for index, item in enumerate(items):
        if item is None:
            table.add_row(str(index), "", "", "", "")
            continue
        best = "  ".join(f"{_quoted(token_id, text_of)} {logprob:.2f}" for token_id, logprob in item.top)
        row = (str(index), _quoted(item.token_id, text_of), f"{item.logprob:.3f}", str(item.rank), best)
        table.add_row(*row)
    Console(stderr=True, markup=False, highlight=False).print(table)


def _quoted(token_id: int, text_of: Callable[[int], str]) -> str:
    """A special token that has no text is shown by its id."""
    text = text_of(token_id)
    return repr(text) if text else f"<{token_id}>"


_DEFAULTS: Final = SamplingFlags()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Prompts to complete, with their parameters."""

    text: str
    params: "SamplingParams"
    service: "ServiceOptions"
    chat: bool = False

    @property
    def prompt(self) -> str | None:
        """None: it is a chat."""
        return None if self.chat else self.text

    @property
    def messages(self) -> "list[Message] | None":
        """The chat of one turn; None: the text is the prompt."""
        return [{"role": "user", "content": self.text}] if self.chat else None

    @property
    def is_streamed(self) -> bool:
        """One completion is shown as it comes; of several, or of the best ones, nothing before the end."""
        return self.params.num_sequences == 1 and self.params.beam_width is None


@takes_settings("model", "parallel", "cache", "scheduler", "speculation", "client", without=("model.seed",))
def generate(
    prompt: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="the text to continue; - reads it from standard input")
    ],
    /,
    *,
    chat: Annotated[
        bool, Parameter(group=ESSENTIALS, negative=(), help="send the prompt as a user message, with the chat template")
    ] = False,
    server: Annotated[
        str | None,
        Parameter(
            group=ESSENTIALS, help="host:port of routers, separated by commas; unset: load the model in this process"
        ),
    ] = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    priority: Annotated[
        Literal["critical", "high", "normal", "low"], Parameter(group=ESSENTIALS, help="priority class of the request")
    ] = "normal",
    tenant: Annotated[
        str, Parameter(group=ESSENTIALS, help="tenant of the request; tenants share capacity by `tenant_shares`")
    ] = "",
    timeout_s: Annotated[float | None, Parameter(group=ESSENTIALS, help="timeout of the request in seconds")] = None,
    cache_salt: Annotated[
        str, Parameter(group=ESSENTIALS, help="share cached prefixes only with requests of the same salt")
    ] = "",
    cache_ttl_s: Annotated[
        int, Parameter(group=ESSENTIALS, help="seconds to keep the prompt cached, on the disk tier as well")
    ] = 0,
    sampling: Annotated[SamplingFlags, Parameter(name="*")] = _DEFAULTS,
    settings: Layer,
) -> int:
    """Complete a prompt and show the text as it comes.

    Examples: holdfast generate "The capital of France is"; holdfast generate --chat "What is 2 plus 3?"
    """
    from holdfast.cluster.config.config import load_config
    from holdfast.worker.request import Priority

    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt  # the prompt token that `echo` adds
    ask = Ask(
        text=text,
        params=sampling.params(),
        chat=chat,
        service={
            "priority": Priority[priority.upper()],
            "tenant": tenant,
            "timeout_s": timeout_s,
            "cache_salt": cache_salt,
            "cache_ttl_s": cache_ttl_s,
        },
    )
    if server is None:
        _complete_here(load_config(settings, config).config, ask)
        return 0
    check_for_server(settings, config)
    model = settings.get("model.model")
    asyncio.run(_complete_on_server(server, ask, str(model.value) if model else "", clients_options(settings)))
    return 0


def check_for_server(settings: Layer, config: Path | None) -> None:
    """Refuses settings of the engine together with `--server`: they are the server's."""
    flags = [setting.source for path, setting in settings.items() if path != "model.model" and not _is_clients(path)]
    flags += [] if config is None else ["--config"]
    if flags:
        raise ConfigurationError(
            f"{', '.join(flags)} (with --server): a running server has this already; give it to `holdfast serve`"
        )


def clients_options(settings: Layer) -> dict[str, Any]:
    """Keyword arguments of a client, from the settings that are one's."""
    from holdfast.cluster.config.config import load_config

    return load_config({path: one for path, one in settings.items() if _is_clients(path)}).config.client.options


def _is_clients(path: str) -> bool:
    """Whether a setting is one of the command that calls, not of the server."""
    return path.startswith("client.")


# --- in this process ---


def engine_here(config: "HoldfastConfig") -> "InferenceEngine":
    """Started, with its progress shown. Raises `ConfigurationError` for what cannot work, before anything is loaded."""
    from holdfast.cluster.config.machine import Machine, check_fits
    from holdfast.cluster.config.model_files import check_files

    check_files(config)
    alone = config.model_copy(update={"cluster": config.cluster.model_copy(update={"replicas": 1})})
    check_fits([alone], Machine.here())
    with importing():
        from holdfast.cluster.offline.inference_engine import InferenceEngine
        from holdfast.cluster.progress_bars import progress

    with progress(sys.stderr) as report:
        engine = InferenceEngine(config=config.worker, limits=config.limits, progress=report)
        engine.start()
    return engine


def _complete_here(config: "HoldfastConfig", ask: Ask) -> None:
    engine = engine_here(config)
    try:
        from holdfast.cluster.offline.calls import chat_list

        prompt = chat_list(engine.tokenizer, ask.messages)[0].prompt if ask.messages else ask.text
        printer = Printer()
        if ask.is_streamed:
            output = _stream_here(engine, prompt, ask, printer)
        else:
            output = engine.submit_request(prompt, ask.params, **ask.service).result()
            printer.show(output.outputs)
        _print_all_logprobs(output, engine.tokenizer.tokens.text_of)
    finally:
        engine.stop()


def _stream_here(engine: "InferenceEngine", prompt: "Prompt", ask: Ask, printer: Printer) -> "RequestOutput":
    num_tokens = 0

    def show(output: "RequestOutput") -> None:
        nonlocal num_tokens
        completion = output.outputs[0]
        printer.add(completion.text[len(printer.text) :], len(completion.token_ids) - num_tokens)
        num_tokens = len(completion.token_ids)

    output = engine.submit_request(prompt, ask.params, callback=show, **ask.service).result()
    printer.finish(str(output.outputs[0].finish_reason))
    return output


def _print_all_logprobs(output: "RequestOutput", text_of: Callable[[int], str]) -> None:
    if output.prompt_logprobs is not None:
        print_logprobs("prompt", list(map(_ranked, output.prompt_logprobs)), text_of)
    for completion in output.outputs:
        if completion.logprobs is not None:
            print_logprobs(f"completion {completion.index}", list(map(_ranked, completion.logprobs)), text_of)


def _ranked(by_token_id: "dict[int, Logprob] | None") -> "TokenLogprob | None":
    """The token's own entry is the first; among the best it is only if it has its place there."""
    from holdfast.worker.request import TokenLogprob

    if by_token_id is None:
        return None
    (token_id, own), *_ = by_token_id.items()
    assert own.rank is not None, "the rank of the token itself is known"
    by_rank = sorted((one.rank, other, one.logprob) for other, one in by_token_id.items() if one.rank is not None)
    chosen = tuple((other, one.logprob) for other, one in by_token_id.items() if one.rank is None)
    top = tuple((other, logprob) for place, (rank, other, logprob) in enumerate(by_rank, start=1) if rank == place)
    return TokenLogprob(token_id=token_id, logprob=own.logprob, rank=own.rank, top=top + chosen)


# --- on a server ---


async def _complete_on_server(addresses: str, ask: Ask, model: str, options: dict[str, Any]) -> None:
    from holdfast.cluster.client.async_client import AsyncClient

    printer = Printer()
    async with AsyncClient(addresses.split(","), **options) as client:
        if ask.is_streamed:
            prompt_logprobs, logprobs = await _stream_from(client, ask, model, printer)
            tables = {"completion 0": logprobs}
        else:
            answer = await client.generate(ask.prompt, ask.params, messages=ask.messages, model=model, **ask.service)
            printer.show(answer.completions)
            prompt_logprobs = answer.prompt_logprobs
            tables = {f"completion {item.sequence_index}": item.logprobs for item in answer.completions}
        tables = {title: items for title, items in {"prompt": prompt_logprobs, **tables}.items() if items}
        token_ids = {token_id for items in tables.values() for token_id in _token_ids(items)}
        texts = {token_id: await client.detokenize([token_id], model=model) for token_id in sorted(token_ids)}
    for title, items in tables.items():
        print_logprobs(title, items, texts.__getitem__)


async def _stream_from(
    client: "AsyncClient", ask: Ask, model: str, printer: Printer
) -> "tuple[tuple[TokenLogprob | None, ...], tuple[TokenLogprob | None, ...]]":
    """Log-probabilities of the prompt's tokens, and of the output's."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    async for chunk in client.stream(ask.prompt, ask.params, messages=ask.messages, model=model, **ask.service):
        printer.add(chunk.text, len(chunk.token_ids))
        prompt_logprobs += chunk.prompt_logprobs
        logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            printer.finish(chunk.finish_reason)
    return prompt_logprobs, logprobs


def _token_ids(items: "Iterable[TokenLogprob | None]") -> Iterator[int]:
    """The ids of all tokens that a table of log-probabilities shows."""
    for item in items:
        if item is not None:
            yield item.token_id
            yield from (token_id for token_id, _ in item.top)
