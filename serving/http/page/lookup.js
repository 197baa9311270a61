// A lookup to try: its request, its answer, and the lines that send it from a shell and from Python.

import { card, element, fill } from "./elements.js";

const TOKEN = /"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g;
const MOST = 4000; // characters of an answer that are shown

/** JSON whose integers may have 64 bits: those that a double lacks become strings that begin with a NUL. */
export const exact = (json) => JSON.parse(json.replace(TOKEN, (token) => (/^-?\d{16,}$/.test(token) ? `"\\u0000${token}"` : token)));

/** What `exact` read, as JSON. */
const written = (value) => JSON.stringify(value).replace(/"\\u0000(-?\d+)"/g, "$1");

/** The line that sends a request from a shell. */
export const curlLine = (origin, json) => `curl -s ${origin}/v1/lookup -d '${json.replaceAll("'", "'\\''")}'`;

/** The lines that send it from Python; of requests with lists of bags. */
export function pythonLines(origin, json) {
  const { model, features, version, found } = exact(json);
  const more = [version == null ? "" : `, version=${version}`, found ? ", found=True" : ""].join("");
  return `from tableside import Client\nprint(Client(${written(origin)}).lookup(${written(model)}, ${written(features)}${more}))`;
}

function pythonOf(json) {
  try {
    return pythonLines(location.origin, json);
  } catch (error) {
    return `# ${error.message}`;
  }
}

async function lookUp(json) {
  const headers = { "content-type": "application/json" };
  const answer = await fetch("/v1/lookup", { method: "POST", body: json, headers, signal: AbortSignal.timeout(30000) });
  const text = await answer.text();
  return `${answer.status} ${text.length > MOST ? `${text.slice(0, MOST)} ... (${text.length} characters)` : text}`;
}

let shownOf = null; // which models; what is typed stays while they do

/** Shows a lookup of the models that have an example. */
export function showLookups(models) {
  const shown = models.filter((model) => model.example);
  const names = JSON.stringify(shown.map((model) => model.name));
  if (names === shownOf) return;
  shownOf = names;
  fill("lookup", shown.length ? lookupCard(shown) : null);
}

function lookupCard(models) {
  const choice = element("select", { "aria-label": "model" }, ...models.map((model) => element("option", {}, model.name)));
  const request = element("textarea", { rows: 3, spellcheck: "false", "aria-label": "request" });
  const send = element("button", { type: "button" }, "Look up");
  const answer = element("pre", { role: "status" });
  const [curl, python] = [element("pre"), element("pre")];
  const told = () => {
    curl.textContent = curlLine(location.origin, request.value);
    python.textContent = pythonOf(request.value);
  };
  const choose = () => {
    request.value = written(models[choice.selectedIndex].example);
    told();
  };
  choice.addEventListener("change", choose);
  request.addEventListener("input", told);
  send.addEventListener("click", async () => {
    answer.textContent = await lookUp(request.value).catch((error) => `no answer: ${error.message}`);
  });
  choose();
  return card("A lookup to try", element("div", { class: "head" }, choice, element("code", { class: "soft" }, "POST /v1/lookup"), send), request, answer, curl, python);
}
