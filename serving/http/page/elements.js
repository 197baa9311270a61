// What the page is made of: elements, tables and charts. Texts of a server are always text, never HTML.

import * as f from "./figures.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [600, 84];

/** An element. children: elements and texts. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child != null && child !== "").map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export const fill = (id, ...children) => document.getElementById(id).replaceChildren(...children.filter(Boolean));
export const card = (title, ...children) => element("div", { class: "card" }, element("h2", {}, title), ...children);
export const pill = (kind, text) => element("span", { class: `pill ${kind}` }, text);

/** A table. text: the numbers of the columns that hold words. kinds: its classes. */
export function table(columns, rows, text = [0], kinds = "") {
  const kind = (place) => (text.includes(place) ? { class: "text" } : {});
  const head = element("tr", {}, ...columns.map((column, place) => element("th", { scope: "col", ...kind(place) }, column)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, place) => element("td", kind(place), cell))));
  return element("div", { class: "scroll" }, element("table", { class: kinds }, element("thead", {}, head), element("tbody", {}, ...body)));
}

function drawn(name, properties) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  return made;
}

const path = (kind, d) => drawn("path", { class: kind, d });

/** A chart with axes. points: [[seconds ago, value]]; span: seconds that are shown. */
export function chart(title, points, format, span) {
  const ticks = f.ticks(Math.max(0, ...points.map(([, value]) => value ?? 0)));
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  svg.setAttribute("aria-label", `${title}: ${format(points.at(-1)?.[1])} now`);
  svg.append(...ticks.map((tick) => f.height(tick, ticks, HEIGHT)).map((y) => path("grid", `M0,${y}H${WIDTH}`)));
  for (const segment of f.segments(points, span, ticks, WIDTH, HEIGHT)) {
    const line = segment.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
    const bottom = f.height(0, ticks, HEIGHT);
    svg.append(path("area", `M${segment[0][0]},${bottom}L${line}L${segment.at(-1)[0]},${bottom}Z`), path("line", `M${line}`));
  }
  const labels = (texts) => texts.map((text) => element("span", {}, text));
  const y = element("div", { class: "y" }, ...labels(ticks.map(format).reverse()));
  const x = element("div", { class: "x" }, ...labels([`${span / 60} min ago`, `${span / 120} min`, "now"]));
  return element("figure", { class: "card" }, element("figcaption", { class: "soft" }, title), element("div", { class: "plot" }, y, svg, x));
}
