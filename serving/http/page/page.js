// Looks at /v1/models and /metrics every two seconds and shows what they say.

import { card, chart, element, fill, pill, table } from "./elements.js";
import * as f from "./figures.js";
import { exact, showLookups } from "./lookup.js";

const LOOK_MS = 2000;
const SPAN_S = 240; // that charts show
const history = [];
const featuresOf = new Map(); // by model, so that they stay open
let before = null;

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
  const drawn = (title, key, format) => chart(title, history.map((h) => [now.at - h.at, h[key]]), format, SPAN_S);
  fill(
    "charts",
    drawn("Requests a second", "requests", f.count),
    drawn("p99", "p99", f.seconds),
    now.hasCache ? drawn("Hits of GPU caches", "hits", f.percent) : drawn("Ids a second", "ids", f.count),
  );
}

/** A model's features. They are made anew with its versions alone. */
function features(model) {
  const known = featuresOf.get(model.name);
  if (known?.version === model.version) return known.shown;
  const rows = model.features.map((one) => [one.name, one.table, one.pooling, one.output]);
  const title = element("summary", {}, `${model.features.length} features`);
  const shown = element("details", {}, title, table(["feature", "table", "pooling", "output"], rows, [0, 1, 2, 3]));
  featuresOf.set(model.name, { version: model.version, shown });
  return shown;
}

/** The changes over a version; null: there are none. */
function deltas(model) {
  const time = (seconds) => (seconds == null ? "not known" : new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " "));
  const rows = model.deltas.map((d) => [d.sequence, f.count(d.rows), f.bytes(d.bytes), time(d.made_at), time(d.applied_at)]);
  return rows.length ? table(["changes up to", "rows", "bytes", "oldest made, UTC", "applied, UTC"], rows) : null;
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
    model.scorer ? `scorer: ${model.scorer.kind}` : "no scorer",
    `lookups on ${model.backend}`,
    `${f.count(now.requests)} requests/s, ${f.count(now.refused)} refused/s, ${f.count(now.ids)} ids/s`,
    `p99 ${f.seconds(now.p99)}, mean lookup ${f.seconds(now.lookup)}`,
  ];
  const rows = now.tables.map((t) => [
    t.name,
    t.row_format,
    f.count(t.rows),
    t.dim,
    f.bytes(t.bytes),
    t.placement,
    t.ids === "row" ? "row numbers" : `${t.ids}, missing: ${t.missing}`,
    t.tiers.map(([tier, share]) => `${tier} ${f.percent(share)}`).join(", ") || "–",
    f.count(t.withoutRow),
  ]);
  const columns = ["table", "format", "rows", "dim", "bytes", "where", "ids", "rows came from", "without row/s"];
  const tables = table(columns, rows, [0, 1, 5, 6, 7]);
  return element("div", { class: "card" }, head, element("p", { class: "soft" }, told.join(" · ")), tables, deltas(model), features(model));
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
  const [described, text] = await Promise.all([asked("/v1/models").then(async (a) => exact(await a.text())), asked("/metrics").then((a) => a.text())]);
  const [now, at] = [f.parse(text), performance.now()];
  const elapsed = before ? (at - before.at) / 1000 : 1;
  const was = before ? before.samples : now;
  before = { samples: now, at };
  const overview = { at: at / 1000, ...f.overview(was, now, elapsed) };
  history.push(overview);
  while (overview.at - history[0].at > SPAN_S) history.shift();
  const [ready, workers] = [f.total(now, "tableside_ready_workers"), f.total(now, "tableside_workers")];
  showState(ready === workers && ready ? "good" : "bad", ready === workers && ready ? "ready" : `${ready} of ${workers} workers ready`);
  document.getElementById("about").textContent = `${described.server.version} at ${location.host}`;
  showTiles(overview);
  showModels(described.models, [was, now, elapsed]);
  showLookups(described.models);
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
