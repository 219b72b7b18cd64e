"""What the integration tests do with models that come and go, and with deployments of other people."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import UnknownModelError
from holdfast.worker.sampling_params import SamplingParams

LIMIT_S = 150
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "The capital of France is"


def models(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`holdfast models`, for the cluster that this process runs."""
    command = [sys.executable, "-m", "holdfast.cluster.commands.cli", "models", *arguments, "--pid", str(os.getpid())]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def models_at(server: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`holdfast models`, as from another machine: a router makes the change. It finds no cluster by any other way."""
    command = [sys.executable, "-m", "holdfast.cluster.commands.cli", "models", *arguments, "--server", server]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "XDG_", "HOME"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ)


async def served_models(routers: Sequence[str]) -> list[dict[str, int]]:
    """The models that each router knows, with their replicas."""
    found = []
    for address in routers:
        async with AsyncClient(address) as client:
            listed = (await client.list_models()).models
            found.append({model.name: model.num_replicas for model in listed})
    return found


async def answer_of(router: str, model: str, params: SamplingParams) -> str:
    async with AsyncClient(router) as client:
        return (await client.generate(PROMPT, params, model=model)).completions[0].text


async def chat_answer_of(router: str, model: str, content: str, params: SamplingParams) -> str:
    async with AsyncClient(router) as client:
        messages = [{"role": "user", "content": content}]
        return (await client.generate(None, params, messages=messages, model=model)).completions[0].text


async def streams_through_a_removal(router: str, model: str) -> tuple[str, "subprocess.CompletedProcess[str]", str]:
    """The text of a stream under which the model is taken away, what the command said, and what a later request met."""
    async with AsyncClient(router) as client:
        text, removal = "", None
        async for chunk in client.stream(PROMPT, LONG, model=model):
            removal = removal or asyncio.create_task(asyncio.to_thread(models, "remove", model))
            text += chunk.text
        said = await removal
        try:
            await client.generate(PROMPT, SHORT, model=model)
        except UnknownModelError as error:
            return text, said, str(error)
    return text, said, ""


def deploy_a_caller() -> None:
    """A deployment of someone else on the same Ray, which asks ours by handle."""
    from ray import serve

    @serve.deployment(name="Caller", ray_actor_options={"num_cpus": 0})
    class Caller:
        def __init__(self) -> None:
            self.model = serve.get_app_handle("holdfast")

        async def whole(self, prompt: str, params: dict) -> str:
            answer = await self.model.generate.remote(prompt, params)
            return answer.completions[0].text

        async def streamed(self, prompt: str, params: dict) -> list[str]:
            chunks = self.model.options(stream=True).generate_stream.remote(prompt, params)
            return [chunk.text async for chunk in chunks]

        async def refused(self, prompt: str, params: dict) -> str:
            from holdfast.worker.errors import InvalidRequestError

            try:
                await self.model.generate.remote(prompt, params)
            except InvalidRequestError as error:
                return str(error)
            return ""

        async def left(self, prompt: str, params: dict) -> int:
            """The tokens that came before it went away."""
            chunks = self.model.options(stream=True).generate_stream.remote(prompt, params)
            async for chunk in chunks:
                chunks.cancel()
                return len(chunk.token_ids)
            return 0

    serve.run(Caller.bind(), name="someone", route_prefix=None)
