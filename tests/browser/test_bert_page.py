"""The page of a 12-layer BERT in Chromium: open, search, expand, click, read a reason, sort, before and after."""

import pytest
import torch

import amp_graph
from tests.browser.conftest import timed


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=2000)  # 12 layers of 768
    model = amp_graph.convert(transformers.BertForSequenceClassification(config), "bf16")
    model(input_ids=torch.randint(0, 2000, (4, 64)), labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    made = tmp_path_factory.mktemp("pages") / "bert.html"
    amp_graph.report(model).html(made)
    return made


@pytest.fixture
def page(open_page, path):
    return open_page(path, "BERT, 12 layers")


def test_the_first_screen_has_the_answers_in_order(page):
    tops = [page.one(f"#card-{name}").rect for name in ("share", "casts", "time", "memory")]
    assert [rect["x"] for rect in tops] == sorted(rect["x"] for rect in tops)
    assert all(rect["y"] + rect["height"] < 400 for rect in tops), "on the first screen"
    assert page.text("#card-share .shares dd").startswith("100.0 %")
    assert len(page.all("#after .node")) > 20
    page.picture("report-bert.png")


def test_layers_that_are_alike_are_one_row_that_opens(page):
    (row,) = [row for row in page.all("#tree .module") if row.get_attribute("data-path") == "bert.encoder.layer"]
    row.find_element("css selector", ".twist").click()
    names = [name.text for name in page.all("#tree .name") if "×" in name.text]
    assert len(names) == 1
    assert names[0].startswith("0 … 1")
    before = len(page.all("#tree .module"))
    (folded,) = [row for row in page.all("#tree .module") if row.get_attribute("data-path") == "bert.encoder.layer.0"]
    with timed("BERT, 12 layers: expand a layer"):
        folded.find_element("css selector", ".twist").click()
        page.until("return document.querySelectorAll('#tree .module').length > arguments[0]", before)
    assert {"attention", "intermediate", "output"} <= {name.text for name in page.all("#tree .name")}


def test_a_module_that_is_clicked_is_drawn_before_and_after(page):
    (row,) = [row for row in page.all("#tree .module") if row.get_attribute("data-path") == "bert.pooler"]
    with timed("BERT, 12 layers: click a module"):
        row.click()
        page.until("return document.querySelector('#crumbs button:last-child').textContent === 'pooler'")
    after, before = (
        {node.get_attribute("aria-label") for node in page.all(f"#{side} .node")} for side in ("after", "before")
    )
    assert any("bf16[4,768]" in label and "low" in label for label in after)
    assert any(label.endswith("cast") for label in after)
    assert not any("bf16" in label or label.endswith("cast") for label in before)
    page.one("[data-view=after]").click()
    assert not page.one("#before").is_displayed()
    page.one("[data-view=both]").click()
    assert page.one("#before").is_displayed()


def test_a_search_leads_to_a_reason(page):
    results = page.search("gelu layer.7")
    with timed("BERT, 12 layers: click a result"):
        results[0].click()
        page.until("return document.querySelector('#details h3')?.textContent.startsWith('gelu')")
    details = page.text("#details")
    assert "low precision" in details
    assert "rounds once" in page.text("#details .why")
    assert "bert.encoder.layer.7.intermediate" in details
    assert "transformers/activations.py:" in details
    assert [node.text.startswith("gelu") for node in page.all("#after .selected")] == [True]
    assert [node.text.split("\n")[0] for node in page.all("#before .selected")] == ["gelu"]
    page.picture("report-reason.png")


def test_a_box_tells_at_the_mouse_and_on_a_click(page):
    from selenium.webdriver import ActionChains

    page.search("scaled_dot_product_attention layer.2")[0].click()
    box = page.one("#after .selected")
    ActionChains(page.driver).move_to_element(box).perform()
    tip = page.until("const tip = document.getElementById('tip'); return !tip.hidden && tip.textContent")
    assert "attention" in tip
    assert "softmax" in tip
    assert "modeling_bert.py" in tip or "sdpa_attention.py" in tip
    other = next(node for node in page.all("#after .node.low") if "transpose" in node.text)
    with timed("BERT, 12 layers: click a box"):
        other.click()
        page.until("return document.querySelector('#details h3').textContent.startsWith('.transpose')")
    assert page.text("#details .why")


def test_the_table_sorts_and_filters(page):
    heads = page.all("#table .head button")
    column = next(i for i, head in enumerate(heads) if head.text == "FLOPs")
    page.driver.execute_script("arguments[0].scrollIntoView()", heads[column])
    with timed("BERT, 12 layers: sort the table"):
        heads[column].click()
        page.until("return page.table.sorted === arguments[0]", column)
    flops = page.driver.execute_script("return page.table.rows.map((node) => node.flops)")
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > 0
    first = page.driver.execute_script("return page.table.rows[0].index")
    shown = min(page.all("#table .row"), key=lambda row: row.rect["y"])
    assert shown.get_attribute("data-index") == str(first)
    page.one("#table-filter").send_keys("layer_norm")
    page.until(
        "return page.table.rows.every((node) => node.ops.includes('layer_norm')) && page.table.rows.length === 25"
    )
    assert page.text("#table-count").startswith("25 of ")
    assert len(page.all("#table .row")) <= 60


def test_reasons_group_and_lead_to_the_table(page):
    (row,) = [row for row in page.all(".reason") if "a matrix product" in row.text and "×74" in row.text]
    row.find_element("css selector", "summary").click()
    page.until("return document.querySelector('.reason[open] .prices button')")
    assert len(row.find_elements("css selector", ".prices button")) == 75
    row.find_elements("css selector", ".prices button")[-1].click()
    assert page.text("#table-count").startswith("74 of ")


def test_weights_are_drawn_on_request(page):
    page.search("layer.0 intermediate.dense linear")[0].click()
    without = len(page.all("#after .node"))
    page.one("#show-weights").click()
    assert len(page.all("#after .node")) > without
    assert any("f32[3072,768]" in node.get_attribute("aria-label") for node in page.all("#after .node"))


def test_the_drawing_zooms_and_fits(page):
    scale = "return page.panels.after.pan.getScale()"
    before = page.driver.execute_script(scale)
    page.one("#zoom-in").click()
    assert page.driver.execute_script(scale) > before
    page.one("#fit").click()
    height = "document.querySelector('{}').getBoundingClientRect().height"  # drawn a frame later
    page.until(f"return {height.format('#after svg > g')} <= {height.format('#after')} + 2")


def test_dark_and_light_are_both_readable(page):
    def colours():
        return [page.one("body").value_of_css_property(name) for name in ("background-color", "color")]

    light = colours()
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    try:
        assert colours() != light
        page.picture("report-dark.png")
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert colours() == light
