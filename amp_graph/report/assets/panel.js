// One side of the drawing: moved with the mouse, zoomed with its wheel.

const LEAST_SCALE = 0.55; // smaller texts are not read

class Panel {
  constructor(figure, name, on) {
    Object.assign(this, { figure, name, on, from: 0 });
    this.svg = figure.querySelector("svg");
    this.layer = drawn("g");
    this.svg.append(arrows(name), this.layer);
    this.pan = Panzoom(this.layer, { canvas: true, minScale: 0.05, maxScale: 4, animate: false, cursor: "" });
    this.svg.addEventListener("wheel", (event) => this.pan.zoomWithWheel(event), { passive: false });
    this.layer.addEventListener("pointerover", (event) => this.hover(event));
    this.layer.addEventListener("pointerout", () => this.on.leave());
  }

  // Draws the module at `path`, or what is there instead; `around`: a node that is to be among the boxes.
  show(side, path, weights, around) {
    this.side = side;
    this.path = path;
    this.model = itemsOf(side, path, { weights, from: this.from, around: around ?? null });
    this.from = this.model.from;
    if (!this.model.items.length) {
      this.layer.replaceChildren(drawn("text", { class: "empty", x: 20, y: 50 }, "No operation of this module is here."));
      this.size = { width: 300, height: 80 };
    } else {
      this.size = place(this.model, side);
      draw(this.model, this.layer, { side: this.name, onnode: this.on.node, onmodule: this.on.module });
    }
    this.select(around, false);
  }

  // Fits the drawing's width if its texts stay readable, and shows its top.
  fit(whole = false) {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width || !this.size) return;
    const across = width / this.size.width, down = height / this.size.height;
    const scale = Math.min(1.1, whole ? Math.min(across, down) : Math.max(LEAST_SCALE, Math.min(across, Math.max(down, 0.8))));
    this.pan.zoom(scale, { force: true });
    this.pan.pan((width / scale - this.size.width) / 2, whole || this.size.height * scale < height
      ? (height / scale - this.size.height) / 2 : 0, { force: true });
  }

  select(node, centre = true) {
    for (const element of this.layer.querySelectorAll(".selected, .touched")) element.classList.remove("selected", "touched");
    const item = node && this.model.of?.get(node);
    if (!item) return;
    this.element(item.key)?.classList.add("selected");
    for (const edge of this.layer.querySelectorAll(".edge")) {
      edge.classList.toggle("touched", edge.dataset.from === item.key || edge.dataset.to === item.key);
    }
    if (centre) this.centre(item);
  }

  element(key) {
    return [...this.layer.children].find((child) => child.dataset.key === key);
  }

  centre(item) {
    const { width, height } = this.svg.getBoundingClientRect();
    const scale = Math.max(this.pan.getScale(), 0.8);
    this.pan.zoom(scale, { force: true });
    this.pan.pan(width / 2 / scale - item.x, height / 2 / scale - item.y, { force: true });
  }

  hover(event) {
    const element = event.target.closest(".node");
    if (element?.dataset.index !== undefined) this.on.hover(this.side.nodes[element.dataset.index], event);
  }
}
