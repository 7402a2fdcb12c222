"""Chromium opens the built site: what it finds wrong with a page, and with the search."""

import contextlib
import functools
import http.server
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PAGES = (
    "",
    "overview/",
    "algorithms/",
    "algorithms/grpo/",
    "algorithms/ppo/",
    "algorithms/rloo/",
    "variants/",
    "metrics/",
    "errors/",
    "api/trainer/",
    "baselines/",
    "code/common/run/sampling/",
)
WINDOWS = ((390, "dark"), (1280, "light"))  # pixels, colours
# What is typed into the search, and where one of the first three results must lead.
QUERIES = {
    "zero_std_frac": "metrics/#group-zero_std_frac",
    "no-signal": "errors/#no-signal",
    "generalized advantage estimation": "algorithms/ppo/",
}
SECONDS = 60  # to wait for a page, a curve or a search; a busy machine is slow
# The search is a dialog in a shadow tree, which has no selector of its own.
DIALOG = "const host = [...document.querySelectorAll('*')].find((e) => e.shadowRoot?.querySelector('dialog[open]'));"
SEARCH_IS_OPEN = f"{DIALOG} return Boolean(host);"
RESULTS = f"{DIALOG} return [...host.shadowRoot.querySelectorAll('a[href]')].map((link) => link.href);"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """One line per request would bury the result."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which this process serves the folder."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def executable() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


@contextlib.contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = executable()
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        driver.set_page_load_timeout(SECONDS)
        yield driver
        driver.quit()


def resize(driver: webdriver.Chrome, width: int, scheme: str) -> None:
    """A window of that width. Chromium itself opens none narrower than 500 pixels."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def page_problems(driver: webdriver.Chrome, width: int) -> list[str]:
    """What is wrong with the page that is open."""
    found = [f"console: {line['message']}" for line in driver.get_log("browser") if line["level"] == "SEVERE"]
    content = driver.execute_script("return document.documentElement.scrollWidth")
    if content > width:
        found.append(f"{content} pixels wide in a window of {width}")
    for equation in driver.find_elements(By.CSS_SELECTOR, ".equation math"):
        if equation.size["height"] < 20 or equation.size["width"] < 50:
            found.append(f"an equation has the size {equation.size}")
    for figure in driver.find_elements(By.CSS_SELECTOR, "figure.curve"):
        driver.execute_script("arguments[0].scrollIntoView()", figure)
        WebDriverWait(driver, SECONDS).until(lambda _, figure=figure: "drawn" in figure.get_attribute("class"))
        if not figure.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace path"):
            found.append("a curve has no line")
    return found


def without_query(link: str) -> str:
    """A result says in its address what to highlight: .../metrics/?h=entropy#train-entropy"""
    return urlsplit(link)._replace(query="").geturl()


def save_picture(driver: webdriver.Chrome, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    driver.execute_script("window.scrollTo(0, 0)")
    driver.save_screenshot(str(path))


def search_problems(driver: webdriver.Chrome, address: str) -> list[str]:
    """Queries whose results do not lead to their page."""
    found = []
    for query, target in QUERIES.items():
        driver.get(address)
        driver.find_element(By.CSS_SELECTOR, ".md-search__button").click()
        WebDriverWait(driver, SECONDS).until(lambda driver: driver.execute_script(SEARCH_IS_OPEN))
        driver.switch_to.active_element.send_keys(query)
        try:
            WebDriverWait(driver, SECONDS).until(lambda driver: driver.execute_script(RESULTS))
        except TimeoutException:
            found.append(f"search for {query}: no result")
            continue
        links = [without_query(link) for link in driver.execute_script(RESULTS)[:3]]
        if not any(target in link for link in links):
            found.append(f"search for {query}: {target} is not among the first results, {links}")
    return found
