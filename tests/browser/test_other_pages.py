"""Pages of graphs with others inside, of several graphs, opened at a node, and in the frame of a notebook."""

import pytest
import torch
from torch import nn

import amp_graph
from tests.layers import layers
from tests.report.test_captured_flow import Branches, Checkpointed
from tests.report.test_report import Broken

# Chooses every module and every node, before and after, in each graph, with and without weights.
EVERYTHING = """
let boxes = 0;
for (let i = 0; i < page.report.graphs.length; i++) {
  page.open(i);
  for (const weights of [false, true]) {
    document.getElementById("show-weights").checked = weights;
    for (const side of [page.graph.after, page.graph.before]) {
      for (const node of side.nodes) if (!node.handsOn) page.go(node);
    }
    const visit = (module) => { page.choose(module.path); module.children.forEach(visit); };
    visit(page.graph.after.tree);
    boxes += document.querySelectorAll(".node").length;
  }
}
return boxes;
"""


NAMES = ("</script><img src=x onerror=alert(1)>", "constructor", "__proto__")


@layers(lambda: {name: nn.Linear(8, 8) for name in NAMES})
def Odd(self, x):
    for part in self.children():
        x = part(x)
    return x


def report_of(model):
    torch.manual_seed(0)
    amp_graph.convert(model, "bf16")(torch.randn(4, 8))
    return amp_graph.report(model)


@pytest.mark.parametrize("model", [Checkpointed, Branches, Broken, Odd])
def test_every_part_of_every_graph_is_drawn(open_page, tmp_path, model):
    told = report_of(model())
    told.html(tmp_path / "report.html")
    page = open_page(tmp_path / "report.html", model.__name__)
    assert page.driver.execute_script(EVERYTHING) > 0
    assert page.one("#graph-choice").is_displayed() == (len(told.graphs) > 1)
    assert not page.all("img")


def test_a_notebook_shows_it_in_a_frame(driver, tmp_path):
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><body>{report_of(Checkpointed())._repr_html_()}", encoding="utf-8"
    )
    driver.get((tmp_path / "notebook.html").as_uri())
    driver.switch_to.frame(driver.find_element("css selector", "iframe"))
    try:
        assert driver.find_element("css selector", "html").get_attribute("data-ready") == "true"
        assert driver.find_elements("css selector", "#after .node")
    finally:
        driver.switch_to.default_content()
    assert driver.get_log("browser") == []


def test_the_page_of_an_audit_leads_from_a_finding_to_its_code(tmp_path, open_page):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp_graph.audit(model) as audit:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.randn(4, 8)
            model(x).sum().backward()
            optimizer.step()
    audit.report().html(tmp_path / "audit.html")
    page = open_page(tmp_path / "audit.html", "audit")
    assert page.text("h1").startswith("amp_graph audit: 1 warning")
    page.one("a[href='#AMP101']").click()
    assert page.until("return location.hash") == "#AMP101"
    assert "fp32" in page.text(".precisions")
