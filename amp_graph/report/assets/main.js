// Puts the page together: what is chosen in one of tree, drawing, search, reasons and table is shown in all of them.

const FEW = 8; // operations: so small a module is shown within the one around it

class Page {
  constructor(report) {
    this.report = report;
    this.path = "";
    this.chosen = null;
    const on = {
      node: (node, isOutside) => (isOutside ? this.go(node) : this.select(node)),
      module: (path) => this.choose(path),
      hover: (node, event) => showTip(byId("tip"), node, event),
      leave: () => { byId("tip").hidden = true; },
    };
    this.panels = { before: new Panel(byId("before"), "before", on), after: new Panel(byId("after"), "after", on) };
    this.tree = new ModuleTree(byId("tree"), (path) => this.choose(path));
    this.search = new SearchField(byId("search"), byId("found"), () => this.graph.after.nodes, (node) => this.go(node));
    const controls = { filterField: byId("table-filter"), kindField: byId("table-kind"), count: byId("table-count") };
    this.table = new OperationTable(byId("table"), controls, (node) => this.go(node, true));
    this.listen();
    this.view(innerWidth > 1300 ? "both" : "after", false);
    byId("graph-choice").value = 0;
    this.open(0);
    setTimeout(() => this.each((panel) => this.fit(panel))); // Panzoom moves to its own start a moment after it is made
  }

  fit(panel) {
    const item = this.chosen && panel.model.of.get(this.chosen.side === panel.name ? this.chosen : this.otherSide(this.chosen));
    if (item) panel.centre(item);
    else panel.fit();
  }

  listen() {
    for (const button of document.querySelectorAll("[data-view]")) button.onclick = () => this.view(button.dataset.view);
    byId("graph-choice").onchange = (event) => this.open(Number(event.target.value));
    byId("show-weights").onchange = () => this.drawAll();
    byId("zoom-in").onclick = () => this.each((panel) => panel.pan.zoomIn());
    byId("zoom-out").onclick = () => this.each((panel) => panel.pan.zoomOut());
    byId("fit").onclick = () => this.each((panel) => panel.fit(true));
    byId("earlier").onclick = () => this.turn(-WINDOW);
    byId("later").onclick = () => this.turn(WINDOW);
  }

  each(what) {
    for (const panel of Object.values(this.panels)) if (!panel.figure.hidden) what(panel);
  }

  open(index) {
    this.graph = this.report.graphs[index];
    this.table.show(this.graph.after.nodes);
    byId("reason-rows").replaceChildren(...reasonRows(this.graph.after.nodes, (node) => this.go(node, true), (group) => {
      this.table.filter(group.words, group.look);
      byId("operations").scrollIntoView();
    }));
    this.choose("");
  }

  view(name, redraw = true) {
    this.panels.before.figure.hidden = name === "after";
    this.panels.after.figure.hidden = name === "before";
    for (const button of document.querySelectorAll("[data-view]")) {
      button.setAttribute("aria-pressed", String(button.dataset.view === name));
    }
    if (redraw) this.drawAll();
  }

  // Shows the module at a path.
  choose(path) {
    this.path = path;
    this.chosen = null;
    for (const panel of Object.values(this.panels)) panel.from = 0;
    this.tree.show(this.graph.after.tree, path);
    this.drawAll();
    byId("details").replaceChildren(...moduleDetails(findModule(this.graph.after.tree, path) ?? this.graph.after.tree));
    this.table.select(null);
  }

  // Shows a node in the drawing of its module; `scrolls`: asked for from further down the page.
  go(node, scrolls = false) {
    let module = findModule(this.graph.after.tree, isOperation(node) ? node.module : "") ?? this.graph.after.tree;
    while (module.parent && operationsIn(module).length < FEW) module = module.parent;
    const wanted = module.path;
    if (wanted !== this.path) {
      this.path = wanted;
      for (const panel of Object.values(this.panels)) panel.from = 0;
      this.tree.show(this.graph.after.tree, wanted);
    }
    if (node.side === "before" && this.panels.before.figure.hidden) this.view("both", false);
    this.chosen = node;
    this.drawAll();
    this.select(node, true);
    if (scrolls) byId("model").scrollIntoView({ block: "nearest" });
  }

  select(node, centre = false) {
    this.chosen = node;
    const other = this.otherSide(node);
    this.panels[node.side].select(node, centre);
    const opposite = this.panels[node.side === "after" ? "before" : "after"];
    if (!opposite.figure.hidden) opposite.select(other, true);
    byId("details").replaceChildren(...detailsOf(node, other, (one) => this.go(one)).flat().filter(Boolean));
    this.table.select(node.side === "after" ? node : other);
  }

  otherSide(node) {
    const { byName } = this.graph[node.side === "after" ? "before" : "after"];
    return byName.get(node.name) ?? byName.get(node.name.split("/").pop()) ?? null; // a checkpoint was made of those
  }

  turn(by) {
    this.each((panel) => { panel.from = Math.max(0, panel.from + by); });
    this.chosen = null;
    this.drawAll();
  }

  drawAll() {
    const weights = byId("show-weights").checked;
    this.each((panel) => {
      const side = this.graph[panel.name];
      const node = this.chosen && (this.chosen.side === panel.name ? this.chosen : this.otherSide(this.chosen));
      panel.show(side, this.path, weights, node);
      panel.fit();
    });
    this.crumbs();
    const { from, total } = (this.panels.after.figure.hidden ? this.panels.before : this.panels.after).model;
    byId("pager").hidden = total <= WINDOW;
    byId("window").value = `${from + 1}–${Math.min(from + WINDOW, total)} of ${total} boxes`;
    byId("earlier").disabled = from === 0;
    byId("later").disabled = from + WINDOW >= total;
  }

  crumbs() {
    const names = this.path ? this.path.split(".") : [];
    const steps = names.map((name, i) => [name, names.slice(0, i + 1).join(".")]);
    byId("crumbs").replaceChildren(...[["model", ""], ...steps].flatMap(([name, path], i) => [
      i ? "." : "", el("button", { onclick: () => this.choose(path) }, name)]));
  }
}

if (byId("report-data") && byId("tree")) window.page = new Page(readReport());
document.documentElement.dataset.ready = "true";
