"""The documentation site is searched from a folder: no server, no network."""

import os
import subprocess
import sys
import time

import pytest

from tests.doc_blocks import ROOT


@pytest.mark.needs("mkdocs", "material", "mkdocstrings")
@pytest.mark.parametrize("page", ["quick-start.html", "internals/passes.html"])
def test_a_word_of_another_page_is_found(page, driver, site):
    driver.get((site / page).as_uri())
    field = driver.find_element("css selector", "input.md-search__input")
    field.click()
    field.send_keys("hysteresis")
    end = time.monotonic() + 30
    while not (found := driver.find_elements("css selector", ".md-search-result__link")):
        assert time.monotonic() < end
    links = [link.get_attribute("href") for link in found]
    assert any("training.html" in link for link in links)
    assert not [entry for entry in driver.get_log("browser") if "http" in entry["message"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=200)
    return folder
