"""Headless Chromium, for tests of the page and for its screenshots. What is missing is said by name."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class BrowserMissing(Exception):
    """What to install."""


@contextmanager
def chromium(width: int = 1280, height: int = 800, *, is_dark: bool = False) -> Iterator[Any]:
    """A selenium driver with a profile of its own. Raises `BrowserMissing`."""
    try:
        from selenium import webdriver
    except ImportError:
        raise BrowserMissing("selenium is missing; `pip install selenium`") from None
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        raise BrowserMissing("Chromium is missing; `apt-get install chromium chromium-driver`")
    with tempfile.TemporaryDirectory(prefix="holdfast-browser-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        dark = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if is_dark else ()
        for flag in (*FLAGS, *dark, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=driver)
        browser = webdriver.Chrome(options=options, service=service)
        try:
            yield browser
        finally:
            browser.quit()
