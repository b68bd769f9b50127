// Elements of the page, from tags, attributes and text. Text is never read as HTML.

const SVG = document.querySelector("svg")?.namespaceURI;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const drawn = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

function cut(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

// 9700000000 -> "9.7 G"
function quantity(number) {
  const units = ["", " k", " M", " G", " T"];
  let unit = 0;
  for (; number >= 1000 && unit < units.length - 1; unit++) number /= 1000;
  return `${Number(number.toPrecision(3))}${units[unit]}`;
}

// 4300000 -> "4.1 MiB"
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

// A bar of the parts of a whole: [["low", 3], ["full", 1]].
function bar(parts) {
  const all = parts.reduce((sum, [, count]) => sum + count, 0) || 1;
  const spans = parts.filter(([, count]) => count).map(([kind, count]) => {
    const part = el("span", { class: kind });
    part.style.width = `${(100 * count) / all}%`;
    return part;
  });
  return el("span", { class: "bar", title: parts.map(([kind, count]) => `${count} ${kind}`).join(", ") }, spans);
}
