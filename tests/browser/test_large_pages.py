"""Pages of about 5,000 nodes in Chromium: of many modules, and of one module that has them all."""

import pytest
import torch
from torch import nn

import amp_graph
from tests.browser.conftest import timed
from tests.layers import layers
from tests.report.pages import copies_of

WIDTH = 64


@layers(lambda: dict(norm=nn.LayerNorm(WIDTH), up=nn.Linear(WIDTH, 128), down=nn.Linear(128, WIDTH)))
def Block(self, x):
    return x + self.down(nn.functional.gelu(self.up(self.norm(x)))).tanh() * 0.5


@layers(lambda blocks: dict(blocks=nn.ModuleList(Block() for _ in range(blocks)), gate=nn.Linear(WIDTH, WIDTH)))
def Stage(self, x):
    for block in self.blocks:
        x = block(x)
    return x * self.gate(x).sigmoid()


def report_of(stages, blocks):
    torch.manual_seed(0)
    model = amp_graph.convert(nn.Sequential(*(Stage(blocks) for _ in range(stages)), nn.Linear(WIDTH, 10)), "bf16")
    model(torch.randn(32, WIDTH)).sum().backward()
    return amp_graph.report(model)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    told = report_of(25, 14)
    assert len(told.graphs[0].nodes) > 5000
    made = tmp_path_factory.mktemp("pages") / "large.html"
    told.html(made)
    return made


def test_5000_nodes_open_search_and_click(open_page, path):
    page = open_page(path, "5,000 nodes")
    assert len(page.all("#after .node")) < 200, "only the chosen part is drawn"
    assert len(page.all("#tree .module")) < 100
    results = page.search("gelu 17.blocks.9")
    with timed("5,000 nodes: click a result"):
        results[0].click()
        page.until("return document.querySelector('#details h3')?.textContent.startsWith('gelu')")
    assert "17.blocks.9" in page.text("#details")
    assert page.all("#after .selected")
    with timed("5,000 nodes: sort the table"):
        page.driver.execute_script("page.table.sort(2)")
    with timed("5,000 nodes: click a module"):
        page.driver.execute_script("page.choose('3')")
    assert page.text("#crumbs").endswith("3")
    with timed("5,000 nodes: the whole graph"):
        page.driver.execute_script("page.choose('')")


def test_5000_operations_in_one_module_are_drawn_in_windows(open_page, tmp_path):
    told = report_of(1, 4)
    times = -(-5000 // len(told.graphs[0].nodes))
    flat = copies_of(told, times, module="")
    flat.html(tmp_path / "flat.html")
    page = open_page(tmp_path / "flat.html", "5,000 nodes, one module")
    assert page.text("#window").startswith("1–120 of ")
    assert len(page.all("#after .node")) < 300
    page.one("#later").click()
    assert page.text("#window").startswith("121–240 of ")
    results = page.search(f"gelu.{times - 1}")
    with timed("5,000 nodes, one module: click a result"):
        results[0].click()
        page.until("return document.querySelector('#details h3')?.textContent.startsWith('gelu')")
    assert page.all("#after .selected"), "the window follows"
