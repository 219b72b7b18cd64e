"""The page in headless Chromium: a chat streams, its replica is killed, and the text continues without a change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.server.router import Router
from holdfast.v1 import engine_pb2
from scripts.browser import BrowserMissing, chromium
from tests.fakes import FakeReplica
from tests.router.api.http.test_openai_sdk import with_template
from tests.router.site import Site, site

pytestmark = [pytest.mark.timeout(300)]
PATIENCE_S = 90


class Page:
    """What a reader of the page sees and does. Selenium blocks, so each step runs on a thread beside the router."""

    def __init__(self, browser, place: Site) -> None:
        self.browser, self.place = browser, place

    async def do(self, step):
        return await asyncio.to_thread(step)

    async def until(self, condition):
        wait = WebDriverWait(self.browser, PATIENCE_S, poll_frequency=0.1)
        return await self.do(lambda: wait.until(lambda _: condition()))

    def find(self, selector: str):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    async def open(self) -> None:
        await self.do(lambda: self.browser.get(f"http://{self.place.router.http_address}/"))
        await self.until(lambda: self.find("#model option"))

    async def run(self, script: str):
        return await self.do(lambda: self.browser.execute_script(script))

    def leave(self) -> None:
        """As a new browser, for the next test."""
        self.browser.get("about:blank")
        self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.browser.get_log("browser")

    async def resize(self, width: int) -> None:
        size = {"width": width, "height": 860, "deviceScaleFactor": 1, "mobile": False}
        await self.do(lambda: self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size))

    async def set(self, **fields: object) -> None:
        def fill() -> None:
            self.browser.execute_script("document.getElementById('sampling').open = true")
            for name, value in fields.items():
                field = self.browser.find_element(By.ID, name)
                field.clear()
                field.send_keys(str(value))

        await self.do(fill)

    async def send(self, text: str) -> None:
        await self.do(lambda: self.browser.find_element(By.ID, "prompt").send_keys(text, Keys.ENTER))

    async def chat_again(self) -> str:
        """Has a chat whose whole text is returned, and the same again, slower, which is left under way."""
        await self.set(max_tokens=150, seed=7)
        await self.send("Hello")
        assert await self.ended() == "true"
        for replica in self.place.replicas:
            replica.step_s = 0.02
        assert len(self.parts) == 1
        whole = self.text
        await self.do(lambda: self.browser.find_element(By.ID, "again").click())
        await self.until(lambda: not self.find(".assistant[data-over]") and len(self.text) > 5)
        return whole

    def button_of(self, replica: FakeReplica, selector: str):
        """A button in the replica's row."""
        (row,) = [row for row in self.find("#replicas tr") if replica.replica_id in row_name(row)]
        return row.find_element(By.CSS_SELECTOR, selector)

    @property
    def text(self) -> str:
        """Of the last answer, by all replicas together."""
        return "".join(self.browser.execute_script(TEXTS))

    @property
    def parts(self) -> list[str]:
        return self.browser.execute_script(REPLICAS)

    async def ended(self) -> str:
        await self.until(lambda: self.find(".assistant:last-of-type[data-over]"))
        return (await self.do(lambda: self.find(".assistant")[-1])).get_attribute("data-over")

    def complaints(self) -> list[str]:
        """Of the console: what the content security policy refuses is said there."""
        lines = [line["message"] for line in self.browser.get_log("browser")]
        return [line for line in lines if "security policy" in line.lower()]


def row_name(row) -> str:
    return row.find_element(By.TAG_NAME, "th").get_attribute("title")


LAST = "const last = [...document.querySelectorAll('.assistant')].at(-1);"
TEXTS = f"{LAST} return [...last.querySelectorAll('.part')].map((part) => part.textContent);"
REPLICAS = f"{LAST} return [...last.querySelectorAll('.part')].map((part) => part.dataset.replica);"


@pytest.fixture(scope="module")
def browser():
    try:
        with chromium() as driver:
            yield driver
    except BrowserMissing as missing:
        pytest.skip(str(missing))


@asynccontextmanager
async def opened(browser, *replicas: FakeReplica, **options: object) -> AsyncIterator[Page]:
    async with site(*replicas, http=True, load_tokenizer=with_template, **options) as place:
        page = Page(browser, place)
        try:
            await page.open()
            yield page
        finally:
            await page.do(page.leave)


async def two_replicas() -> list[FakeReplica]:
    return [await FakeReplica.start(f"model#Replica#{name}", step_s=0.002) for name in ("one", "two")]


def test_a_chat_streams_and_goes_on_with_the_same_text_when_its_replica_is_killed(browser):
    async def run() -> None:
        replicas = await two_replicas()
        async with opened(browser, *replicas) as page:
            undisturbed = await page.chat_again()
            assert len(undisturbed) == 150
            busy = next(replica for replica in replicas if not replica.is_idle)
            await busy.kill()
            page.place.replicas.remove(busy)
            assert await page.ended() == "true"
            assert page.text == undisturbed
            other = next(replica for replica in replicas if replica is not busy)
            assert page.parts == [busy.replica_id, other.replica_id]
            (mark,) = page.find(".mark")
            assert mark.text.endswith(f"continued on {other.replica_id.split('#')[-1]}")
            await page.until(lambda: page.find(".event.lost"))
            assert "tokens/s" in page.find(".figures")[-1].text
            assert not page.complaints()

    asyncio.run(run())


WIDTHS = (390, 800, 1200, 1440, 2560, 3200)
"""In CSS pixels. The last one has room for the table of replicas; the others show cards."""

OUTSIDE = """
const cells = [...document.querySelectorAll("#replicas :is(th, td, button)")].filter((one) => one.checkVisibility());
const within = document.querySelector(".scrolls").getBoundingClientRect();
const outside = cells.filter((one) => {
  const box = one.getBoundingClientRect();
  return box.left < within.left - 1 || box.right > within.right + 1 || one.scrollWidth > one.clientWidth + 1;
});
const isWide = document.documentElement.scrollWidth > window.innerWidth;
return [...outside.map((one) => one.dataset.column ?? one.textContent), ...(isWide ? ["the page"] : [])];
"""
SCROLLERS = """
return [...document.querySelectorAll("html, body, main")].filter((one) => one.scrollHeight > one.clientHeight + 1
  && (one.tagName === "HTML" || getComputedStyle(one).overflowY !== "visible")).map((one) => one.tagName);
"""
LONG_STEPS = """
for (const one of document.querySelectorAll("#replicas .step")) one.textContent = "1234.5 ms (100.1 + 1034.2 + 100.2)";
"""


def test_nothing_of_the_replicas_is_cut_at_any_width_and_an_empty_chat_offers_something_to_try(browser):
    async def run() -> None:
        async with opened(browser, *await two_replicas(), config=RouterConfig(killable=True)) as page:
            await page.until(lambda: len(page.find("#replicas .kill")) == 2)
            assert page.find("#weights")[0].text == "fake: quantization GGUF Q4_1, 3.0 MiB of weights a replica"
            for width in WIDTHS:
                await page.resize(width)
                assert await page.run(LONG_STEPS + OUTSIDE) == [], width
                assert len(await page.run(SCROLLERS)) <= 1, width
            await page.set(max_tokens=5)
            await page.do(lambda: page.find("#prompt")[0].send_keys("a draft"))
            example = page.find("#empty .example")[0]
            text = example.text
            await page.do(example.click)
            assert await page.ended() == "true"
            assert page.find(".message.user")[0].text == text
            assert page.find("#prompt")[0].get_attribute("value") == "a draft"
            assert not page.find("#empty")[0].is_displayed()
            await page.do(page.find("#clear")[0].click)
            assert page.find("#empty")[0].is_displayed()
            assert not page.find(".message")
            assert not page.complaints()

    asyncio.run(run())


@pytest.mark.slow
def test_transfers_are_drawn_from_replica_to_replica(browser):
    async def run() -> None:
        replicas = await two_replicas()
        async with opened(browser, *replicas) as page:
            await page.until(lambda: page.find("#transfers .quiet"))
            told = {replicas[0].endpoint.address: 1280, "10.0.0.9:7": 320}
            replicas[1].say(engine_pb2.StepUpdate(stats=engine_pb2.EngineStats(received_tokens_from=told)))
            await page.until(lambda: len(page.find("#transfers .transfer")) == 2)
            largest, other = page.find("#transfers .transfer")
            assert largest.text.startswith("one → two: 1,280 tokens")
            assert largest.get_attribute("title") == "from model#Replica#one to model#Replica#two"
            assert other.get_attribute("style") == "--share: 0.25;"
            assert not page.complaints()

    asyncio.run(run())


@pytest.mark.slow
def test_a_chat_goes_on_when_the_router_that_has_served_the_page_is_replaced(browser):
    async def run() -> None:
        replicas = await two_replicas()
        async with opened(browser, *replicas) as page:
            undisturbed = await page.chat_again()
            old = page.place.router
            port = int(old.http_address.rpartition(":")[2])
            await old.stop(hands_over=False)
            await page.until(lambda: page.find(".assistant.lost"))
            new = await Router.start(
                RouterConfig(), LimitsConfig(), page.place.directory, load_tokenizer=with_template, http_port=port
            )
            try:
                assert await page.ended() == "true"
                assert page.text == undisturbed
            finally:
                await page.do(lambda: page.browser.get("about:blank"))
                await new.stop()

    asyncio.run(run())


@pytest.mark.slow
def test_a_chat_can_be_stopped_by_a_key_and_probabilities_are_shown(browser):
    async def run() -> None:
        replica = await FakeReplica.start("model#Replica#one", step_s=0.02)
        async with opened(browser, replica) as page:
            await page.set(max_tokens=5000)
            await page.send("Hello")
            await page.until(lambda: len(page.find(".assistant .part")) and len(page.text) > 5)
            await page.do(lambda: page.browser.find_element(By.ID, "prompt").send_keys(Keys.ESCAPE))
            assert await page.ended() == "stopped"
            await page.place.until_idle()
            await page.set(schema="{not json")
            await page.send("Hello")
            await page.until(lambda: "JSON schema cannot be read" in page.find("#status")[0].text)
            await page.do(lambda: page.browser.find_element(By.ID, "clear").click())
            assert not page.find(".message")

    asyncio.run(run())


@pytest.mark.slow
def test_an_operator_drains_a_replica_under_a_chat_and_puts_it_back(browser):
    async def run() -> None:
        replicas = await two_replicas()
        async with opened(browser, *replicas) as page:
            undisturbed = await page.chat_again()
            busy = next(replica for replica in replicas if not replica.is_idle)
            await page.do(lambda: page.button_of(busy, "button").click())
            await page.until(lambda: "gets no new requests" in page.find("#order")[0].text)
            await page.until(lambda: page.button_of(busy, "button").text == "Undrain")
            assert await page.ended() == "true"
            assert page.text == undisturbed
            assert len(page.parts) == 2
            assert page.place.router.operator_state.drained == {busy.replica_id}
            await page.do(lambda: page.button_of(busy, "button").send_keys(Keys.ENTER))
            await page.until(lambda: page.button_of(busy, "button").text == "Drain")
            assert page.place.router.operator_state.drained == set()
            assert not page.complaints()

    asyncio.run(run())


@pytest.mark.slow
def test_an_operator_kills_a_replica_under_a_chat_where_that_may_be(browser):
    async def run() -> None:
        replicas = await two_replicas()
        async with opened(browser, *replicas, config=RouterConfig(killable=True)) as page:
            undisturbed = await page.chat_again()
            busy = next(replica for replica in replicas if not replica.is_idle)
            await page.do(lambda: page.button_of(busy, ".kill").click())
            await page.until(lambda: "is killed" in page.find("#order")[0].text)
            await page.until(lambda: page.find(".event.lost"))
            assert await page.ended() == "true"
            assert page.text == undisturbed
            assert len(page.parts) == 2
            await busy.killing
            page.place.replicas.remove(busy)
            assert not page.complaints()

    asyncio.run(run())


@pytest.mark.slow
def test_no_replica_can_be_killed_elsewhere(browser):
    async def run() -> None:
        async with opened(browser, *await two_replicas()) as page:
            await page.until(lambda: len(page.find("#replicas button.kill")) == 2)
            await page.until(lambda: all(one.text for one in page.find("#replicas button:not(.kill)")))
            assert not any(one.is_displayed() for one in page.find("#replicas button.kill"))

    asyncio.run(run())
