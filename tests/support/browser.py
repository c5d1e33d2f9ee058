"""Headless Chromium with Debian's driver: what a person sees of the chat page, and what the page requests."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "no chromium here: apt-get install chromium chromium-driver"


@contextmanager
def browser(folder: Path, width: int = 1000, height: int = 760) -> Iterator[Any]:
    """A browser with its files in `folder`, which ends with the block, and a log of its network requests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",  # the page is ours, and containers have no namespaces for it
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    folder.mkdir()  # also its home: whoever runs the tests may have a browser of their own
    homes = {name: str(folder) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    driver = webdriver.Chrome(options, Service(DRIVER, env={**os.environ, **homes}))
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(folder, ignore_errors=True)


def asked_for(driver: Any, page: str) -> list[str]:
    """The URLs that the page at this URL has requested since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = (each["params"] for each in events if each["method"] == "Network.requestWillBeSent")
    return [str(each["request"]["url"]) for each in sent if each["documentURL"] == page]
