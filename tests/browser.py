"""Debian's chromium without a window, which tells all that a page asked for and complained of."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1100,900"),
)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="there is no chromium here; on Debian, 'make browser' installs it"
)


class Browser:
    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.binary_location = str(CHROMIUM)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))

    def open(self, address: str) -> None:
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(address)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)  # type: ignore[no-untyped-call]

    def wait(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Return what the condition is once it is anything; it must be within so many seconds."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end
            time.sleep(0.05)
        return found

    def emulate(self, what: str, **settings: object) -> Any:
        return self.driver.execute_cdp_cmd(what, settings)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked_for(self) -> set[str]:
        """Return the addresses that were asked for since the last page was opened; not those of the browser's own."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = (event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent")
        return {address for address in sent if not address.startswith(("data:", "chrome:"))}
