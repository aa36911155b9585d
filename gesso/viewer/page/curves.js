"use strict";
// Metrics over training, for several runs.

const AXES = [["step", "Steps"], ["samples", "Samples"], ["seconds", "Seconds"]];
const AXIS_NAMES = { step: "step", samples: "sample", seconds: "time" };
const SPREAD = ["reward/std", "reward/max", "reward/at_max"];
const TIMES = [["time/sample", "sampling"], ["time/score", "scoring"], ["time/wait", "waiting for scores"], ["time/update", "updating"], ["time/eval", "evaluating"]];
// title, description, key
const SECTIONS = {
  Update: [
    ["Ratio", "mean probability ratio, new to old; 1 on-policy", "update/ratio"],
    ["Clipped fraction", "fraction of terms that are clipped", "update/clipped"],
    ["KL", "KL divergence from the reference model", "update/kl"],
    ["|Δlogp|", "mean absolute change of log-probs in an update", "update/abs_dlogp"],
    ["Max |Δlogp|", "maximum over all terms", "update/abs_dlogp_max"],
    ["Entropy", "of the sampled tokens' distributions", "update/entropy"],
    ["Gradient norm", "before clipping", "update/grad_norm"],
    ["Learning rate", "", "update/lr"],
  ],
  "Group statistics": [
    ["Reward std", "standard deviation over the batch", "reward/std"],
    ["Flat groups", "fraction of groups with equal rewards, which contribute no gradient", "advantage/flat_groups"],
    ["At maximum reward", "fraction of samples", "reward/at_max"],
    ["Diversity", "of the samples of one prompt", "diversity"],
    ["|Advantage|", "mean over the batch", "advantage/abs_mean"],
  ],
  Responses: [
    ["Response length", "mean, in tokens", "response/length"],
    ["Max response length", "in tokens", "response/max_length"],
    ["Truncated responses", "fraction that reached the token limit", "response/truncated"],
  ],
  "Speed and memory": [
    ["Samples per second", "", "samples_per_s"],
    ["Seconds per step", "", "time/step"],
  ],
};
const OTHER = "Other metrics";

const lines = { axis: "step", smooth: 0, log: false, table: false, cross: new Crosshair(), sections: [] };

views.curves = {
  title: "Curves",
  async show(root) {
    lines.root = root;
    const loaded = await details();
    if (activeView !== this || !loaded) return;
    const panels = panelsOf(loaded);
    lines.names = JSON.stringify(panels);
    closeCharts();
    lines.sections = Object.entries(panels).filter(([, p]) => p.length).map(([title, p]) => new Section(title, p, loaded));
    const times = new TimeShares(loaded);
    const rest = lines.sections.filter((section) => section.title === OTHER);
    const first = lines.sections.filter((section) => !rest.includes(section));
    put(root, curveTools(), first.map((section) => section.node), times.node, rest.map((section) => section.node));
    lines.sections.push(times);
    for (const section of lines.sections) section.watch();
  },
  async refresh() {
    const loaded = await details();
    if (activeView !== this || !loaded) return;
    if (JSON.stringify(panelsOf(loaded)) !== lines.names) this.show(lines.root);
    else for (const section of lines.sections) section.reload();
  },
  leave: closeCharts,
};

function closeCharts() {
  for (const section of lines.sections) section.close();
  lines.sections = [];
}

async function details() {
  const results = await Promise.allSettled(ticked().map((run) => loadOnce("/api/run", { run })));
  const loaded = results.filter((f) => f.status === "fulfilled").map((f) => f.value);
  if (loaded.length) return loaded;
  if (activeView === views.curves) put(lines.root, emptyState("The curves cannot be shown.", results[0].reason.message));
  return null;
}

// Sections → panels of the keys of the selected runs; keys without a section come last.
function panelsOf(loaded) {
  const keys = new Set(loaded.flatMap((t) => t.keys));
  const used = new Set([...SPREAD, ...TIMES.map(([key]) => key), "time/total", "time/overlap"]);
  const panel = (title, note, train, held) => {
    const present = [train, held].filter((key) => keys.has(key));
    present.forEach((key) => used.add(key));
    return present.length ? [{ title, note, train: keys.has(train) ? train : null, held: keys.has(held) ? held : null }] : [];
  };
  const parts = [...keys].map((key) => key.replace(/^(reward|eval)\//, "")).filter((part, i, all) => all.indexOf(part) === i)
    .filter((part) => keys.has(`reward/${part}`) && !SPREAD.includes(`reward/${part}`));
  const sections = { Reward: [...panel("Reward", "training and held-out", "reward", "eval/reward"), ...parts.flatMap((part) => panel(part, part.includes("/") ? `detail of ${part.split("/")[0]}` : "component of the reward", `reward/${part}`, `eval/${part}`))] };
  for (const [title, panels] of Object.entries(SECTIONS)) sections[title] = panels.flatMap(([name, note, key]) => panel(name, note, key));
  const rest = [...keys].filter((key) => !used.has(key));
  sections["Speed and memory"].push(...rest.filter((key) => /mem/.test(key)).flatMap((key) => panel(key, "", key)));
  sections.Update.push(...rest.filter((key) => /kl/.test(key)).flatMap((key) => panel(key, "", key)));
  sections[OTHER] = rest.filter((key) => !used.has(key)).flatMap((key) => panel(key, "", key));
  return sections;
}

function curveTools() {
  const redraw = () => { for (const section of lines.sections) section.draw(); };
  const weight = h("output", {}, String(lines.smooth));
  const smooth = h("label", { class: "smooth" }, h("span", { title: "exponential moving average of training curves; held-out curves are not smoothed" }, "Smoothing"), h("input", {
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
    choice("X axis", AXES, lines.axis, (axis) => { lines.axis = axis; redraw(); }), smooth,
    tick("log", "Log scale", "for charts with only positive values"), tick("table", "Tables", "show the values below each chart"));
}

// A group of charts. Its data is loaded when it comes near the viewport.
class Section {
  constructor(title, panels, loaded) {
    Object.assign(this, { title, panels, runs: loaded.map((t) => t.id), data: new Map() });
    this.expected = new Map(loaded.map((t) => [t.id, t.expect]));
    this.keys = panels.flatMap((p) => [p.train, p.held]).filter(Boolean);
    this.charts = panels.map((panel) => {
      const chart = new Chart(panel.title, lines.cross);
      const table = h("div", { class: "values" });
      const node = h("figure", { class: "panel", "data-key": panel.train || panel.held }, h("figcaption", {}, h("b", {}, panel.title), panel.note ? h("small", {}, panel.note) : null), chart.node, table);
      return { panel, chart, table, node };
    });
    const rest = title === OTHER;
    this.body = h("div", { class: "panels" }, this.charts.map((c) => c.node));
    this.node = rest ? h("details", { class: "section" }, h("summary", {}, h("h3", {}, title)), this.body) : h("section", { class: "section" }, h("h3", {}, title), this.body);
  }

  watch() {
    this.observer = whenNear([{ node: this.body }], () => { this.observer.disconnect(); this.reload(); });
  }

  async reload() {
    const results = await Promise.allSettled(this.runs.map((run) => loadOnce("/api/curves", { run, keys: this.keys.join(",") })));
    results.forEach((f, i) => { if (f.status === "fulfilled") this.data.set(this.runs[i], f.value.series); });
    this.draw();
  }

  draw() {
    for (const { panel, chart, table } of this.charts) {
      const own = this.runs.flatMap((run) => [["train", panel.train], ["held", panel.held]].flatMap(([kind, key]) => this.line(run, kind, key)));
      const curves = [...this.reported(panel, own), ...own];
      chart.xText = lines.axis === "seconds" ? clock : (v) => Math.round(v).toLocaleString("en");
      chart.xLabel = AXIS_NAMES[lines.axis];
      chart.set(curves, lines.smooth, lines.log);
      put(table, lines.table ? valuesTable(panel.title, curves, chart) : null);
    }
  }

  // What the authors of the recipes report, once each: the value after training, and points during training.
  reported(panel, own) {
    if (!own.length) return [];
    const [from, to] = extent(own.flatMap((l) => [l.x[0], l.x[l.x.length - 1]]));
    const known = [...this.expected.values()].filter((e) => e && [panel.train, panel.held].includes(e.metric));
    const distinct = known.filter((e, i) => known.findIndex((other) => JSON.stringify(other) === JSON.stringify(e)) === i);
    return distinct.flatMap((e) => {
      const look = { kind: "paper", colour: "var(--soft)" };
      const after = { ...look, label: `reported: ${e.source}`, x: [from, to], y: [e.value, e.value] };
      const during = { ...look, label: "reported during training", x: e.steps, y: e.values };
      return lines.axis === "step" && e.steps.length > 1 ? [after, during] : [after];
    });
  }

  line(run, kind, key) {
    const series = key && (this.data.get(run) || {})[key];
    if (!series) return [];
    const present = series.y.map((_, i) => i).filter((i) => series[lines.axis][i] !== null);
    const pick = (column) => present.map((i) => column[i]);
    const name = [this.runs.length > 1 ? run : null, kind === "held" ? "held-out" : "training"].filter(Boolean).join(", ");
    return [{
      label: name, kind, colour: colour(run), x: pick(series[lines.axis]), y: pick(series.y),
      low: series.low ? pick(series.low) : null, high: series.high ? pick(series.high) : null,
    }];
  }

  close() {
    if (this.observer) this.observer.disconnect();
    for (const { chart } of this.charts) chart.close();
  }
}

const ROWS = 50; // approximate number of rows of a table of values
function valuesTable(title, curves, chart) {
  const xs = [...new Set(curves.flatMap((l) => l.x))].sort((a, b) => a - b);
  const every = Math.ceil(xs.length / ROWS);
  const rows = xs.filter((_, i) => i % every === 0 || i === xs.length - 1);
  return h("table", { class: "plain-table" }, h("caption", { class: "visually-hidden" }, title),
    h("thead", {}, h("tr", {}, h("th", {}, chart.xLabel), curves.map((l) => h("th", {}, l.label)))),
    h("tbody", {}, rows.map((x) => h("tr", {}, h("th", {}, chart.xText(x)), curves.map((l) => {
      const i = l.x.length ? nearest(l.x, x) : -1;
      return h("td", {}, i >= 0 && l.x[i] === x ? figure(l.y[i]) : "");
    })))));
}

// Breakdown of the time of a step, one bar per run.
class TimeShares {
  constructor(loaded) {
    this.runs = loaded.map((t) => t.id);
    this.bars = h("div", { class: "shares" });
    this.node = h("section", { class: "section" }, h("h3", {}, "Time per step"), h("p", { class: "soft" }, "Mean seconds per step. Scoring overlaps with sampling, so only the time spent waiting for scores is counted."), this.bars);
  }

  watch() {
    this.observer = whenNear([{ node: this.node }], () => { this.observer.disconnect(); this.reload(); });
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

  close() { if (this.observer) this.observer.disconnect(); }
}
