// Looks at /v1/models and /metrics every two seconds and shows what they say. It asks by GET alone.

import * as f from "./figures.js";

const LOOK_MS = 2000;
const POINTS = 120;
const SVG = "http://www.w3.org/2000/svg";
const history = [];
let before = null;

/** An element. children: elements and texts; what a server says is always text, never HTML. */
function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child != null && child !== "").map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

const fill = (id, ...children) => document.getElementById(id).replaceChildren(...children.filter(Boolean));
const card = (title, ...children) => element("div", { class: "card" }, element("h2", {}, title), ...children);
const pill = (kind, text) => element("span", { class: `pill ${kind}` }, text);

/** A table. text: the numbers of the columns that hold words. kinds: its classes. */
function table(columns, rows, text = [0], kinds = "") {
  const kind = (place) => (text.includes(place) ? { class: "text" } : {});
  const head = element("tr", {}, ...columns.map((column, place) => element("th", { scope: "col", ...kind(place) }, column)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, place) => element("td", kind(place), cell))));
  return element("div", { class: "scroll" }, element("table", { class: kinds }, element("thead", {}, head), element("tbody", {}, ...body)));
}

function chart(title, points, format) {
  const [width, height] = [600, 84];
  const known = points.filter((p) => p != null);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}: ${format(points.at(-1))} now`);
  for (const segment of f.segments(points, POINTS, width, height)) {
    const line = segment.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
    const [left, right] = [segment[0][0], segment.at(-1)[0]];
    for (const [kind, path] of [["area", `M${left},${height}L${line}L${right},${height}Z`], ["line", `M${line}`]]) {
      const drawn = document.createElementNS(SVG, "path");
      drawn.setAttribute("class", kind);
      drawn.setAttribute("d", path);
      svg.append(drawn);
    }
  }
  const most = known.length ? `, at most ${format(Math.max(...known))}` : "";
  return element("figure", { class: "card" }, element("span", { class: "soft" }, `${title}, last minutes${most}`), svg);
}

const tile = (value, label) => element("div", { class: "tile" }, element("b", {}, value), element("span", {}, label));

function showTiles(now) {
  fill(
    "tiles",
    tile(f.count(now.requests), "lookups and scores a second"),
    tile(f.count(now.ids), "ids a second"),
    tile(f.seconds(now.p50), "p50, first byte to last"),
    tile(f.seconds(now.p99), "p99"),
    tile(f.percent(now.notAnswered), "not answered (5xx)"),
    tile(f.count(now.refused), "refused a second (4xx)"),
    tile(f.count(now.inFlight), "in flight"),
    now.hasCache ? tile(f.percent(now.hits), "hits of GPU caches") : null,
  );
  const points = (key) => history.map((h) => h[key]);
  fill(
    "charts",
    chart("Requests a second", points("requests"), f.count),
    chart("p99", points("p99"), f.seconds),
    now.hasCache ? chart("Hits of GPU caches", points("hits"), f.percent) : chart("Ids a second", points("ids"), f.count),
  );
}

function modelCard(model, now) {
  const versions = `of ${model.versions.join(", ")}`;
  const head = element(
    "div",
    { class: "head" },
    element("h2", {}, model.name, " ", element("span", { class: "soft" }, `version ${model.version} ${versions}`)),
    now.lag ? pill("warn", now.lag) : pill("good", "live"),
    element("span", { class: "soft" }, `created ${model.created}`),
  );
  const told = [
    `${f.bytes(model.segment_bytes)} (fp32: ${f.bytes(model.fp32_bytes)})`,
    `${model.features.length} features`,
    model.scorer ? `scorer: ${model.scorer.kind}` : "no scorer",
    `lookups on ${model.backend}`,
    `${f.count(now.requests)} requests/s, ${f.count(now.refused)} refused/s, ${f.count(now.ids)} ids/s`,
    `p99 ${f.seconds(now.p99)}, mean lookup ${f.seconds(now.lookup)}`,
    ...(now.disk ? [`rows of a disk: ${f.count(now.disk.inMemory)}/s in memory, ${f.count(now.disk.disk)}/s read, ${f.count(now.disk.notRead)}/s not read, hot ${f.percent(now.disk.hot)}`] : []),
  ];
  const rows = now.tables.map((t) => [
    t.name,
    t.row_format,
    f.count(t.rows),
    t.dim,
    f.bytes(t.bytes),
    t.placement,
    t.ids === "row" ? "row numbers" : `${t.ids}, missing: ${t.missing}`,
    f.percent(t.hits),
    f.count(t.withoutRow),
  ]);
  const columns = ["table", "format", "rows", "dim", "bytes", "where", "ids", "cache hits", "without row/s"];
  return element("div", { class: "card" }, head, element("p", { class: "soft" }, told.join(" · ")), table(columns, rows, [0, 1, 5, 6]));
}

function showModels(models, looks) {
  const cards = models.map((model) => modelCard(model, f.ofModel(model, ...looks)));
  fill("models", ...(cards.length ? cards : [card("No model", element("p", { class: "soft" }, "This server serves none yet."))]));
}

function showRequests(was, now, elapsed) {
  const name = "tableside_request_seconds";
  const rows = [];
  for (const protocol of ["v1", "v2", "grpc", "http"]) {
    for (const outcome of ["ok", "refused", "unavailable", "failed", "aborted"]) {
      const wanted = { protocol, outcome };
      if (!f.total(now, `${name}_count`, wanted)) continue;
      const rate = f.grown(was, now, `${name}_count`, wanted) / elapsed;
      const quantiles = [0.5, 0.99].map((q) => f.seconds(f.quantile(was, now, name, q, wanted)));
      rows.push([protocol === "http" ? "other" : protocol, outcome, f.count(f.total(now, `${name}_count`, wanted)), f.count(rate), ...quantiles]);
    }
  }
  fill("requests", rows.length && card("Requests", table(["protocol", "outcome", "so far", "a second", "p50", "p99"], rows, [0, 1])));
}

function showErrors(was, now, elapsed) {
  const rows = (now.get("tableside_errors_total") ?? []).map(({ labels, value }) => [
    labels.model,
    labels.kind,
    f.count(value),
    f.count(f.grown(was, now, "tableside_errors_total", labels) / elapsed),
  ]);
  const none = element("p", { class: "soft" }, "None so far.");
  fill("errors", card("Errors", rows.length ? table(["model", "kind", "so far", "a second"], rows, [0, 1]) : none));
}

function showDevices(server, was, now) {
  const rows = f.values(now, "tableside_gpu_batch_requests_count", "device").map((device) => {
    const wanted = { device };
    const slots = f.total(now, "tableside_cache_slots", wanted);
    return [
      device,
      f.count(f.mean(was, now, "tableside_gpu_batch_requests", wanted)),
      f.seconds(f.mean(was, now, "tableside_gpu_seconds", { device, stage: "queue" })),
      f.seconds(f.mean(was, now, "tableside_gpu_seconds", { device, stage: "kernels" })),
      f.bytes(f.total(now, "tableside_cache_bytes", wanted)),
      slots ? f.percent(f.total(now, "tableside_cache_occupied_slots", wanted) / slots) : f.percent(null),
    ];
  });
  const none = element("p", { class: "soft" }, server.devices.length ? "No batch yet." : "The CPU alone: lookups run where requests are read.");
  const columns = ["device", "requests a batch", "wait", "kernels", "cache", "slots taken"];
  fill("devices", card("Devices", rows.length ? table(columns, rows) : none));
}

function showProcesses(server, now, overview) {
  const memory = ["private", "file", "shared"].map((kind) => `${kind} ${f.bytes(f.total(now, "tableside_memory_bytes", { kind }))}`);
  const rows = [
    ["doors", server.doors.join(", ")],
    ["workers", `${f.total(now, "tableside_ready_workers")} ready of ${f.total(now, "tableside_workers")}`],
    ["replaced so far", f.count(f.total(now, "tableside_worker_restarts_total"))],
    ["connections", `${f.total(now, "tableside_open_connections")} of ${f.total(now, "tableside_max_connections")}`],
    ["waiting requests", f.count(f.total(now, "tableside_waiting_requests"))],
    ["bodies and responses held", f.bytes(f.total(now, "tableside_held_bytes"))],
    ["cores used", overview.cores.toFixed(2)],
    ["memory of workers", memory.join(", ")],
    ["versions taken so far", f.count(f.total(now, "tableside_swaps_total"))],
  ];
  fill("processes", card("Processes and doors", table(["", ""], rows, [0, 1], "pairs")));
}

function showState(kind, text) {
  const state = document.getElementById("state");
  state.className = `pill ${kind}`;
  state.textContent = text;
}

async function asked(path) {
  const answer = await fetch(path, { headers: { accept: "*/*" }, cache: "no-store", signal: AbortSignal.timeout(5000) });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer;
}

async function look() {
  const [described, text] = await Promise.all([asked("/v1/models").then((a) => a.json()), asked("/metrics").then((a) => a.text())]);
  const [now, at] = [f.parse(text), performance.now()];
  const elapsed = before ? (at - before.at) / 1000 : 1;
  const was = before ? before.samples : now;
  before = { samples: now, at };
  const overview = f.overview(was, now, elapsed);
  history.push(overview);
  if (history.length > POINTS) history.shift();
  const [ready, workers] = [f.total(now, "tableside_ready_workers"), f.total(now, "tableside_workers")];
  showState(ready === workers && ready ? "good" : "bad", ready === workers && ready ? "ready" : `${ready} of ${workers} workers ready`);
  document.getElementById("about").textContent = `${described.server.version} at ${location.host}`;
  showTiles(overview);
  showModels(described.models, [was, now, elapsed]);
  showRequests(was, now, elapsed);
  showErrors(was, now, elapsed);
  showDevices(described.server, was, now);
  showProcesses(described.server, now, overview);
}

async function goOn() {
  try {
    await look();
  } catch (error) {
    showState("bad", `no answer: ${error.message}`);
  }
  setTimeout(goOn, document.hidden ? 5 * LOOK_MS : LOOK_MS);
}

goOn();
