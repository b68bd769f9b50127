"""Chromium, driven by selenium; pages to open in it; and the times that the tests print at the end."""

import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

WIDTH, HEIGHT = 1600, 1000
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    f"--window-size={WIDTH},{HEIGHT}",
)
BROWSER, DRIVER = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)
SCREENSHOTS = "AMP_GRAPH_SCREENSHOTS"  # a folder for the pictures of docs/inspecting.md
TAKEN = []


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)


def pytest_terminal_summary(terminalreporter):
    if TAKEN:
        terminalreporter.section("times in the browser")
        for what, seconds in TAKEN:
            terminalreporter.line(f"{what}: {1000 * seconds:.0f} ms")


def program(names, package):
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"{names[0]} is missing: apt-get install {package}")
    return found


@pytest.fixture(scope="session")
def driver():
    selenium = pytest.importorskip("selenium", reason="selenium is missing: pip install selenium")
    assert selenium
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program(BROWSER, "chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(program(DRIVER, "chromium-driver")))
    made.get("about:blank")
    yield made
    made.quit()


@contextmanager
def timed(what):
    start = time.perf_counter()
    yield
    TAKEN.append((what, time.perf_counter() - start))


class Opened:
    """A page in the browser, asked as a user asks it: by what is seen."""

    def __init__(self, driver, path, name):
        self.driver, self.name = driver, name
        driver.get_log("browser")
        with timed(f"{name}: open"):
            driver.get(path.as_uri())
            self.until("return document.documentElement.dataset.ready === 'true'")

    def until(self, script, *arguments, seconds=20):
        end = time.perf_counter() + seconds
        while not (found := self.driver.execute_script(script, *arguments)):
            assert time.perf_counter() < end, f"never true: {script}"
        return found

    def all(self, css):
        return self.driver.find_elements("css selector", css)

    def one(self, css):
        return self.driver.find_element("css selector", css)

    def text(self, css):
        return self.one(css).text

    def search(self, words, count=1):
        """Type words into the search field; return the results once there are some."""
        field = self.one("#search")
        field.clear()
        with timed(f"{self.name}: search for {words!r}"):
            field.send_keys(words)
            self.until("return document.querySelectorAll('#found li[data-index]').length >= arguments[0]", count)
        return self.all("#found li[data-index]")

    def problems(self):
        """Return what the browser complained of: errors of scripts, and what its security policy refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def picture(self, name):
        """Save what is seen, for the docs."""
        folder = os.environ.get(SCREENSHOTS)
        if folder:
            self.driver.save_screenshot(str(Path(folder) / name))


@pytest.fixture
def open_page(driver):
    """Open a page, and see at the end that the browser had nothing to complain of."""
    opened = []

    def go(path, name):
        opened.append(Opened(driver, path, name))
        return opened[-1]

    yield go
    for page in opened:
        assert page.problems() == []
