// The modules of a graph: their operations, the share of each precision, and layers that are alike in one row.

function moduleTree(nodes) {
  const root = { path: "", name: "model", own: [], children: new Map(), parent: null };
  for (const node of nodes) {
    if (!isOperation(node) || node.handsOn) continue;
    let place = root;
    for (const name of node.module ? node.module.split(".") : []) {
      if (!place.children.has(name)) {
        const path = place.path ? `${place.path}.${name}` : name;
        place.children.set(name, { path, name, own: [], children: new Map(), parent: place });
      }
      place = place.children.get(name);
    }
    place.own.push(node);
  }
  count(root);
  return root;
}

// Adds up a module, and describes it: equal descriptions are of layers that are alike.
function count(module) {
  const sums = { low: 0, full: 0, captured: 0, cast: 0 };
  for (const node of module.own) {
    sums[node.look] = (sums[node.look] ?? 0) + 1;
    sums.cast += node.inside.length;
  }
  const told = module.own.map((node) => `${node.op} ${node.look}`);
  for (const child of module.children.values()) {
    count(child);
    for (const kind of Object.keys(sums)) sums[kind] += child.sums[kind];
    told.push(`${child.name}(${child.told})`);
  }
  module.sums = sums;
  module.told = told.join(";");
  module.operations = sums.low + sums.full + sums.captured;
}

// Returns rows of children: [layer.0, ..., layer.11] of one kind are one row.
function alike(module) {
  const rows = [];
  for (const child of module.children.values()) {
    const last = rows.at(-1);
    const pattern = child.name.replace(/\d+/g, "*");
    if (last && pattern !== child.name && last.pattern === pattern && last.modules[0].told === child.told) {
      last.modules.push(child);
    } else rows.push({ pattern, modules: [child] });
  }
  return rows.map((row) => row.modules);
}

function findModule(tree, path) {
  let place = tree;
  for (const name of path ? path.split(".") : []) {
    place = place.children.get(name);
    if (!place) return null;
  }
  return place;
}

// Draws the tree of modules; `choose(path)` is called for the one that is clicked.
class ModuleTree {
  constructor(element, choose) {
    Object.assign(this, { element, choose, open: new Set([""]), unfolded: new Set() });
    element.setAttribute("role", "tree");
    element.addEventListener("keydown", (event) => this.onKey(event));
  }

  show(tree, path) {
    if (this.tree !== tree) {
      this.tree = tree;
      this.open = new Set([""]);
      let next = [tree];
      for (let rows = 0; next.length && rows + next.length < 14; next = next.flatMap((m) => alike(m).map(([one]) => one))) {
        rows += next.length;
        for (const module of next) if (module.children.size <= 14) this.open.add(module.path);
      }
    }
    this.path = path;
    this.reveal(path);
    this.render();
  }

  // Opens what is around a module, and the row of layers that hides it.
  reveal(path) {
    for (let module = findModule(this.tree, path)?.parent; module; module = module.parent) {
      this.open.add(module.path);
    }
    for (let module = findModule(this.tree, path); module?.parent; module = module.parent) {
      const row = alike(module.parent).find((modules) => modules.includes(module));
      if (row[0] !== module) this.unfolded.add(row[0].path);
    }
  }

  render() {
    const rows = [];
    this.rowsOf([this.tree], 0, rows);
    this.element.replaceChildren(...rows);
  }

  rowsOf(modules, depth, rows) {
    const [module] = modules;
    const isFolded = modules.length > 1 && !this.unfolded.has(module.path);
    if (!isFolded && modules.length > 1) {
      for (const one of modules) this.rowsOf([one], depth, rows);
      return;
    }
    rows.push(this.row(modules, depth));
    if (this.open.has(module.path)) for (const inside of alike(module)) this.rowsOf(inside, depth + 1, rows);
  }

  row(modules, depth) {
    const [module] = modules;
    const number = modules.length;
    const isOpen = this.open.has(module.path);
    const twist = module.children.size
      ? el("button", { class: "twist", tabindex: -1, "aria-label": isOpen ? "collapse" : "expand",
        onclick: (event) => { event.stopPropagation(); this.toggle(module); } }, isOpen ? "▾" : "▸")
      : el("span");
    const name = number > 1 ? `${module.name} … ${modules.at(-1).name}` : module.name;
    const many = number > 1 && el("button", { class: "times-alike twist", tabindex: -1, title: "alike: show each",
      onclick: (event) => { event.stopPropagation(); this.unfolded.add(module.path); this.render(); } }, ` ×${number}`);
    const sums = ["low", "full", "captured"].map((kind) => [kind, module.sums[kind] * number]);
    const title = `${module.path || "model"}${number > 1 ? ` and ${number - 1} alike` : ""}: ` +
      `${sums.map(([kind, n]) => `${n} ${kind}`).join(", ")}, ${module.sums.cast * number} casts`;
    const label = el("span", { class: "name", title }, name, many || "");
    label.style.paddingLeft = "0";
    const row = el("div", { class: "module", role: "treeitem", tabindex: 0, "data-path": module.path,
      "aria-expanded": module.children.size ? String(isOpen) : undefined, "aria-level": depth + 1,
      "aria-selected": String(modules.some((one) => one.path === this.path)),
      onclick: () => this.choose(module.path) },
    twist, label, bar(sums), el("span", { class: "number", title: "operations" }, module.operations * number));
    row.style.paddingLeft = `${0.2 + 0.75 * depth}rem`;
    return row;
  }

  toggle(module, wanted = !this.open.has(module.path)) {
    if (wanted) this.open.add(module.path);
    else this.open.delete(module.path);
    this.render();
  }

  onKey(event) {
    const path = event.target.dataset?.path;
    if (path === undefined) return;
    const rows = [...this.element.children];
    const at = rows.indexOf(event.target);
    if (event.key === "Enter" || event.key === " ") this.choose(path);
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      this.toggle(findModule(this.tree, path), event.key === "ArrowRight");
    } else if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    const next = event.key === "ArrowDown" ? at + 1 : event.key === "ArrowUp" ? at - 1 : at;
    this.element.children[Math.max(0, Math.min(next, this.element.children.length - 1))]?.focus();
  }
}
