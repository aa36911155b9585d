"use strict";
// Main script: tabs, keyboard shortcuts, the address, and polling the server every two seconds.

const EVERY = 2000; // ms between two polls
const TABS = Object.keys(views).filter((name) => !(isReport && views[name].needsServer));
const app = document.getElementById("app");
const banner = document.getElementById("banner");
let activeView = null; // the view on the screen
let headState = ""; // the state that the head was rendered from

const theme = button([], () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  remember("theme", document.documentElement.dataset.theme);
  drawHead();
}, { class: "round", id: "theme" });
const chips = h("div", { class: "chips", "aria-label": "selected runs" });
const tabs = document.getElementById("tabs");
document.getElementById("tools").append(chips, theme);

function drawHead() {
  const state = JSON.stringify([place.view, location.hash, ticked(), isDark()]);
  if (state === headState) return; // rerendering would lose a pressed button or the focus
  headState = state;
  const focused = tabs.contains(document.activeElement);
  put(tabs, TABS.map((name, i) =>
    h("a", { href: addressOf(name, {}), "aria-current": name === place.view ? "page" : null, title: `${views[name].title} (key ${i + 1})` }, views[name].title)));
  put(chips, ticked().map((id) => h("span", { class: "chip", title: id }, dot(id), h("span", {}, id))));
  put(theme, icon(isDark() ? "sun" : "moon"));
  theme.setAttribute("aria-label", isDark() ? "light theme" : "dark theme");
  const current = tabs.querySelector("[aria-current]");
  if (focused) current.focus();
  if (current.offsetLeft + current.offsetWidth > tabs.clientWidth) tabs.scrollLeft = current.offsetLeft;
  document.title = [views[place.view].title, place.view === "runs" ? null : mainRun(), "gesso"].filter(Boolean).join(" · ");
}

function draw() {
  readPlace();
  drawHead();
  if (activeView && activeView.leave) activeView.leave();
  const changed = activeView !== views[place.view];
  activeView = views[place.view];
  app.className = `view-${place.view}`;
  if (!runs.size && place.view !== "runs") app.replaceChildren(emptyFolder());
  else activeView.show(app);
  if (changed) scrollTo(0, 0);
}

async function pollRuns() {
  let table;
  try {
    table = await load("/api/runs");
  } catch (error) {
    if (!banner.hidden) return;
    banner.textContent = error instanceof RequestError
      ? `The server rejected the request: ${error.message}.`
      : "The server does not respond. The page shows the last data and reconnects when `gesso view` is running again.";
    banner.hidden = false;
    return;
  }
  if (!banner.hidden) banner.hidden = true;
  const before = new Map(runs), empty = !runs.size;
  const rows = new Map(table.map((row) => [row.id, row]));
  const order = [...[...rows.keys()].filter((id) => !before.has(id)), ...before.keys()]; // rows keep their order
  runs.clear();
  for (const id of order) if (rows.has(id)) runs.set(id, rows.get(id));
  const differs = (id) => JSON.stringify(before.get(id)) !== JSON.stringify(runs.get(id));
  if (empty && runs.size) draw();
  else if (activeView && activeView.everything ? before.size !== runs.size || [...runs.keys()].some(differs) : [...ticked(), mainRun()].some((id) => id && differs(id))) {
    drawHead();
    await activeView.refresh();
  }
}

async function watch() {
  for (;;) {
    await new Promise((done) => { setTimeout(done, EVERY); });
    if (document.hidden) await new Promise((done) => { document.addEventListener("visibilitychange", done, { once: true }); });
    await pollRuns();
  }
}

function isTyping(target) {
  return target.matches("textarea, select, input:not([type=checkbox]):not([type=radio]):not([type=range])");
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  const tab = TABS[Number(event.key) - 1];
  if (tab) go(tab);
  else if (activeView && activeView.key && activeView.key(event)) event.preventDefault();
});

document.getElementById("skip").addEventListener("click", () => app.focus());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHead);
addEventListener("hashchange", draw);

async function start() {
  await pollRuns();
  if (!activeView) draw();
  document.documentElement.dataset.ready = "";
  if (!isReport) watch();
}

start();
