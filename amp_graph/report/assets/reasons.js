// Reasons, each once, with what it holds for: layers that are alike are one name, and prices stay with each operation.

const MOST_PRICES = 200;

function reasonRows(nodes, go, filter) {
  const groups = new Map();
  for (const node of nodes) {
    if (node.handsOn || !node.words || !isOperation(node)) continue;
    const key = `${node.look} ${node.words}`;
    if (!groups.has(key)) groups.set(key, { look: node.look, words: node.words, nodes: [] });
    groups.get(key).nodes.push(node);
  }
  const order = ["low", "full", "cast", "captured"];
  const sorted = [...groups.values()].sort((a, b) => order.indexOf(a.look) - order.indexOf(b.look) || b.nodes.length - a.nodes.length);
  return sorted.map((group) => reasonRow(group, go, filter));
}

function reasonRow(group, go, filter) {
  const row = el("details", { class: "reason" }, el("summary", {},
    el("span", { class: `tag ${group.look}` }, group.look), el("span", { class: "count" }, `×${group.nodes.length}`),
    el("span", {}, group.words, el("span", { class: "where" }, placesOf(group.nodes)))));
  row.addEventListener("toggle", () => {
    if (row.open && row.children.length === 1) row.append(pricesOf(group, go, filter));
  });
  return row;
}

function pricesOf(group, go, filter) {
  const lines = group.nodes.slice(0, MOST_PRICES).flatMap((node) => [
    el("button", { onclick: () => go(node) }, node.number), el("span", {}, `${node.op} in ${node.module || "(root)"}`),
    el("span", {}, node.figures)]);
  const all = el("button", { onclick: () => filter(group) }, "all in the table");
  return el("div", { class: "prices" }, lines, all);
}

// "linear ×14 in encoder.layer.*.attention, classifier"
function placesOf(nodes) {
  const byOp = new Map();
  for (const node of nodes) {
    const found = byOp.get(node.op) ?? byOp.set(node.op, { count: 0, modules: new Set() }).get(node.op);
    found.count++;
    found.modules.add(node.module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*") || "(root)");
  }
  return [...byOp].map(([op, { count, modules }]) => {
    const [first, ...more] = modules;
    return `${op}${count > 1 ? ` ×${count}` : ""} in ${first}${more.length ? ` and ${more.length} more` : ""}`;
  }).join("; ");
}
