"""Command `holdfast embed`: vectors, or scores by label, of texts, in this process or on a server."""

import asyncio
import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from holdfast.cluster.commands.generate import check_for_server, clients_options, engine_here
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer

Truncation = tuple[int | None, Literal["left", "right"] | None]
"""Number of tokens to keep, and the side to cut."""


@takes_settings("model", "parallel", "cache", "scheduler", "client", without=("model.seed",))
def embed(
    text: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="the text; - reads texts from standard input, one a line")
    ],
    /,
    *,
    server: Annotated[
        str | None,
        Parameter(
            group=ESSENTIALS, help="host:port of routers, separated by commas; unset: load the model in this process"
        ),
    ] = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    dimensions: Annotated[
        int | None,
        Parameter(group=ESSENTIALS, help="dimensions of each vector to keep, for models trained for this (Matryoshka)"),
    ] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        Parameter(group=ESSENTIALS, help="truncate longer texts to their first N tokens; -1: to the model's maximum"),
    ] = None,
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        Parameter(
            group=ESSENTIALS, help="side of longer texts to cut; left: their last tokens are kept [default: right]"
        ),
    ] = None,
    settings: Layer,
) -> int:
    """Print the vector of each text, or its scores by label, as a line of JSON.

    Examples: holdfast embed --model ./my-model "A cat sat on the mat."
    """
    from holdfast.worker.pooling import PoolingParams

    texts = sys.stdin.read().splitlines() if text == "-" else [text]
    params, truncation = PoolingParams(dimensions=dimensions), (truncate_prompt_tokens, truncation_side)
    if server is None:
        _print_all(*_pooled_here(settings, config, texts, params, truncation))
        return 0
    check_for_server(settings, config)
    model = settings.get("model.model")
    name, options = str(model.value) if model else "", clients_options(settings)
    _print_all(*asyncio.run(_pooled_on_server(server, texts, params, truncation, name, options)))
    return 0


def _print_all(results: Iterable[Sequence[float]], labels: Sequence[str]) -> None:
    for values in results:
        numbers = [float(f"{value:.9g}") for value in values]  # a float32, exactly
        print(json.dumps(dict(zip(labels, numbers, strict=True)) if labels else numbers, ensure_ascii=False))


def _pooled_here(
    settings: Layer, config: Path | None, texts: Sequence[str], params: Any, truncation: Truncation
) -> tuple[list[Sequence[float]], Sequence[str]]:
    from holdfast.cluster.config.config import load_config
    from holdfast.router.request import check_inputs, truncating
    from holdfast.router.requests.pooling import PoolingDesk

    check_inputs("texts", texts)
    engine = engine_here(load_config(settings, config).config)
    try:
        bare = engine.bare_request(sampling_params=truncating(*truncation), pooling=params)

        async def work(desk: PoolingDesk) -> tuple[list[Sequence[float]], Sequence[str]]:
            labels = desk.facts("").labels
            return [array("f", one.values) for one in await desk.each(bare, texts)], labels

        return engine.on_router(lambda processor, _: work(PoolingDesk(processor)))
    finally:
        engine.stop()


async def _pooled_on_server(
    addresses: str,
    texts: Sequence[str],
    params: Any,
    truncation: Truncation,
    model: str,
    options: dict[str, Any],
) -> tuple[list[Sequence[float]], Sequence[str]]:
    from holdfast.cluster.client.async_client import AsyncClient

    async with AsyncClient(addresses.split(","), **options) as client:
        num_tokens, side = truncation
        found = await client.pool(texts, params, model=model, truncate_prompt_tokens=num_tokens, truncation_side=side)
    return [one.values for one in found.outputs], found.labels
