"""Screenshots of the page for the docs: a chat whose replica is killed while it answers, wide and light, on a phone and
dark.

    python -m scripts.page_screenshots [--folder docs/images]

Two replicas of the bundled model and a router, in this process and without Ray; Chromium without a window. What may not
live here: checks of the page (`tests/router/api/http/test_page_in_a_browser.py`).
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.worker.config import ParallelConfig, WorkerConfig
from holdfast.worker.replica.link import LinkServer
from holdfast.worker.replica.replica import Replica
from scripts.browser import chromium

QUESTION = "Tell me a story."
NUM_TOKENS = 400
NUM_BEFORE = 20
"""Tokens that the first replica gets to make."""
PATIENCE_S = 120.0
WIDE, PHONE = (1360, 860), (420, 860)


async def served() -> tuple[Router, list[tuple[Replica, LinkServer]]]:
    config = located(WorkerConfig(parallel=ParallelConfig(num_threads=1)))
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
    router = await Router.start(RouterConfig(), LimitsConfig(), StaticDirectory(endpoints), http_port=0)
    return router, members


async def until(condition: Callable[[], Any]) -> None:
    """Of the browser, which blocks."""
    until_s = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > until_s:
            raise SystemExit("the page did not come so far in time")
        await asyncio.sleep(0.1)


async def taken(folder: Path) -> None:
    router, members = await served()
    url = f"http://{router.http_address}/"
    try:
        with chromium(*WIDE) as browser:
            await asyncio.to_thread(browser.get, url)
            await until(lambda: browser.execute_script("return document.querySelectorAll('#replicas tr').length == 2"))
            losing = asyncio.create_task(lose_busy(members))
            await asyncio.to_thread(ask, browser)
            await losing
            await until(lambda: browser.execute_script("return document.querySelector('.mark') !== null"))
            await until(lambda: browser.execute_script("return document.querySelector('.event.lost') !== null"))
            await until(lambda: browser.execute_script("return document.querySelector('[data-over]') !== null"))
            await asyncio.to_thread(browser.save_screenshot, str(folder / "page.png"))
        with chromium(*PHONE, is_dark=True) as browser:
            await asyncio.to_thread(browser.get, url)
            await until(lambda: browser.execute_script("return document.querySelectorAll('#model option').length > 0"))
            await asyncio.to_thread(browser.execute_script, "document.getElementById('logprobs').checked = true")
            await asyncio.to_thread(ask, browser, 60)
            await until(lambda: browser.execute_script("return document.querySelector('[data-over]') !== null"))
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
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(taken(folder))
    print(f"{folder}/page.png and page-phone.png written")


if __name__ == "__main__":
    main()
