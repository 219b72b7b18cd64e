"""`holdfast generate`: one completion, shown as it comes; in this process, or on a server with `--server`."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from cluster.config import load_config
from cluster.config_sources import Layer
from cluster.flags import ESSENTIALS, takes_settings
from worker.config import WorkerConfig
from worker.errors import ConfigurationError
from worker.request import SamplingParams
from worker.structured_outputs import StructuredOutputs

_SAMPLING = Group.create_ordered("Sampling")


@takes_settings("model", "parallel", "cache", "scheduler", without=("model.seed",))
def generate(
    prompt: Annotated[str, Parameter(help="the text to go on from; - reads it from stdin")],
    /,
    *,
    chat: Annotated[bool, Parameter(group=ESSENTIALS, negative=(), help="ask as a user, by the chat template")] = False,
    server: Annotated[
        str | None,
        Parameter(
            group=ESSENTIALS, help="host:port of running routers, with commas in between, instead of a model here"
        ),
    ] = None,
    max_tokens: Annotated[int, Parameter(group=_SAMPLING, help="at most this many tokens")] = 64,
    temperature: Annotated[float, Parameter(group=_SAMPLING, help="0 takes the likeliest token every time")] = 0.0,
    top_k: Annotated[int, Parameter(group=_SAMPLING, help="draw among the k best; 0 for all")] = 0,
    top_p: Annotated[float, Parameter(group=_SAMPLING, help="draw among the best with this mass")] = 1.0,
    min_p: Annotated[float, Parameter(group=_SAMPLING, help="draw among those with this share of the best's")] = 0.0,
    seed: Annotated[int, Parameter(group=_SAMPLING, help="key of the draws")] = 0,
    min_tokens: Annotated[int, Parameter(group=_SAMPLING, help="at least this many tokens before it may end")] = 0,
    repetition_penalty: Annotated[
        float, Parameter(group=_SAMPLING, help="above 1 avoids tokens of prompt and output")
    ] = 1.0,
    presence_penalty: Annotated[float, Parameter(group=_SAMPLING, help="above 0 avoids tokens of the output")] = 0.0,
    frequency_penalty: Annotated[
        float, Parameter(group=_SAMPLING, help="above 0 avoids tokens the more often the output has them")
    ] = 0.0,
    bad_words: Annotated[
        list[str] | None, Parameter(group=_SAMPLING, negative=(), help="text that must not come up")
    ] = None,
    json_schema: Annotated[
        str | None, Parameter(group=_SAMPLING, help="a JSON schema that the output follows, or a file that holds one")
    ] = None,
    regex: Annotated[str | None, Parameter(group=_SAMPLING, help="what the whole output matches")] = None,
    stop: Annotated[list[str] | None, Parameter(group=_SAMPLING, negative=(), help="text that ends the output")] = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Complete a prompt and show the text as it comes.

    Examples: holdfast generate "The capital of France is"; holdfast generate --chat "What is 2 plus 3?"
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        bad_words=bad_words or (),
        stop=stop or (),
        structured_outputs=_structured_outputs(json_schema, regex),
    )
    if server is None:
        _complete_here(load_config(settings, config).config.worker, text, params, chat)
        return 0
    if chat:
        raise ConfigurationError("--chat (with --server): chat templates are applied where the model is loaded")
    model = settings.get("model.model")
    asyncio.run(_complete_on_server(server, text, params, str(model.value) if model else ""))
    return 0


def _structured_outputs(json_schema: str | None, regex: str | None) -> StructuredOutputs | None:
    if json_schema is None and regex is None:
        return None
    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        try:
            json_schema = Path(json_schema).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--json-schema: neither a JSON object nor a file to be read: {error}") from None
    return StructuredOutputs(json=json_schema, regex=regex)


class _Printer:
    """Prints a text as it grows, and keeps the time."""

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


def _complete_here(config: WorkerConfig, text: str, params: SamplingParams, chat: bool) -> None:
    from cluster.inference_engine import InferenceEngine
    from cluster.llm import chat_token_ids
    from cluster.outputs import RequestOutput
    from cluster.progress import progress

    with progress(sys.stderr) as report:
        engine = InferenceEngine(config=config, progress=report)
        engine.start()
    try:
        prompt = chat_token_ids(engine.tokenizer, [{"role": "user", "content": text}]) if chat else text
        printer = _Printer()
        num_tokens = 0

        def show(output: RequestOutput) -> None:
            nonlocal num_tokens
            completion = output.outputs[0]
            printer.add(completion.text[len(printer.text) :], len(completion.token_ids) - num_tokens)
            num_tokens = len(completion.token_ids)

        output = engine.submit_request(prompt, params, callback=show).result()
        printer.finish(str(output.outputs[0].finish_reason))
    finally:
        engine.stop()


async def _complete_on_server(addresses: str, text: str, params: SamplingParams, model: str) -> None:
    from cluster.client import AsyncClient

    printer = _Printer()
    async with AsyncClient(addresses.split(",")) as client:
        async for chunk in client.stream(text, params, model=model):
            printer.add(chunk.text, len(chunk.token_ids))
            if chunk.finish_reason is not None:
                printer.finish(chunk.finish_reason)
