"use strict";
// The table of runs: their state, and the selection of runs to view and compare.

const COLUMNS = [
  { name: "run", title: "Run", of: (r) => r.id },
  { name: "algorithm", title: "Algorithm", of: (r) => r.algorithm },
  { name: "model", title: "Model", of: (r) => r.model },
  { name: "reward", title: "Reward", of: (r) => r.reward, number: true },
  { name: "held", title: "Held-out", of: (r) => r.held_out.now, number: true },
  { name: "step", title: "Step", of: (r) => (r.steps ? r.step / r.steps : r.step), number: true },
  { name: "speed", title: "Samples/s", of: (r) => r.samples_per_s, number: true },
  { name: "left", title: "Time", of: (r) => r.left, number: true },
  { name: "health", title: "Health", of: (r) => Object.keys(HEALTH).indexOf(healthOf(r)) },
  { name: "spark", title: "Reward over training", of: (r) => r.changed, plain: true },
];
const STATES = { running: "running", finished: "finished", stopped: "stopped", unknown: "another version" };
const HEALTH = { red: "problem", amber: "warning", green: "healthy", unknown: "unknown" }; // worst first

const runsView = { sort: null, up: true, filter: "", open: new Set() };

views.runs = {
  title: "Runs",
  show(root) {
    runsView.root = root;
    if (!runs.size) {
      root.replaceChildren(emptyFolder());
      return;
    }
    runsView.first = h("section", { class: "first" });
    runsView.table = h("div", { class: "table-frame" });
    const search = h("input", {
      type: "search", placeholder: "Filter by name, algorithm, model …", "aria-label": "filter runs",
      value: runsView.filter, oninput: (e) => { runsView.filter = e.target.value; drawTable(); },
    });
    root.replaceChildren(
      runsView.first,
      h("div", { class: "bar" }, h("h2", {}, "All runs"), h("span", { class: "count" }), h("span", { class: "grow" }), search, reportButton()),
      runsView.table,
    );
    drawTable();
    drawFirst();
  },
  refresh() {
    if (!runsView.table || !runs.size !== !runsView.table.isConnected) this.show(runsView.root);
    else {
      drawTable();
      drawFirst();
    }
  },
  everything: true, // refresh when any run changes, not only the selected ones
};

function emptyFolder() {
  return h("div", { class: "empty large" },
    h("h1", {}, "No runs yet"),
    h("p", {}, "Start a run; it appears here automatically:"),
    h("pre", { class: "command" }, "gesso train demo"),
    h("p", { class: "soft" }, "This trains a bundled image model to render legible words. It takes minutes on two CPU cores and needs no GPU and no downloads."));
}

function reportButton() {
  if (isReport) return null;
  const href = address("report", ticked().map((id) => ["run", id]));
  return h("a", { class: "button", href, download: "", title: "download the selected runs as one HTML file" }, icon("down"), "Report");
}

function drawTable() {
  const { sort, up, filter } = runsView;
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const textOf = (r) => [r.id, r.recipe, r.about, r.algorithm, r.model, r.state, r.health.level].join(" ").toLowerCase();
  let rows = [...runs.values()].filter((r) => words.every((w) => textOf(r).includes(w)));
  const by = COLUMNS.find((c) => c.name === sort);
  if (by) rows = rows.sort((a, b) => compare(by.of(a), by.of(b), up));
  const focus = document.activeElement && document.activeElement.dataset.keep;
  const head = h("tr", {}, h("th", { class: "tick" }, h("span", { class: "visually-hidden" }, "Compare")), COLUMNS.map(headCell));
  const body = rows.flatMap(tableRow);
  if (!rows.length) body.push(h("tr", {}, h("td", { colspan: COLUMNS.length + 1, class: "soft" }, "No runs match the filter.")));
  runsView.table.replaceChildren(h("table", { class: "runs" }, h("thead", {}, head), h("tbody", {}, body)));
  runsView.root.querySelector(".count").textContent = rows.length === runs.size ? plural(runs.size, "run") : `${rows.length} of ${plural(runs.size, "run")}`;
  if (focus) for (const node of runsView.table.querySelectorAll("[data-keep]")) if (node.dataset.keep === focus) node.focus();
}

// Unknown values come last in both sort orders.
function compare(a, b, up) {
  if (a === b) return 0;
  if (a === null) return 1;
  if (b === null) return -1;
  return a < b === up ? -1 : 1;
}

function headCell({ name, title, number, plain }) {
  if (plain) return h("th", { class: `c-${name}` }, title);
  const chosen = runsView.sort === name;
  const sorted = chosen ? (runsView.up ? "ascending" : "descending") : "none";
  const pick = () => {
    if (!chosen) [runsView.sort, runsView.up] = [name, !number];
    else if (runsView.up !== !number) runsView.sort = null; // third click: newest first again
    else runsView.up = !runsView.up;
    drawTable();
  };
  const arrow = chosen ? h("span", { class: "arrow", "aria-hidden": "true" }, runsView.up ? "↑" : "↓") : null;
  return h("th", { class: `c-${name} ${number ? "number" : ""}`, "aria-sort": sorted, scope: "col" },
    button([title, arrow], pick, { class: "sort", "data-keep": `sort ${name}` }));
}

function tableRow(r) {
  const marked = ticked().includes(r.id), open = runsView.open.has(r.id);
  const tick = h("input", {
    type: "checkbox", checked: marked, "aria-label": `compare ${r.id}`, "data-keep": `tick ${r.id}`,
    vars: { "accent-color": marked ? colour(r.id) : "" }, onchange: () => setTicked(r.id, !marked),
  });
  const toggle = () => {
    if (open) runsView.open.delete(r.id);
    else runsView.open.add(r.id);
    drawTable();
  };
  const held = r.held_out;
  const cells = {
    run: h("div", { class: "name" },
      h("a", { href: addressOf("evolution", { run: r.id, tick: marked ? ticked() : [...ticked(), r.id] }), "data-keep": `open ${r.id}` }, r.id),
      r.recipe || r.about ? h("small", { title: r.about }, [r.recipe, r.about].filter(Boolean).join(" · ")) : null),
    algorithm: r.algorithm || "–",
    model: h("span", { class: "model", title: r.model }, r.model || "–"),
    reward: [figure(r.reward), h("small", {}, `best ${figure(r.best)}`)],
    held: held.now === null ? "–" : h("span", { title: held.key }, h("span", { class: "from" }, figure(held.first)), h("span", { class: "arrow" }, "→"), h("b", {}, figure(held.now))),
    step: [h("span", {}, r.steps === null ? String(r.step) : `${r.step} / ${r.steps}`), progressBar(r)],
    speed: figure(r.samples_per_s),
    left: r.state === "running" ? `${clock(r.left)} left` : h("span", { class: "soft" }, `took ${clock(r.seconds)}`),
    health: button([h("i", { class: `health ${healthOf(r)}`, "aria-hidden": "true" }), HEALTH[healthOf(r)], h("small", {}, STATES[r.state])],
      toggle, { class: "state", "aria-expanded": String(open), "data-keep": `health ${r.id}`, title: r.health.sentences[0] || "no active warnings" }),
    spark: sparkline(r.spark, marked ? colour(r.id) : "var(--soft)", 128, 30, `reward over training, now ${figure(r.reward)}`),
  };
  const row = h("tr", { class: marked ? "marked" : "", "data-run": r.id }, h("td", { class: "tick" }, tick),
    COLUMNS.map(({ name, title, number }) => h("td", { class: `c-${name} ${number ? "number" : ""}`, "data-title": title }, cells[name])));
  return open ? [row, h("tr", { class: "more" }, h("td", { colspan: COLUMNS.length + 1 }, healthDetails(r)))] : [row];
}

// For a run of another version, the absence of warnings has no meaning.
const healthOf = (r) => (r.state === "unknown" && r.health.level === "green" ? "unknown" : r.health.level);

function healthDetails(r) {
  const messages = r.health.sentences.length ? r.health.sentences : ["No active warnings."];
  return h("div", { class: "health-details" }, messages.map((t) => h("p", {}, t)), h("a", { href: addressOf("notes", { run: r.id }) }, "Notes and config"));
}

function progressBar(r) {
  const share = r.steps ? Math.min(1, r.step / r.steps) : 0;
  return h("div", { class: `progress ${r.state}`, role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-label": `steps of ${r.id}` },
    h("i", { vars: { width: `${100 * share}%` } }));
}

function setTicked(id, on) {
  const next = on ? [...ticked(), id] : ticked().filter((one) => one !== id);
  go("runs", { tick: next, run: next.includes(mainRun()) ? mainRun() : next[0] });
}

// Overview of the main run: its state, and a few prompts before and after training.
async function drawFirst() {
  const id = mainRun(), r = runs.get(id);
  const held = r.held_out.now !== null;
  const [from, to] = held ? [r.held_out.first, r.held_out.now] : [null, r.reward];
  const what = held ? (r.held_out.key.endsWith("/exact") ? "fraction of held-out prompts with an exact match" : "held-out reward") : "training reward";
  const numbers = h("div", { class: "numbers" },
    from === null ? null : [h("span", { class: "from" }, figure(from)), h("span", { class: "to" }, "→")], h("span", { class: "now" }, figure(to)));
  const about = h("div", { class: "first-about" },
    h("p", { class: "kicker" }, h("i", { class: `live ${r.state}`, "aria-hidden": "true" }), stateText(r)),
    h("h1", {}, id), h("p", { class: "soft" }, r.about), numbers, h("p", { class: "soft" }, what),
    h("p", { class: "first-links" }, h("a", { class: "button strong", href: addressOf("evolution", { run: id }) }, "Evolution"), h("a", { class: "button", href: addressOf("curves", {}) }, "Curves")));
  const old = runsView.first.querySelector(".first-wall");
  runsView.first.replaceChildren(about, old && old.dataset.run === id ? old : h("div", { class: "first-wall" }));
  let evolution;
  try {
    evolution = await loadOnce("/api/evolution", { run: id });
  } catch {
    return; // the table shows what is wrong with the run
  }
  const pairs = firstWall(id, evolution);
  const wall = h("div", { class: "first-wall", "data-run": id }, h("div", { class: "pairs" }, pairs),
    pairs.length ? h("p", { class: "soft small" }, `Out of ${plural(evolution.prompts.length, "prompt")}, those with the largest reward gain; same seeds before and after.`) : null);
  const stamp = `${evolution.steps.length}`;
  const present = runsView.first.querySelector(".first-wall");
  if (present && (present.dataset.stamp !== stamp || present.dataset.run !== id)) {
    wall.dataset.stamp = stamp;
    present.replaceWith(wall);
  }
}

function stateText(r) {
  if (r.state === "running") return `running, step ${r.step} of ${r.steps}${r.left === null ? "" : `, ${clock(r.left)} left`}`;
  if (r.state === "unknown") return `written by another version, ${plural(r.step, "step")}`;
  return `${r.state} at step ${r.step} of ${r.steps} after ${clock(r.seconds)}`;
}

// The six prompts with the largest reward gain.
function firstWall(run, evolution) {
  const last = evolution.steps.length - 1;
  if (last < 1) return [];
  const gain = (p) => (p.cells[0] && p.cells[last] ? (p.cells[last].reward ?? 0) - (p.cells[0].reward ?? 0) : -Infinity);
  const best = [...evolution.prompts].sort((a, b) => gain(b) - gain(a)).slice(0, 6).filter((p) => gain(p) > -Infinity);
  return best.map((p) => {
    const ends = [0, last].map((i) => {
      const cell = p.cells[i];
      const what = cell.image
        ? mediaNode(run, cell, `${p.prompt}, step ${evolution.steps[i]}`, evolution.size)
        : h("span", { class: "response" }, cell.response || "empty");
      return h("figure", {}, what, h("figcaption", {}, h("span", {}, `step ${evolution.steps[i]}`), rewardOf(cell)));
    });
    const promptImage = p.shown.length ? imageNode(run, p.shown[0], `image of the prompt ${p.prompt}`, 96, null, { class: "prompt-image" }) : null;
    return h("a", { class: p.shown.length ? "pair with-image" : "pair", href: addressOf("evolution", { run, prompt: p.index }), title: p.prompt, vars: shapeOf(evolution) },
      h("span", { class: "pair-prompt" }, promptImage, h("span", {}, p.prompt)), h("div", { class: "two" }, ends));
  });
}
