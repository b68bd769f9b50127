// What is known of one operation, beside the drawing; and in short, at the mouse.

const LOOKS = { low: "low precision", full: "full precision", captured: "as captured", cast: "cast", input: "input" };

function whyOf(node) {
  if (node.words) return node.words;
  if (node.side === "before") return "The graph as captured: no precision is chosen here yet.";
  return { input: "An input of the graph.", weight: "A parameter or buffer of the model.", output: "What the graph returns." }[node.kind]
    ?? "";
}

function detailsOf(node, other, go) {
  const entry = (name, value, mono = true) => value ? [el("dt", {}, name), el("dd", { class: mono ? "mono" : "" }, value)] : [];
  const changed = node.was && node.was !== node.type ? `${node.was} → ${node.type}` : node.type;
  const casts = node.cast ? [node.cast] : node.badges;
  return [
    el("h3", {}, `${node.op} `, el("span", { class: `tag ${node.look}` }, LOOKS[node.look] ?? node.look)),
    el("p", { class: "why" }, whyOf(node), node.figures && el("span", { class: "price" }, el("br"), node.kind === "cast" ? node.figures : `Price: ${node.figures}`)),
    el("dl", {},
      entry("value", changed), entry("module", node.module || "(root)"), entry("source", node.line),
      entry("node", `${node.number} ${node.name}`), entry("calls", node.ops !== node.op && node.ops),
      entry("class", node.cls && `${node.cls}${node.origin ? ` (${node.origin})` : ""}`),
      entry("FLOPs", node.flops && quantity(node.flops)), entry("writes", node.bytes && size(node.bytes)),
      entry("list", node.listed && "no list names it", false)),
    casts.length ? [el("b", {}, "Casts"), ...casts.map(castLine)] : [],
    links("Reads", node.reads, go), links("Read by", node.readers, go),
    other ? el("button", { class: "link", onclick: () => go(other) }, `show it ${other.side} the rewriting`) : null,
  ];
}

function castLine(cast) {
  const when = cast.kept ? ", once after each update" : cast.weight ? ", at each call" : "";
  return el("p", { class: "mono" }, `${cast.source} → ${cast.to}${when}`, el("br"), el("span", { class: "price" }, cast.reason));
}

function links(title, nodes, go) {
  const shown = nodes.slice(0, 12).map((node) =>
    el("button", { class: "link", onclick: () => go(node) }, `${node.number} ${node.op} ${node.type}`));
  if (!shown.length) return [];
  if (nodes.length > 12) shown.push(el("span", { class: "hint" }, `and ${nodes.length - 12} more`));
  return [el("b", {}, title), ...shown];
}

function moduleDetails(module) {
  const { sums, operations } = module;
  const nodes = operationsIn(module);
  const flops = nodes.reduce((sum, node) => sum + node.flops, 0);
  const low = nodes.reduce((sum, node) => sum + (node.look === "low" ? node.flops : 0), 0);
  const parts = ["low", "full", "captured"].map((kind) => [kind, sums[kind]]);
  return [
    el("h3", {}, module.path || "The whole graph"), bar(parts),
    el("dl", {}, el("dt", {}, "operations"), el("dd", {}, `${operations}: ${parts.map(([kind, n]) => `${n} ${kind}`).join(", ")}`),
      el("dt", {}, "casts"), el("dd", {}, sums.cast),
      flops ? [el("dt", {}, "FLOPs"), el("dd", {}, `${quantity(flops)}, ${((100 * low) / flops).toFixed(1)} % low`)] : []),
    el("p", { class: "hint" }, "Click a box for its reason. A box with a bar is a module: click it to go inside."),
  ];
}

// The tip at the mouse: operation, value, reason, line.
function showTip(tip, node, event) {
  tip.replaceChildren(
    el("b", {}, node.op), " ", el("span", { class: `tag ${node.look}` }, LOOKS[node.look] ?? node.look),
    el("div", {}, node.was && node.was !== node.type ? `${node.was} → ${node.type}` : node.type),
    el("div", {}, whyOf(node)), el("div", { class: "line" }, node.line || node.module));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}
