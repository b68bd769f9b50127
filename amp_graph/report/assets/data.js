// The block of JSON as objects: two sides of each graph, "after" and "before", with nodes that know what they read.

const TEXTS = ["name", "number", "kind", "op", "ops", "module", "type", "was", "precision", "cls", "words", "figures",
  "origin", "line", "listed"];
const LEAVES = new Set(["input", "weight", "constant", "subgraph", "output"]);

function readReport() {
  const raw = JSON.parse(byId("report-data").textContent);
  const graphs = raw.graphs.map((graph) => {
    const after = readSide(graph.after, raw.strings, "after");
    const before = readSide(graph.before, raw.strings, "before");
    return { title: graph.title, after, before };
  });
  return { graphs };
}

function readSide(columns, strings, side) {
  const count = columns.name ? columns.name.length : 0;
  const nodes = Array.from({ length: count }, (_, index) => {
    const node = { index, side, reads: [], readers: [], inside: [], badges: [], cast: null };
    for (const name of TEXTS) node[name] = columns[name] ? strings[columns[name][index]] : "";
    node.bytes = columns.bytes ? columns.bytes[index] : 0;
    node.flops = columns.flops ? columns.flops[index] : 0;
    node.precision ||= precisionOf(node);
    node.look = node.kind === "cast" ? "cast" : LEAVES.has(node.kind) ? "input" : node.precision;
    return node;
  });
  readCasts(nodes, columns.casts ?? [], strings);
  connect(nodes, columns.edges ?? []);
  return { nodes, byName: new Map(nodes.map((node) => [node.name, node])), tree: moduleTree(nodes) };
}

// The precision of a node as captured: that of its value.
function precisionOf(node) {
  if (/\bf(32|64)\[/.test(node.type)) return "full";
  return /\bb?f16\[/.test(node.type) ? "low" : "captured";
}

function readCasts(nodes, rows, strings) {
  for (const [target, source, to, reason, weight, kept] of rows) {
    const cast = { source: strings[source], to: strings[to], reason: strings[reason], weight: !!weight, kept: !!kept };
    if (nodes[target].kind === "cast") nodes[target].cast = cast;
    else nodes[target].inside.push(cast);
  }
}

// Edges skip what only hands a value on: one part of a result, the inputs and outputs of a subgraph.
function connect(nodes, edges) {
  const direct = nodes.map(() => []);
  for (let i = 0; i < edges.length; i += 2) direct[edges[i + 1]].push(edges[i]);
  const last = nodes.length - 1;
  const handsOn = (i) => {
    const kind = nodes[i].kind;
    return kind === "part" || (direct[i].length > 0 && (kind === "input" || (kind === "output" && i !== last)));
  };
  const behind = (i, seen) => {
    if (!handsOn(i) || seen.has(i)) return [i];
    seen.add(i);
    return direct[i].flatMap((source) => behind(source, seen));
  };
  nodes.forEach((node, i) => {
    node.handsOn = handsOn(i);
    if (node.handsOn) return;
    for (const source of new Set(direct[i].flatMap((one) => behind(one, new Set())))) {
      node.reads.push(nodes[source]);
      nodes[source].readers.push(node);
    }
  });
  for (const node of nodes) {
    node.badges = [...node.inside, ...node.reads.filter((one) => one.cast?.weight).map((one) => one.cast)];
  }
}

// Whether a node is drawn; weights, and what casts them, are drawn on request.
function isShown(node, weights) {
  if (node.handsOn || node.kind === "subgraph") return false;
  return weights || !(node.kind === "weight" || node.kind === "constant" || node.cast?.weight);
}

const isOperation = (node) => node.kind === "operation" || node.kind === "cast";
