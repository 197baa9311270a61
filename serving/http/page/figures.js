// From the text of /metrics to figures. Nothing here touches the page, so that tests run it without one.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** The samples of an exposition by name: [{labels, value}]. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const sample = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!sample) continue;
    const labels = {};
    for (const [, name, value] of (sample[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\[n"\\]/g, (e) => ESCAPED[e]);
    if (!found.has(sample[1])) found.set(sample[1], []);
    found.get(sample[1]).push({ labels, value: Number(sample[3]) });
  }
  return found;
}

const fits = (labels, wanted) =>
  Object.entries(wanted).every(([name, value]) => (Array.isArray(value) ? value.includes(labels[name]) : labels[name] === value));

/** The sum of the samples of a name whose labels are `wanted`: a value, or one of several, by label. */
export function total(samples, name, wanted = {}) {
  return (samples.get(name) ?? []).filter((s) => fits(s.labels, wanted)).reduce((sum, s) => sum + s.value, 0);
}

/** The values that a label of a metric has. */
export function values(samples, name, label) {
  return [...new Set((samples.get(name) ?? []).map((s) => s.labels[label]))].sort();
}

/** What was counted between two looks. A server that was started anew counts from zero. */
export function grown(before, now, name, wanted = {}) {
  const [was, is] = [total(before, name, wanted), total(now, name, wanted)];
  return is >= was ? is - was : is;
}

/** A fraction of two numbers; null where there is none. */
export const fraction = (part, whole) => (whole > 0 ? part / whole : null);

/** The quantile q of what a histogram counted between two looks, linear within a bucket; null: nothing was counted. */
export function quantile(before, now, name, q, wanted = {}) {
  const bounds = values(now, `${name}_bucket`, "le").sort((a, b) => Number(a.replace("+Inf", "Infinity")) - Number(b.replace("+Inf", "Infinity")));
  const counts = bounds.map((le) => grown(before, now, `${name}_bucket`, { ...wanted, le }));
  const all = counts.at(-1) ?? 0;
  if (!all) return null;
  const at = counts.findIndex((count) => count >= q * all);
  const upper = Number(bounds[at]);
  const lower = at ? Number(bounds[at - 1]) : 0;
  if (!Number.isFinite(upper)) return lower; // beyond the last bound
  const below = at ? counts[at - 1] : 0;
  return lower + (upper - lower) * ((q * all - below) / (counts[at] - below));
}

/** The mean of what a histogram counted between two looks; null: nothing was counted. */
export const mean = (before, now, name, wanted = {}) =>
  fraction(grown(before, now, `${name}_sum`, wanted), grown(before, now, `${name}_count`, wanted));

const NONE = "–";

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base * 0.9995 && unit < units.length - 1) {
    value /= base;
    unit += 1;
  }
  const digits = unit === 0 && Number.isInteger(value) ? 0 : Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${units[unit]}`;
}

/** 1234567 -> "1.23 M". */
export const count = (value) => (value == null ? NONE : scaled(value, 1000, ["", " k", " M", " G", " T"]));
/** 1536 -> "1.50 KiB". */
export const bytes = (value) => (value == null ? NONE : scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]));
/** 0.00031 -> "310 µs". */
export function seconds(value) {
  if (value == null) return NONE;
  if (value < 1e-3) return scaled(value * 1e6, 1e9, [" µs"]);
  return value < 1 ? scaled(value * 1e3, 1e9, [" ms"]) : scaled(value, 1e9, [" s"]);
}
/** 0.987 -> "98.7 %". */
export const percent = (value) => (value == null ? NONE : `${(100 * value).toFixed(value > 0 && value < 0.001 ? 2 : 1)} %`);

/** The values that an axis names: 0, and up to the next 1, 2 or 5 times a power of ten. */
export function ticks(most) {
  if (most <= 0) return [0, 1];
  const power = 10 ** Math.floor(Math.log10(most));
  const top = power * [1, 2, 5, 10].find((step) => step * power >= most * (1 - 1e-9));
  return [0, top / 2, top];
}

/** Where a value lies in a chart, downwards; half a line of text is left free at either end. */
export const height = (value, ticks, most) => most - 6 - (value / ticks.at(-1)) * (most - 12);

/** The line of a chart, cut where there is no value: [[[x, y], ...], ...]. points: [[seconds ago, value]]; now is at the right end. */
export function segments(points, span, ticks, width, most) {
  const found = [[]];
  for (const [ago, value] of points) {
    if (value == null) found.push([]);
    else found.at(-1).push([width * (1 - ago / span), height(value, ticks, most)]);
  }
  return found.filter((segment) => segment.length);
}

const LOOKUPS = { protocol: ["v1", "v2", "grpc"] };
const NOT_ANSWERED = { ...LOOKUPS, outcome: ["unavailable", "failed"] };

/** What the tiles and charts show, of two looks that are `elapsed` seconds apart. */
export function overview(before, now, elapsed) {
  const rate = (name, wanted) => grown(before, now, name, wanted) / elapsed;
  const asked = grown(before, now, "tableside_request_seconds_count", LOOKUPS);
  const ok = { ...LOOKUPS, outcome: "ok" };
  return {
    requests: rate("tableside_request_seconds_count", LOOKUPS),
    ids: rate("tableside_ids_total"),
    p50: quantile(before, now, "tableside_request_seconds", 0.5, ok),
    p99: quantile(before, now, "tableside_request_seconds", 0.99, ok),
    notAnswered: fraction(grown(before, now, "tableside_request_seconds_count", NOT_ANSWERED), asked),
    refused: rate("tableside_request_seconds_count", { ...LOOKUPS, outcome: "refused" }),
    inFlight: total(now, "tableside_in_flight_requests"),
    hits: fraction(grown(before, now, "tableside_cache_hits_total"), grown(before, now, "tableside_cache_ids_total")),
    hasCache: now.has("tableside_cache_ids_total"),
    cores: rate("tableside_cpu_seconds_total"),
  };
}

/** Why a model is behind what is live; "" where it is not. untaken: a live version that is not served, or nothing. */
function lagOf(model, untaken) {
  if (untaken) return `version ${untaken} is live and not taken`;
  return model.behind_seconds >= 1 ? `the state that answers is ${Math.round(model.behind_seconds)} s behind the live one` : "";
}

/** Where a table's rows came from: [[tier, share]]. */
function tiers(model, table, before, now) {
  const [wanted, cached] = [{ model, table }, { table: `${model}/${table}` }];
  const hits = grown(before, now, "tableside_cache_hits_total", cached);
  const found = total(now, "tableside_cache_ids_total", cached) ? [["cache", fraction(hits, grown(before, now, "tableside_cache_ids_total", cached))]] : [];
  const add = (name, label, kinds) => {
    if (!total(now, name, wanted)) return;
    const all = grown(before, now, name, wanted);
    for (const [tier, of] of Object.entries(kinds)) found.push([tier, fraction(grown(before, now, name, { ...wanted, [label]: of }), all)]);
  };
  add("tableside_hot_ids_total", "hot", { hot: "yes" });
  add("tableside_disk_rows_total", "source", { memory: ["in_place", "page_cache"], disk: "disk", "not read": ["late", "failed", "corrupt"] });
  add("tableside_remote_rows_total", "outcome", { elsewhere: "came", "did not come": ["late", "gone", "corrupt"] });
  return found;
}

/** What a card of a model shows. */
export function ofModel(model, before, now, elapsed) {
  const wanted = { model: model.name };
  const served = total(now, "tableside_version", wanted);
  const live = total(now, "tableside_live_version", wanted);
  return {
    requests: grown(before, now, "tableside_requests_total", { ...wanted, outcome: "ok" }) / elapsed,
    refused: grown(before, now, "tableside_requests_total", { ...wanted, outcome: "refused" }) / elapsed,
    ids: grown(before, now, "tableside_ids_total", wanted) / elapsed,
    p99: quantile(before, now, "tableside_request_seconds", 0.99, { ...wanted, ...LOOKUPS, outcome: "ok" }),
    lookup: mean(before, now, "tableside_stage_seconds", { ...wanted, stage: "lookup" }),
    lag: lagOf(model, live !== served && live),
    tables: model.tables.map((table) => ({
      ...table,
      tiers: tiers(model.name, table.name, before, now),
      withoutRow: grown(before, now, "tableside_ids_without_row_total", { ...wanted, table: table.name }) / elapsed,
    })),
  };
}
