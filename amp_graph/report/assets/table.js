// The table of all operations: sorted by a click on a column, and only the rows in sight are in the page.

const ROW = 26, SPARE = 8;
const COLUMNS = [
  ["node", (node) => node.number, "mono", (node) => node.index], ["operation", (node) => node.op, "mono"],
  ["module", (node) => node.module, "mono"], ["precision", (node) => node.look, "look"], ["class", (node) => node.cls, ""],
  ["value", (node) => node.type, "mono"], ["reason", (node) => (node.figures ? `${node.words} (${node.figures})` : node.words), ""],
  ["FLOPs", (node) => (node.flops ? quantity(node.flops) : ""), "figure", (node) => node.flops],
  ["writes", (node) => (node.bytes ? size(node.bytes) : ""), "figure", (node) => node.bytes],
  ["source", (node) => node.line.replace(/^[^:]*\//, ""), "mono", (node) => node.line],
];

class OperationTable {
  constructor(element, controls, go) {
    Object.assign(this, { element, go, sorted: 0, up: true, words: [], kind: "", chosen: null });
    this.head = element.querySelector(".head");
    this.body = element.querySelector(".body");
    this.space = element.querySelector(".space");
    Object.assign(this, controls);
    this.filterField.addEventListener("input", () => this.update());
    this.kindField.addEventListener("change", () => this.update());
    element.addEventListener("scroll", () => this.render());
    this.head.append(...COLUMNS.map(([title], i) => el("button", { role: "columnheader", onclick: () => this.sort(i) }, title)));
  }

  show(nodes) {
    this.nodes = nodes.filter((node) => isOperation(node) && !node.handsOn);
    this.update();
  }

  sort(column) {
    const isFigure = COLUMNS[column][2] === "figure";
    this.up = this.sorted === column ? !this.up : !isFigure;
    this.sorted = column;
    this.update();
  }

  filter(words, kind) {
    this.filterField.value = words;
    this.kindField.value = kind;
    this.update();
  }

  update() {
    const words = wordsOf(this.filterField.value), kind = this.kindField.value;
    const [, text, , order] = COLUMNS[this.sorted];
    const key = order ?? text;
    const compare = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : a.index - b.index);
    this.rows = this.nodes.filter((node) => (!kind || node.look === kind || node.listed === kind) && matches(node, words));
    this.rows.sort((a, b) => (this.up ? compare(a, b) : compare(b, a)));
    this.count.textContent = `${this.rows.length} of ${this.nodes.length} operations and casts`;
    [...this.head.children].forEach((cell, i) => {
      cell.textContent = COLUMNS[i][0] + (i === this.sorted ? (this.up ? " ▲" : " ▼") : "");
      cell.classList.toggle("sorted", i === this.sorted);
      cell.setAttribute("aria-sort", i !== this.sorted ? "none" : this.up ? "ascending" : "descending");
    });
    this.space.style.height = `${this.rows.length * ROW}px`;
    this.element.scrollTop = 0;
    this.render();
  }

  select(node) {
    this.chosen = node;
    this.render();
  }

  render() {
    const from = Math.max(0, Math.floor(this.element.scrollTop / ROW) - SPARE);
    const to = Math.min(this.rows.length, from + Math.ceil(this.element.clientHeight / ROW) + 2 * SPARE);
    const rows = this.rows.slice(from, to).map((node, i) => this.row(node, from + i));
    this.body.replaceChildren(this.space, ...rows);
  }

  row(node, at) {
    const cells = COLUMNS.map(([, text, kind]) => {
      const shown = text(node);
      return el("span", { role: "cell", class: kind === "look" ? node.look : kind, title: shown }, shown);
    });
    const row = el("div", { class: `row${node === this.chosen ? " selected" : ""}`, role: "row", "data-index": node.index,
      onclick: () => this.go(node) }, cells);
    row.style.top = `${at * ROW}px`;
    return row;
  }
}
