// Places boxes with dagre: from top to bottom along the data flow, those of one module side by side.

const LETTER = 7.25, WIDEST = 30, TITLE = 15;

function textsOf(item) {
  if (item.kind === "module") return [item.module.name, `${item.module.operations} operations`];
  if (item.kind === "outside") return [item.way + shortPath(item.path)];
  const { node } = item;
  if (node.kind === "cast") return [node.cast ? `cast to ${node.cast.to}` : node.op, node.cast ? shapeOf(node.type) : node.type];
  return [node.op, node.type];
}

// The last name of a path, and the one before it where that is a number: layer.0
const shortPath = (path) => /[^.]+(\.\d+)*$/.exec(path)?.[0] ?? path;

const shapeOf = (type) => /\[[^\]]*\]/.exec(type)?.[0] ?? type;

// Sets x, y, width and height of each item and cluster, and the points of each edge; returns the whole size.
function place(model, side) {
  const graph = new dagre.graphlib.Graph({ compound: true });
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 28, edgesep: 8, marginx: 14, marginy: 14 + 2 * TITLE });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const item of model.items) {
    item.texts = textsOf(item).map((text) => cut(text, WIDEST)).filter(Boolean);
    item.width = Math.max(64, ...item.texts.map((text) => text.length * LETTER + 22));
    item.height = item.texts.length > 1 ? 38 : 26;
    graph.setNode(item.key, { width: item.width, height: item.height });
  }
  model.clusters = clustersOf(model, side);
  for (const cluster of model.clusters) graph.setNode(cluster.key, {});
  for (const cluster of model.clusters) if (cluster.outer) graph.setParent(cluster.key, cluster.outer);
  const known = new Set(model.clusters.map((cluster) => cluster.key));
  for (const item of model.items) {
    const frame = around(item.cluster, model.path).find((path) => known.has(`c${path}`));
    if (frame) graph.setParent(item.key, `c${frame}`);
  }
  for (const edge of model.edges) graph.setEdge(edge.from.key, edge.to.key);
  dagre.layout(graph);
  for (const item of [...model.items, ...model.clusters]) Object.assign(item, graph.node(item.key));
  for (const cluster of model.clusters) roomForTitle(cluster, model.clusters);
  for (const edge of model.edges) edge.points = graph.edge(edge.from.key, edge.to.key).points;
  return graph.graph();
}

// A frame for each open module inside the chosen one that has several boxes; those around one module share its frame.
function clustersOf(model, side) {
  const members = new Map();
  for (const item of model.items) {
    for (const path of item.cluster ? around(item.cluster, model.path) : []) members.set(path, (members.get(path) ?? 0) + 1);
  }
  const found = [];
  const visit = (modules, outer, prefix) => {
    for (const module of modules) {
      const count = members.get(module.path) ?? 0;
      if (count < 2) continue;
      const label = prefix ? `${prefix}.${module.name}` : module.name;
      const inside = [...module.children.values()];
      const only = inside.filter((one) => members.get(one.path) === count);
      if (only.length) visit(only, outer, label);
      else {
        found.push({ key: `c${module.path}`, path: module.path, label, outer });
        visit(inside, `c${module.path}`, "");
      }
    }
  };
  visit([...(findModule(side.tree, model.path) ?? side.tree).children.values()], null, "");
  return found;
}

// A module's path and those of the modules around it, up to a chosen one: a.b.c, a.b for a.
function around(path, chosen) {
  const paths = [];
  for (; path && path !== chosen; path = path.slice(0, Math.max(0, path.lastIndexOf(".")))) paths.push(path);
  return paths;
}

// Makes a frame higher for its title, and for those of the frames at its top.
function roomForTitle(cluster, clusters) {
  const titles = (one) => 1 + Math.max(0, ...clusters.filter((other) => other.outer === one.key).map(titles));
  const more = TITLE * titles(cluster);
  cluster.y -= more / 2;
  cluster.height += more;
}
