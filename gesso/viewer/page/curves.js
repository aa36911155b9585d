"use strict";
// Figures over training, several runs over one another.

const AXES = [["step", "Steps"], ["samples", "Samples"], ["seconds", "Seconds"]];
const AXIS_NAMES = { step: "step", samples: "sample", seconds: "time" };
const SPREAD = ["reward/std", "reward/max", "reward/at_max"];
const TIMES = [["time/sample", "sampling"], ["time/score", "scoring"], ["time/wait", "waiting for scores"], ["time/update", "updating"], ["time/eval", "evaluating"]];
// title, what it tells, training key, held-out key
const KNOWN = {
  Update: [
    ["Ratio", "mean of new over old probability; on-policy it is 1", "update/ratio"],
    ["Clipped share", "of the terms that the clip cut", "update/clipped"],
    ["KL", "distance from the reference model", "update/kl"],
    ["|Δlogp|", "mean change of log-probability in an update", "update/abs_dlogp"],
    ["Largest |Δlogp|", "of any one term", "update/abs_dlogp_max"],
    ["Entropy", "of the tokens sampled", "update/entropy"],
    ["Gradient norm", "before it is cut", "update/grad_norm"],
    ["Learning rate", "", "update/lr"],
  ],
  "Spread of groups": [
    ["Spread of rewards", "standard deviation over the batch", "reward/std"],
    ["Flat groups", "share of groups whose samples all got the same reward: no gradient comes from them", "advantage/flat_groups"],
    ["At the best reward", "share of the samples", "reward/at_max"],
    ["Diversity", "how different the samples of one prompt are", "diversity"],
    ["|Advantage|", "mean over the batch", "advantage/abs_mean"],
  ],
  Responses: [
    ["Response length", "mean, in tokens", "response/length"],
    ["Longest response", "in tokens", "response/max_length"],
    ["Cut responses", "share that ran into the limit", "response/truncated"],
  ],
  "Speed and memory": [
    ["Samples a second", "", "samples_per_s"],
    ["Seconds a step", "", "time/step"],
  ],
};

const lines = { axis: "step", smooth: 0, log: false, table: false, cross: new Crosshair(), sections: [] };

views.curves = {
  title: "Curves",
  async show(root) {
    lines.root = root;
    const told = await details();
    if (shown !== this || !told) return;
    const panels = panelsOf(told);
    lines.names = JSON.stringify(panels);
    closeCharts();
    lines.sections = Object.entries(panels).filter(([, p]) => p.length).map(([title, p]) => new Section(title, p, told));
    const times = new TimeShares(told);
    const rest = lines.sections.filter((section) => section.title === "Everything else");
    const first = lines.sections.filter((section) => !rest.includes(section));
    put(root, curveTools(), first.map((section) => section.node), times.node, rest.map((section) => section.node));
    lines.sections.push(times);
    for (const section of lines.sections) section.watch();
  },
  async refresh() {
    const told = await details();
    if (shown !== this || !told) return;
    if (JSON.stringify(panelsOf(told)) !== lines.names) this.show(lines.root);
    else for (const section of lines.sections) section.reload();
  },
  leave: closeCharts,
};

function closeCharts() {
  for (const section of lines.sections) section.close();
  lines.sections = [];
}

async function details() {
  const found = await Promise.allSettled(ticked().map((run) => loadOnce("/api/run", { run })));
  const told = found.filter((f) => f.status === "fulfilled").map((f) => f.value);
  if (told.length) return told;
  if (shown === views.curves) put(lines.root, nothing("The curves cannot be shown.", found[0].reason.message));
  return null;
}

// Sections → panels of the keys that the ticked runs have; what no section knows comes last.
function panelsOf(told) {
  const keys = new Set(told.flatMap((t) => t.keys));
  const used = new Set([...SPREAD, ...TIMES.map(([key]) => key), "time/total", "time/overlap"]);
  const panel = (title, note, train, held) => {
    const own = [train, held].filter((key) => keys.has(key));
    own.forEach((key) => used.add(key));
    return own.length ? [{ title, note, train: keys.has(train) ? train : null, held: keys.has(held) ? held : null }] : [];
  };
  const parts = [...keys].map((key) => key.replace(/^(reward|eval)\//, "")).filter((part, i, all) => all.indexOf(part) === i)
    .filter((part) => keys.has(`reward/${part}`) && !SPREAD.includes(`reward/${part}`));
  const sections = { Reward: [...panel("Reward", "training and held-out", "reward", "eval/reward"), ...parts.flatMap((part) => panel(part, part.includes("/") ? `a detail of ${part.split("/")[0]}` : "a part of the reward", `reward/${part}`, `eval/${part}`))] };
  for (const [title, known] of Object.entries(KNOWN)) sections[title] = known.flatMap(([name, note, key]) => panel(name, note, key));
  const rest = [...keys].filter((key) => !used.has(key));
  sections["Speed and memory"].push(...rest.filter((key) => /mem/.test(key)).flatMap((key) => panel(key, "", key)));
  sections.Update.push(...rest.filter((key) => /kl/.test(key)).flatMap((key) => panel(key, "", key)));
  sections["Everything else"] = rest.filter((key) => !used.has(key)).flatMap((key) => panel(key, "", key));
  return sections;
}

function curveTools() {
  const redraw = () => { for (const section of lines.sections) section.draw(); };
  const weight = h("output", {}, String(lines.smooth));
  const smooth = h("label", { class: "smooth" }, h("span", { title: "a running mean over the training lines; held-out lines stay as they are" }, "Smoothing"), h("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, value: lines.smooth, "aria-label": "smoothing",
    oninput: (e) => {
      lines.smooth = Number(e.target.value);
      weight.textContent = lines.smooth.toFixed(2);
      redraw();
    },
  }), weight);
  const tick = (name, text, title) => h("label", { class: "check", title }, h("input", {
    type: "checkbox", checked: lines[name], onchange: (e) => {
      lines[name] = e.target.checked;
      redraw();
    },
  }), text);
  const held = h("span", { class: "legend" }, h("span", {}, h("i", { class: "key train" }), "training"), h("span", {}, h("i", { class: "key held" }), "held-out"));
  return h("div", { class: "bar curve-tools" }, h("h2", {}, "Curves"),
    h("span", { class: "legend" }, ticked().map((id) => h("span", {}, dot(id), id))), held, h("span", { class: "grow" }),
    choice("Against", AXES, lines.axis, (axis) => { lines.axis = axis; redraw(); }), smooth,
    tick("log", "Log scale", "of the figures that are above zero"), tick("table", "As tables", "the values under each chart"));
}

// Charts of one theme. Its figures are loaded when it comes near the screen.
class Section {
  constructor(title, panels, told) {
    Object.assign(this, { title, panels, runs: told.map((t) => t.id), data: new Map() });
    this.keys = panels.flatMap((p) => [p.train, p.held]).filter(Boolean);
    this.charts = panels.map((panel) => {
      const chart = new Chart(panel.title, lines.cross);
      const table = h("div", { class: "values" });
      const node = h("figure", { class: "panel", "data-key": panel.train || panel.held }, h("figcaption", {}, h("b", {}, panel.title), panel.note ? h("small", {}, panel.note) : null), chart.node, table);
      return { panel, chart, table, node };
    });
    const rest = title === "Everything else";
    this.body = h("div", { class: "panels" }, this.charts.map((c) => c.node));
    this.node = rest ? h("details", { class: "section" }, h("summary", {}, h("h3", {}, title)), this.body) : h("section", { class: "section" }, h("h3", {}, title), this.body);
  }

  watch() {
    this.eyes = nearing([{ node: this.body }], () => { this.eyes.disconnect(); this.reload(); });
  }

  async reload() {
    const found = await Promise.allSettled(this.runs.map((run) => loadOnce("/api/curves", { run, keys: this.keys.join(",") })));
    found.forEach((f, i) => { if (f.status === "fulfilled") this.data.set(this.runs[i], f.value.series); });
    this.draw();
  }

  draw() {
    for (const { panel, chart, table } of this.charts) {
      const own = this.runs.flatMap((run) => [["train", panel.train], ["held", panel.held]].flatMap(([kind, key]) => this.line(run, kind, key)));
      chart.xText = lines.axis === "seconds" ? clock : (v) => Math.round(v).toLocaleString("en");
      chart.xLabel = AXIS_NAMES[lines.axis];
      chart.set(own, lines.smooth, lines.log);
      put(table, lines.table ? valuesTable(panel.title, own, chart) : null);
    }
  }

  line(run, kind, key) {
    const series = key && (this.data.get(run) || {})[key];
    if (!series) return [];
    const there = series.y.map((_, i) => i).filter((i) => series[lines.axis][i] !== null);
    const pick = (column) => there.map((i) => column[i]);
    const name = [this.runs.length > 1 ? run : null, kind === "held" ? "held-out" : "training"].filter(Boolean).join(", ");
    return [{
      label: name, kind, colour: colour(run), x: pick(series[lines.axis]), y: pick(series.y),
      low: series.low ? pick(series.low) : null, high: series.high ? pick(series.high) : null,
    }];
  }

  close() {
    if (this.eyes) this.eyes.disconnect();
    for (const { chart } of this.charts) chart.close();
  }
}

const ROWS = 50; // of a table of values
function valuesTable(title, own, chart) {
  const xs = [...new Set(own.flatMap((l) => l.x))].sort((a, b) => a - b);
  const every = Math.ceil(xs.length / ROWS);
  const rows = xs.filter((_, i) => i % every === 0 || i === xs.length - 1);
  return h("table", { class: "plain-table" }, h("caption", { class: "aside" }, title),
    h("thead", {}, h("tr", {}, h("th", {}, chart.xLabel), own.map((l) => h("th", {}, l.label)))),
    h("tbody", {}, rows.map((x) => h("tr", {}, h("th", {}, chart.xText(x)), own.map((l) => {
      const i = l.x.length ? nearest(l.x, x) : -1;
      return h("td", {}, i >= 0 && l.x[i] === x ? figure(l.y[i]) : "");
    })))));
}

// Where the time of a step goes, a bar a run.
class TimeShares {
  constructor(told) {
    this.runs = told.map((t) => t.id);
    this.bars = h("div", { class: "shares" });
    this.node = h("section", { class: "section" }, h("h3", {}, "Where the time goes"), h("p", { class: "soft" }, "Mean seconds a step. Scoring happens while sampling goes on: only what is waited for costs time."), this.bars);
  }

  watch() {
    this.eyes = nearing([{ node: this.node }], () => { this.eyes.disconnect(); this.reload(); });
  }

  async reload() {
    const keys = [...TIMES.map(([key]) => key), "time/overlap"].join(",");
    const rows = await Promise.all(this.runs.map(async (run) => {
      const { series, step } = await loadOnce("/api/curves", { run, keys });
      const seconds = (key) => (series[key] ? (mean(series[key].y) * series[key].count) / Math.max(1, step) : 0);
      return { run, parts: TIMES.filter(([key]) => key !== "time/score").map(([key, name]) => [name, seconds(key)]) };
    }));
    const most = Math.max(...rows.map(({ parts }) => parts.reduce((a, [, v]) => a + v, 0)), 1e-9);
    const legend = TIMES.filter(([key]) => key !== "time/score").map(([, name], i) => h("span", {}, h("i", { class: `part-${i}` }), name));
    put(this.bars, h("div", { class: "share-legend" }, legend), rows.map(({ run, parts }) => h("div", { class: "share-row" }, h("span", { class: "share-name" }, dot(run), run),
      h("div", { class: "share-bar" }, parts.map(([name, value], i) => (value ? h("i", { class: `part-${i}`, vars: { width: `${(100 * value) / most}%` }, title: `${name}: ${figure(value)} s` },
        value / most > 0.05 ? h("span", {}, `${figure(value)} s`) : null) : null))))));
  }

  draw() {}

  close() { if (this.eyes) this.eyes.disconnect(); }
}
