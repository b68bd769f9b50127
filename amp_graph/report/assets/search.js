// The search field: operations whose texts contain every word, best first.

const MOST_FOUND = 40;

function textOf(node) {
  node.text ??= [node.op, node.ops, node.name, node.number, node.module, node.type, node.words, node.line, node.look, node.cls,
    node.listed].join(" ").toLowerCase();
  return node.text;
}

const wordsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
const matches = (node, words) => words.every((word) => textOf(node).includes(word));

// Those whose operation, name or module has the words come first.
function search(nodes, text) {
  const words = wordsOf(text);
  if (!words.length) return [];
  const head = (node) => `${node.op} ${node.name} ${node.number} ${node.module}`.toLowerCase();
  const found = nodes.filter((node) => !node.handsOn && matches(node, words));
  const first = found.filter((node) => words.every((word) => head(node).includes(word)));
  const chosen = new Set(first);
  return [...first, ...found.filter((node) => !chosen.has(node))];
}

class SearchField {
  constructor(input, list, nodes, go) {
    Object.assign(this, { input, list, nodes, go, at: 0, found: [] });
    input.addEventListener("input", () => this.update());
    input.addEventListener("keydown", (event) => this.onKey(event));
    input.addEventListener("blur", () => setTimeout(() => { list.hidden = true; }, 150));
    input.addEventListener("focus", () => this.update());
  }

  update() {
    const all = search(this.nodes(), this.input.value);
    this.found = all.slice(0, MOST_FOUND);
    this.at = 0;
    const rows = this.found.map((node) => el("li", { "data-index": node.index, onmousedown: (event) => {
      event.preventDefault();
      this.pick(node);
    } }, el("span", { class: `tag ${node.look}` }, node.look), el("b", {}, node.op), el("span", { class: "path" }, node.module || node.name)));
    if (all.length > rows.length) rows.push(el("li", { class: "none" }, `and ${all.length - MOST_FOUND} more: see the table`));
    if (!rows.length) rows.push(el("li", { class: "none" }, "nothing found"));
    this.list.replaceChildren(...rows);
    this.list.hidden = !this.input.value.trim();
    this.mark();
  }

  mark() {
    [...this.list.children].forEach((row, i) => row.classList.toggle("active", i === this.at));
    this.list.children[this.at]?.scrollIntoView({ block: "nearest" });
  }

  pick(node) {
    this.list.hidden = true;
    this.go(node);
  }

  onKey(event) {
    if (event.key === "Enter" && this.found[this.at]) this.pick(this.found[this.at]);
    else if (event.key === "Escape") this.list.hidden = true;
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      this.at = Math.max(0, Math.min(this.found.length - 1, this.at + (event.key === "ArrowDown" ? 1 : -1)));
      event.preventDefault();
      this.mark();
    }
  }
}
