"use strict";
// Shared by all views: elements, numbers as text, server requests, the address, the theme.
// The live page and the report use the same scripts; the report embeds the server's responses.
// Text from runs is only inserted as text nodes; no script parses a string as HTML.

const views = {}; // name → {title, show(root), refresh(), key(event), leave()}

// Elements -----------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name in DIRECT) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

const DIRECT = { value: 1, checked: 1, disabled: 1, hidden: 1, indeterminate: 1 };
const h = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);
const s = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);

function put(node, ...children) {
  node.replaceChildren();
  return fill(node, {}, children);
}

const ICONS = {
  play: "M7 4.5v15l13-7.5z",
  pause: "M6 4.5h4.5v15H6zM13.5 4.5H18v15h-4.5z",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  down: "M12 4v11m-5-5 5 5 5-5M5 20h14",
  sun: "M12 7.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9zM12 2v2.5m0 15V22M2 12h2.5m15 0H22M5 5l1.7 1.7m10.6 10.6L19 19M5 19l1.7-1.7M17.3 6.7 19 5",
  moon: "M20 14.5A8.2 8.2 0 0 1 9.5 4 8.2 8.2 0 1 0 20 14.5z",
  tick: "M5 12.5l4.5 4.5L19 7.5",
  cross: "M6.5 6.5l11 11m0-11l-11 11",
};
const SOLID = { play: 1, pause: 1 };

function icon(name) {
  const path = s("path", { d: ICONS[name] });
  const kind = SOLID[name] ? "icon solid" : "icon";
  return s("svg", { class: kind, viewBox: "0 0 24 24", "aria-hidden": "true" }, path);
}

const button = (label, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, label);

// One of several options, side by side; radio buttons support the arrow keys.
let radios = 0;
function choice(label, options, chosen, onpick) {
  const name = `choice-${(radios += 1)}`;
  const items = options.map(([value, text, note]) =>
    h("label", { title: note },
      h("input", {
        type: "radio", name, value, checked: value === chosen, onchange: () => onpick(value),
      }),
      h("span", {}, text)));
  return h("fieldset", { class: "choice" }, h("legend", { class: "visually-hidden" }, label), items);
}

const emptyState = (...texts) => h("div", { class: "empty" }, texts.map((t) => h("p", {}, t)));
const loading = () => h("div", { class: "loading", role: "status" }, "Loading the run …");

// Numbers as text ----------------------------------------------------------------------------

function figure(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size === 0) return "0";
  const sign = x < 0 ? "−" : "";
  if (size < 1e-3 || size >= 1e7) return sign + size.toExponential(1).replace("e-", "e−").replace("e+", "e");
  if (size >= 1000) return sign + size.toLocaleString("en", { maximumFractionDigits: 0 });
  return sign + size.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 3);
}

function clock(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const percent = (x) => `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)}%`;
const plural = (n, one, more = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : more}`;

function change(from, to) {
  if (from === null || to === null || from === undefined || to === undefined) return null;
  const by = to - from;
  if (Math.abs(by) < 5e-4) return null;
  const direction = by > 0 ? "up" : "down";
  return h("span", { class: `change ${direction}` }, `${by > 0 ? "▲" : "▼"} ${figure(Math.abs(by))}`);
}

// Server requests ----------------------------------------------------------------------------

const inside = document.getElementById("inside") && JSON.parse(document.getElementById("inside").textContent);
const isReport = Boolean(inside);
const embedded = new Map();
if (isReport) {
  for (const [at, answer] of Object.entries(inside.answers)) {
    const [path, query] = at.split("?");
    embedded.set(address(path, Object.fromEntries(new URLSearchParams(query || ""))), answer);
  }
}

function address(path, params = {}) {
  const query = new URLSearchParams(params).toString();
  return query ? `${path}?${query}` : path;
}

class RequestError extends Error {}

async function load(path, params = {}) {
  if (isReport) {
    const { keys, ...rest } = params; // the file has all keys of a run's curves
    const answer = embedded.get(address(path, rest));
    if (answer === undefined) throw new RequestError("not included in this report");
    return answer;
  }
  return parsed(await fetch(address(path.slice(1), params)));
}

async function parsed(response) {
  const kind = response.headers.get("content-type") || "";
  const body = kind.startsWith("application/json") ? await response.json() : await response.text();
  if (response.ok) return body;
  throw new RequestError(body.error || (typeof body === "string" && body) || `HTTP status ${response.status}`);
}

// Responses are cached until the run has changed.
const cache = new Map();
function loadOnce(path, params) {
  const run = runs.get(params.run);
  const stamp = run ? `${run.step} ${run.changed}` : "";
  const at = address(path, params);
  const cached = cache.get(at);
  if (cached && cached.stamp === stamp) return cached.answer;
  const answer = load(path, params);
  cache.set(at, { stamp, answer });
  answer.catch(() => cache.delete(at));
  if (cache.size > 60) cache.delete(cache.keys().next().value);
  return answer;
}

const WIDTHS = [96, 192, 384]; // thumbnails of the server; a report has the largest

function widthFor(displayWidth) {
  return isReport ? 384 : WIDTHS.find((w) => w >= displayWidth * Math.min(devicePixelRatio, 2));
}

// `size`: [width, height] of the image; small images are sent unscaled.
function imageUrl(run, name, displayWidth, size) {
  if (isReport) return (inside.images[run] || {})[name] || "";
  const width = size && size[0] <= WIDTHS[2] ? undefined : widthFor(displayWidth);
  return address("image", width ? { run, name, width } : { run, name });
}

// `size`: [width, height] of the image, if known. Small images are magnified without smoothing.
const TINY = 160;
function imageNode(run, name, alt, displayWidth, size, props = {}) {
  const img = h("img", { alt, loading: "lazy", decoding: "async", draggable: "false", ...props });
  if (size) {
    img.width = size[0];
    img.height = size[1];
    if (Math.max(...size) <= TINY) img.classList.add("pixels");
  }
  img.addEventListener("error", () => img.replaceWith(unreadable(alt)));
  img.addEventListener("load", () => {
    const original = img.naturalWidth < (widthFor(displayWidth) || Infinity); // not a thumbnail
    if (original && Math.max(img.naturalWidth, img.naturalHeight) <= TINY) img.classList.add("pixels");
  });
  const url = imageUrl(run, name, displayWidth, size);
  if (!url) return unreadable(alt);
  img.src = url;
  return img;
}

// CSS variables of cells into which the samples of a run fit.
function shapeOf({ size }) {
  return size ? { "--ratio": `${size[0]} / ${size[1]}`, "--aspect": size[0] / size[1] } : {};
}

const unreadable = (alt) => h("div", { class: "unreadable", role: "img", "aria-label": `${alt}: cannot be read` }, "cannot be read");

// The address: #/view?run=…&tick=…&… ----------------------------------------------------------

const place = { view: "runs", params: new URLSearchParams() };

function readPlace() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  place.view = views[path] ? path : "runs";
  place.params = new URLSearchParams(query || "");
}

function addressOf(view, changes) {
  const params = new URLSearchParams();
  for (const id of ticked()) params.append("tick", id);
  if (place.params.has("run")) params.set("run", place.params.get("run"));
  for (const [name, value] of Object.entries(changes)) {
    params.delete(name);
    for (const one of [value].flat()) if (one !== null && one !== undefined) params.append(name, one);
  }
  const query = params.toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

const go = (view, changes = {}) => { location.hash = addressOf(view, changes); };

// Changes the address of the same view without a history entry.
function adjust(changes) {
  const current = Object.fromEntries([...place.params].filter(([k]) => k !== "tick"));
  history.replaceState(null, "", addressOf(place.view, { ...current, ...changes }));
  readPlace();
}

// Runs: all, the selected ones, their colours --------------------------------------------------

const runs = new Map(); // id → a row of the table, in its order
const COLOURS = 8;
let pinned; // the default run: the newest when the page was opened
const colours = new Map(); // id → its index in the palette, while it is selected

function ticked() {
  const requested = [...place.params.getAll("tick"), place.params.get("run")];
  const selected = [...new Set(requested)].filter((id) => runs.has(id)); // includes the main run
  if (selected.length) return selected;
  if (!runs.has(pinned)) [pinned] = runs.keys();
  return pinned === undefined ? [] : [pinned];
}

function colour(id) {
  const selected = ticked();
  if (!selected.includes(id)) return "var(--faint)";
  for (const other of [...colours.keys()]) if (!selected.includes(other)) colours.delete(other);
  if (!colours.has(id)) {
    const taken = new Set(colours.values());
    let free = 0;
    while (taken.has(free) && free < COLOURS - 1) free += 1;
    colours.set(id, free);
  }
  return `var(--run-${colours.get(id)})`;
}

// The run of views that show a single run.
function mainRun() {
  const requested = place.params.get("run");
  return runs.has(requested) ? requested : ticked()[0];
}

function runPicker() {
  const selected = new Set([...ticked(), mainRun()]);
  const pick = (id) => go(place.view, { run: id });
  const options = [...selected].map((id) => [id, [dot(id), id], runs.get(id).about]);
  if (options.length === 1) return h("span", { class: "the-run" }, dot(mainRun()), mainRun());
  return choice("Run", options, mainRun(), pick);
}

const dot = (id) => h("i", { class: "dot", vars: { "--c": colour(id) }, "aria-hidden": "true" });

// Calls `enter` with items whose `node` comes near the viewport and `leave` with those that leave it.
function whenNear(items, enter, leave = () => {}) {
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const item = items.find((t) => t.node === target);
      if (isIntersecting) enter(item);
      else leave(item);
    }
  }, { rootMargin: "300px" });
  for (const { node } of items) observer.observe(node);
  return observer;
}

// The theme and other stored settings ----------------------------------------------------------

function remembered(name) {
  try {
    return localStorage.getItem(`gesso-${name}`);
  } catch {
    return null; // storage may be disabled; then the default applies
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`gesso-${name}`, value);
  } catch {
    return; // as above
  }
}

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

if (remembered("theme")) document.documentElement.dataset.theme = remembered("theme");

const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function announce(text) {
  document.getElementById("announcer").textContent = text;
}
