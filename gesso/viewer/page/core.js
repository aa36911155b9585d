"use strict";
// What every view needs: elements, figures as text, the server's answers, the address, the theme.
// The same scripts make the live page and the report: there the answers lie inside the file.
// Text from runs becomes text nodes only; nothing here or elsewhere parses a string as HTML.

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

// One of several, shown side by side; arrow keys come with radio buttons.
let radios = 0;
function choice(label, options, chosen, onpick) {
  const name = `choice-${(radios += 1)}`;
  const items = options.map(([value, text, note]) =>
    h("label", { title: note },
      h("input", {
        type: "radio", name, value, checked: value === chosen, onchange: () => onpick(value),
      }),
      h("span", {}, text)));
  return h("fieldset", { class: "choice" }, h("legend", { class: "aside" }, label), items);
}

const nothing = (...told) => h("div", { class: "nothing" }, told.map((t) => h("p", {}, t)));
const loading = () => h("div", { class: "loading", role: "status" }, "Reading the run …");

// Figures as text ----------------------------------------------------------------------------

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
const many = (n, one, more = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : more}`;

function change(from, to) {
  if (from === null || to === null || from === undefined || to === undefined) return null;
  const by = to - from;
  if (Math.abs(by) < 5e-4) return null;
  const way = by > 0 ? "up" : "down";
  return h("span", { class: `change ${way}` }, `${by > 0 ? "▲" : "▼"} ${figure(Math.abs(by))}`);
}

// The server's answers -----------------------------------------------------------------------

const inside = document.getElementById("inside") && JSON.parse(document.getElementById("inside").textContent);
const isReport = Boolean(inside);
const answersInside = new Map();
if (isReport) {
  for (const [at, answer] of Object.entries(inside.answers)) {
    const [path, query] = at.split("?");
    answersInside.set(address(path, Object.fromEntries(new URLSearchParams(query || ""))), answer);
  }
}

function address(path, params = {}) {
  const query = new URLSearchParams(params).toString();
  return query ? `${path}?${query}` : path;
}

class Refused extends Error {}

async function load(path, params = {}) {
  if (isReport) {
    const { keys, ...asked } = params; // the file has all keys of a run's curves
    const found = answersInside.get(address(path, asked));
    if (found === undefined) throw new Refused("this report does not have it");
    return found;
  }
  return answered(await fetch(address(path.slice(1), params)));
}

async function answered(response) {
  const kind = response.headers.get("content-type") || "";
  const body = kind.startsWith("application/json") ? await response.json() : await response.text();
  if (response.ok) return body;
  throw new Refused(body.error || (typeof body === "string" && body) || `the server answered ${response.status}`);
}

// What was loaded stays until the run has changed.
const kept = new Map();
function loadOnce(path, params) {
  const run = runs.get(params.run);
  const stamp = run ? `${run.step} ${run.changed}` : "";
  const at = address(path, params);
  const known = kept.get(at);
  if (known && known.stamp === stamp) return known.answer;
  const answer = load(path, params);
  kept.set(at, { stamp, answer });
  answer.catch(() => kept.delete(at));
  if (kept.size > 60) kept.delete(kept.keys().next().value);
  return answer;
}

const WIDTHS = [96, 192, 384]; // that the server makes; a report has the largest

function widthFor(wanted) {
  return isReport ? 384 : WIDTHS.find((w) => w >= wanted * Math.min(devicePixelRatio, 2));
}

// `size`: the picture's own; what is small anyway is sent as it is.
function pictureUrl(run, name, wanted, size) {
  if (isReport) return (inside.pictures[run] || {})[name] || "";
  const width = size && size[0] <= WIDTHS[2] ? undefined : widthFor(wanted);
  return address("picture", width ? { run, name, width } : { run, name });
}

// `size`: the picture's own [width, height], where it is known. Small pictures are magnified crisply.
const TINY = 160;
function picture(run, name, alt, wanted, size, props = {}) {
  const img = h("img", { alt, loading: "lazy", decoding: "async", draggable: "false", ...props });
  if (size) {
    img.width = size[0];
    img.height = size[1];
    if (Math.max(...size) <= TINY) img.classList.add("pixels");
  }
  img.addEventListener("error", () => img.replaceWith(gone(alt)));
  img.addEventListener("load", () => {
    const own = img.naturalWidth < (widthFor(wanted) || Infinity); // not one that was made small
    if (own && Math.max(img.naturalWidth, img.naturalHeight) <= TINY) img.classList.add("pixels");
  });
  const url = pictureUrl(run, name, wanted, size);
  if (!url) return gone(alt);
  img.src = url;
  return img;
}

const gone = (alt) => h("div", { class: "gone", role: "img", "aria-label": `${alt}: cannot be read` }, "cannot be read");

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

// A new address for the same view, without a step in the history.
function adjust(changes) {
  const own = Object.fromEntries([...place.params].filter(([k]) => k !== "tick"));
  history.replaceState(null, "", addressOf(place.view, { ...own, ...changes }));
  readPlace();
}

// Runs: which there are, which are ticked, their colours -----------------------------------------

const runs = new Map(); // id → a line of the table, in its order
const COLOURS = 8;
let pinned; // the run that is shown while none is asked for: the newest when the page was opened
const colours = new Map(); // id → its place in the palette, as long as it is ticked

function ticked() {
  const asked = [...place.params.getAll("tick"), place.params.get("run")];
  const wanted = [...new Set(asked)].filter((id) => runs.has(id)); // the one shown is among them
  if (wanted.length) return wanted;
  if (!runs.has(pinned)) [pinned] = runs.keys();
  return pinned === undefined ? [] : [pinned];
}

function colour(id) {
  const shown = ticked();
  if (!shown.includes(id)) return "var(--faint)";
  for (const known of [...colours.keys()]) if (!shown.includes(known)) colours.delete(known);
  if (!colours.has(id)) {
    const taken = new Set(colours.values());
    let free = 0;
    while (taken.has(free) && free < COLOURS - 1) free += 1;
    colours.set(id, free);
  }
  return `var(--run-${colours.get(id)})`;
}

// The run that a view of one run shows.
function mainRun() {
  const asked = place.params.get("run");
  return runs.has(asked) ? asked : ticked()[0];
}

function runPicker() {
  const shown = new Set([...ticked(), mainRun()]);
  const pick = (id) => go(place.view, { run: id });
  const options = [...shown].map((id) => [id, [dot(id), id], runs.get(id).about]);
  if (options.length === 1) return h("span", { class: "the-run" }, dot(mainRun()), mainRun());
  return choice("Run", options, mainRun(), pick);
}

const dot = (id) => h("i", { class: "dot", vars: { "--c": colour(id) }, "aria-hidden": "true" });

// Calls `come` with what nears the screen and `go` with what leaves it: things that have a `node`.
function nearing(things, come, go = () => {}) {
  const eyes = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const thing = things.find((t) => t.node === target);
      if (isIntersecting) come(thing);
      else go(thing);
    }
  }, { rootMargin: "300px" });
  for (const { node } of things) eyes.observe(node);
  return eyes;
}

// The theme, and other small things to remember ------------------------------------------------

function remembered(name) {
  try {
    return localStorage.getItem(`gesso-${name}`);
  } catch {
    return null; // a browser may keep nothing for a page; then the default holds
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

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function say(text) {
  document.getElementById("said").textContent = text;
}
