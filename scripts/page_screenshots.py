"""Screenshots of the page for the docs: a chat whose replica is killed while it answers, wide and light, on a phone and
dark.

    python -m scripts.page_screenshots [--model smollm2] [--folder docs/images]

Two replicas and a router, in this process and without Ray; Chromium without a window. `smollm2` is a model from the
package index (docs/quantization.md says how to install it); `demo` is the bundled one.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.tokenizers import load_tokenizer
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.worker.config import ModelConfig, ParallelConfig, WorkerConfig
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.replica import Replica
from scripts.browser import chromium

QUESTION = "Why is the sky blue? Explain it to a child."
NUM_TOKENS = 400
NUM_BEFORE = 20
"""Tokens that the first replica gets to make."""
PATIENCE_S = 120.0
WIDE, PHONE = (1360, 860), (420, 860)


async def served(model: str) -> tuple[Router, list[tuple[Replica, LinkServer]]]:
    config = located(WorkerConfig(model=ModelConfig(model=model), parallel=ParallelConfig(num_threads=1)))
    members, endpoints = [], []
    for name in ("fir", "oak"):
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
        await router.stop()
        for replica, link in members:
            await link.stop()
            await asyncio.to_thread(replica.stop)


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
    asyncio.run(taken(options.model, folder))
    print(f"{folder}/page.png and page-phone.png written")


if __name__ == "__main__":
    main()
