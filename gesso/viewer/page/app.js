"use strict";
// Puts the page together: tabs, keys, the address, and news from the server every two seconds.

const EVERY = 2000; // ms between two questions for news
const TABS = Object.keys(views).filter((name) => !(isReport && views[name].needsServer));
const app = document.getElementById("app");
const banner = document.getElementById("banner");
let shown = null; // the view on the screen
let drawn = ""; // what the head was made from

const theme = button([], () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  remember("theme", document.documentElement.dataset.theme);
  drawHead();
}, { class: "round", id: "theme" });
const chips = h("div", { class: "chips", "aria-label": "ticked runs" });
const tabs = document.getElementById("tabs");
document.getElementById("tools").append(chips, theme);

function drawHead() {
  const from = JSON.stringify([place.view, location.hash, ticked(), isDark()]);
  if (from === drawn) return; // a press or the focus must not be lost to news
  drawn = from;
  const focused = tabs.contains(document.activeElement);
  put(tabs, TABS.map((name, i) =>
    h("a", { href: addressOf(name, {}), "aria-current": name === place.view ? "page" : null, title: `${views[name].title} (key ${i + 1})` }, views[name].title)));
  put(chips, ticked().map((id) => h("span", { class: "chip", title: id }, dot(id), h("span", {}, id))));
  put(theme, icon(isDark() ? "sun" : "moon"));
  theme.setAttribute("aria-label", isDark() ? "light colours" : "dark colours");
  const current = tabs.querySelector("[aria-current]");
  if (focused) current.focus();
  if (current.offsetLeft + current.offsetWidth > tabs.clientWidth) tabs.scrollLeft = current.offsetLeft;
  document.title = [views[place.view].title, place.view === "runs" ? null : mainRun(), "gesso"].filter(Boolean).join(" · ");
}

function draw() {
  readPlace();
  drawHead();
  if (shown && shown.leave) shown.leave();
  const changed = shown !== views[place.view];
  shown = views[place.view];
  app.className = `view-${place.view}`;
  if (!runs.size && place.view !== "runs") app.replaceChildren(emptyFolder());
  else shown.show(app);
  if (changed) scrollTo(0, 0);
}

async function news() {
  let table;
  try {
    table = await load("/api/runs");
  } catch (error) {
    if (!banner.hidden) return;
    banner.textContent = error instanceof Refused
      ? `The server refuses: ${error.message}.`
      : "The server does not answer. What is here stays; the page goes on by itself when `gesso view` is back.";
    banner.hidden = false;
    return;
  }
  if (!banner.hidden) banner.hidden = true;
  const before = new Map(runs), empty = !runs.size;
  const rows = new Map(table.map((row) => [row.id, row]));
  const order = [...[...rows.keys()].filter((id) => !before.has(id)), ...before.keys()]; // rows do not jump
  runs.clear();
  for (const id of order) if (rows.has(id)) runs.set(id, rows.get(id));
  const differs = (id) => JSON.stringify(before.get(id)) !== JSON.stringify(runs.get(id));
  if (empty && runs.size) draw();
  else if (shown && shown.everything ? before.size !== runs.size || [...runs.keys()].some(differs) : [...ticked(), mainRun()].some((id) => id && differs(id))) {
    drawHead();
    await shown.refresh();
  }
}

async function watch() {
  for (;;) {
    await new Promise((done) => { setTimeout(done, EVERY); });
    if (document.hidden) await new Promise((done) => { document.addEventListener("visibilitychange", done, { once: true }); });
    await news();
  }
}

function isTyping(target) {
  return target.matches("textarea, select, input:not([type=checkbox]):not([type=radio]):not([type=range])");
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  const tab = TABS[Number(event.key) - 1];
  if (tab) go(tab);
  else if (shown && shown.key && shown.key(event)) event.preventDefault();
});

document.getElementById("skip").addEventListener("click", () => app.focus());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHead);
addEventListener("hashchange", draw);

async function start() {
  await news();
  if (!shown) draw();
  document.documentElement.dataset.ready = "";
  if (!isReport) watch();
}

start();
