// Draws placed boxes and edges as SVG. Each box of an operation carries its index, each of a module its path.

function draw(model, layer, { side, onnode, onmodule }) {
  const clusters = model.clusters.map((cluster) => drawCluster(cluster, onmodule));
  const edges = model.edges.map((edge) => drawEdge(edge, side));
  const items = model.items.map((item) => drawItem(item, onnode, onmodule));
  layer.replaceChildren(...clusters, ...edges, ...items);
}

function drawCluster({ x, y, width, height, label, path }, onmodule) {
  const left = x - width / 2, top = y - height / 2;
  const title = drawn("text", { x: left + 6, y: top + 13, onclick: () => onmodule(path) }, label);
  return drawn("g", { class: "cluster" }, drawn("rect", { x: left, y: top, width, height, rx: 8 }), title);
}

function drawEdge(edge, side) {
  const [start, ...rest] = edge.points;
  const middle = rest.slice(0, -1), end = rest.at(-1);
  let path = `M${start.x} ${start.y}`;
  if (middle.length < 2) path += `L${end.x} ${end.y}`;
  else {
    middle.forEach((point, i) => {
      const next = middle[i + 1] ?? end;
      const to = i === middle.length - 1 ? end : { x: (point.x + next.x) / 2, y: (point.y + next.y) / 2 };
      path += `Q${point.x} ${point.y} ${to.x} ${to.y}`;
    });
  }
  const kind = edge.isCast ? "cast" : "";
  return drawn("path", { class: `edge ${kind}`, d: path, "data-from": edge.from.key, "data-to": edge.to.key,
    "marker-end": `url(#arrow-${kind || "plain"}-${side})` });
}

function drawItem(item, onnode, onmodule) {
  const left = item.x - item.width / 2, top = item.y - item.height / 2;
  const look = item.kind === "node" ? item.node.look : item.kind === "module" ? "group" : "outside";
  const round = look === "cast" || look === "input" ? item.height / 2 : 6;
  const box = drawn("rect", { class: "box", x: left, y: top, width: item.width, height: item.height, rx: round });
  const lines = item.texts.map((text, i) => drawn("text",
    { x: item.x, y: top + (item.texts.length > 1 ? 16 + 14 * i : 17), class: i ? "type" : "" }, text));
  const open = () => (item.kind === "module" ? onmodule(item.module.path)
    : onnode(item.node, item.kind === "outside"));
  const label = item.kind === "node" ? `${item.node.op} ${item.node.type}, ${item.node.look}` : item.texts.join(", ");
  return drawn("g", { class: `node ${look}`, tabindex: 0, role: "button", "aria-label": label, "data-key": item.key,
    "data-index": item.node?.index, "data-path": item.module?.path, onclick: open,
    onkeydown: (event) => { if (event.key === "Enter") open(); } },
  box, item.kind === "module" ? sharesOf(item, left, top) : null, lines, badgeOf(item, left, top));
}

// The precisions of a closed module, as a bar along its lower edge.
function sharesOf(item, left, top) {
  const { sums, operations } = item.module;
  let x = left + 8;
  const all = item.width - 16;
  return ["low", "full", "captured"].filter((kind) => sums[kind]).map((kind) => {
    const width = (all * sums[kind]) / (operations || 1);
    x += width;
    return drawn("rect", { class: `part ${kind}`, x: x - width, y: top + item.height - 5, width, height: 3 });
  });
}

// A mark with the number of casts of weights inside an operation, or right before it.
function badgeOf(item, left, top) {
  const count = item.kind === "node" ? item.node.badges.length : 0;
  if (!count) return null;
  const x = left + item.width - 3, y = top + 3;
  return drawn("g", { class: "badge" }, drawn("circle", { cx: x, cy: y, r: 7 }),
    drawn("text", { x, y: y + 3 }, count), drawn("title", {}, `casts ${count} weight${count > 1 ? "s" : ""}`));
}

function arrows(side) {
  return drawn("defs", {}, ["plain", "cast"].map((kind) => drawn("marker",
    { id: `arrow-${kind}-${side}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse",
      markerUnits: "userSpaceOnUse" },
    drawn("path", { d: "M0 0L8 4L0 8z", class: `arrow ${kind}` }))));
}
