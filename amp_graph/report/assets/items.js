// What is drawn of a part of the graph: operations, modules that stay closed, and what the part reads from outside.

const BOXES = 80; // modules are opened level by level, up to so many boxes
const WINDOW = 120; // boxes at a time, where one module has more

// Returns the boxes and edges of the module at `path`, from the box numbered `from` on.
function itemsOf(side, path, { weights = false, from = 0, around = null }) {
  const module = findModule(side.tree, path) ?? side.tree;
  const open = opened(module, weights);
  const all = boxes(module, open, weights).sort((a, b) => a.first - b.first);
  if (around) {
    const at = all.findIndex((item) => item.nodes.includes(around));
    if (at >= 0 && (at < from || at >= from + WINDOW)) from = Math.floor(at / WINDOW) * WINDOW;
  }
  if (from >= all.length) from = 0;
  const items = all.slice(from, from + WINDOW);
  const of = new Map();
  for (const item of items) for (const node of item.nodes) of.set(node, item);
  const edges = edgesOf(items, of, module, weights);
  return { items, edges, from, total: all.length, path: module.path, of };
}

// Opens modules one level at a time while all boxes together are few.
function opened(module, weights) {
  const shown = (one) => one.own.filter((node) => isShown(node, weights)).length;
  const open = new Set([module.path]);
  let count = shown(module) + module.children.size;
  for (let level = [module]; ;) {
    level = level.flatMap((one) => [...one.children.values()]);
    const more = level.reduce((sum, one) => sum + shown(one) + one.children.size - 1, 0);
    if (!level.length || count + more > BOXES) return open;
    count += more;
    for (const one of level) open.add(one.path);
  }
}

function boxes(module, open, weights) {
  const found = [];
  for (const node of module.own) if (isShown(node, weights)) found.push(single(node, module.path));
  for (const child of module.children.values()) {
    const inside = operationsIn(child).filter((node) => isShown(node, weights));
    if (open.has(child.path)) found.push(...boxes(child, open, weights));
    else if (inside.length === 1) found.push(single(inside[0], child.path));
    else if (inside.length) {
      found.push({ key: `m${child.path}`, kind: "module", module: child, nodes: inside, first: inside[0].index,
        cluster: module.path });
    }
  }
  return found;
}

const single = (node, cluster) => ({ key: `n${node.index}`, kind: "node", node, nodes: [node], first: node.index, cluster });

function operationsIn(module) {
  return [...module.own, ...[...module.children.values()].flatMap(operationsIn)].sort((a, b) => a.index - b.index);
}

// Returns the edges, and adds a box for each input, weight and neighbour that they lead from and to.
function edgesOf(items, of, module, weights) {
  const edges = new Map();
  const add = (from, to, isCast) => {
    if (from === to) return;
    const key = `${from.key}>${to.key}`;
    const edge = edges.get(key) ?? { from, to, isCast: false };
    edge.isCast ||= isCast;
    edges.set(key, edge);
  };
  const outside = new Map();
  const stub = (node, way) => {
    const isLeaf = LEAVES.has(node.kind);
    const path = isLeaf ? node.op : nextTo(node.module, module.path) || `${node.op} ${node.number}`;
    const key = `${way}${isLeaf ? node.index : path}`;
    if (!outside.has(key)) {
      outside.set(key, isLeaf ? single(node, "") : { key, kind: "outside", way, path, node, nodes: [], cluster: "" });
    }
    return outside.get(key);
  };
  for (const item of items.slice()) {
    for (const node of item.nodes) {
      for (const source of node.reads) {
        if (isShown(source, weights)) add(of.get(source) ?? stub(source, "from "), item, source.kind === "cast");
      }
      for (const reader of node.readers) {
        if (!of.has(reader) && isShown(reader, weights)) add(item, stub(reader, "to "), node.kind === "cast");
      }
    }
  }
  items.push(...outside.values());
  return [...edges.values()];
}

// The module beside the chosen one, or around it, that contains a module outside: `a.c` for `a.c.d` seen from `a.b`.
function nextTo(path, chosen) {
  const names = path.split("."), own = chosen.split(".");
  let same = 0;
  while (same < names.length && names[same] === own[same]) same++;
  return names.slice(0, same + 1).join(".");
}
