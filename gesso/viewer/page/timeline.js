"use strict";
// Who did what when in one training step: a row for every worker, the driver and the rewards.

const timed = { run: null, step: null, steps: [] };
const PHASES = ["encode", "sample", "decode", "score", "exchange", "describe", "update", "publish", "wait", "evaluate", "save", "report", "other"];

views.timeline = {
  title: "Timeline",
  async show(root) {
    timed.root = root;
    const run = mainRun();
    timed.run = run;
    let found;
    try {
      found = await loadOnce("/api/timeline", { run });
    } catch (error) {
      put(root, emptyState(`The timeline of ${run} cannot be shown: ${error.message}.`));
      return;
    }
    if (activeView === this && mainRun() === run) await drawTimeline(run, found);
  },
  refresh() { return this.show(timed.root); },
  key(event) {
    if (event.target.matches("input, select") || !timed.steps.length) return false;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return false;
    pickTimed(timed.steps[timed.steps.indexOf(timed.step) + by]);
    return true;
  },
};

function pickTimed(step) {
  if (step === undefined) return;
  adjust({ step: step === timed.steps[timed.steps.length - 1] ? null : step });
  views.timeline.show(timed.root);
}

async function drawTimeline(run, found) {
  const { root } = timed, { steps } = found;
  timed.steps = steps;
  const head = h("div", { class: "bar" }, h("h2", {}, "Timeline"), runPicker());
  if (!steps.length) {
    put(root, head, emptyState("No timeline has been recorded.", "New runs record one."));
    return;
  }
  const requested = Number(place.params.get("step"));
  const step = place.params.has("step") && steps.includes(requested) ? requested : steps[steps.length - 1];
  timed.step = step;
  let data;
  try {
    data = await loadOnce("/api/timeline", { run, step });
  } catch (error) {
    put(root, head, emptyState(`Step ${step} cannot be shown: ${error.message}.`));
    return;
  }
  if (activeView !== views.timeline || timed.step !== step) return;
  const focused = document.activeElement && document.activeElement.matches(".timed-step");
  const at = steps.indexOf(step), label = h("span", { class: "big" }, `step ${step}`);
  const slider = h("input", {
    type: "range", class: "timed-step", min: 0, max: steps.length - 1, value: at, "aria-label": "training step", "aria-valuetext": `step ${step}`,
    disabled: steps.length < 2, onchange: (e) => pickTimed(steps[Number(e.target.value)]), oninput: (e) => { label.textContent = `step ${steps[Number(e.target.value)]}`; },
  });
  const move = (by, name, text) => button(icon(name), () => pickTimed(steps[at + by]), { class: "round", "aria-label": text, disabled: steps[at + by] === undefined });
  const rows = Object.entries(data.spans);
  const longest = (phase) => Math.max(...rows.map(([name]) => (data.busy[name] || {})[phase] || 0));
  const used = PHASES.filter((phase) => longest(phase) > data.seconds / 1000);
  put(root, head,
    h("div", { class: "transport groups-transport" }, move(-1, "left", "previous step"), slider, move(1, "right", "next step"), label),
    h("p", { class: "lead" }, `${capital(found.sentence)}.`),
    h("div", { class: "swimlanes" },
      rows.map(([name, spans]) => lane(name, spans, data, found)),
      h("div", { class: "lane axis" }, h("span", {}), h("span", { class: "ends" }, h("span", {}, "0"), h("span", {}, `${figure(data.seconds)} s`)), h("span", {}))),
    h("div", { class: "phases" }, used.map((phase) => h("span", {}, h("i", { class: `phase ${phase}`, "aria-hidden": "true" }), phase))),
    h("p", { class: "soft" }, `Idle shares are those of ${plural(found.of, "step")}; waiting for others counts as idle.`));
  if (focused) slider.focus({ preventScroll: true });
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function lane(name, spans, data, found) {
  const total = found.rows.find((row) => row.name === name);
  const seconds = Object.entries(data.busy[name] || {}).map(([phase, value]) => `${phase} ${figure(value)} s`);
  const box = s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${seconds.join(", ")}` });
  for (const [phase, start, end] of spans) {
    const left = Math.max(0, start) / data.seconds, right = Math.min(data.seconds, end) / data.seconds;
    if (right <= left) continue;
    const bar = s("rect", { class: `phase ${PHASES.includes(phase) ? phase : "other"}`, x: 1000 * left, width: Math.max(0.6, 1000 * (right - left)), y: 0, height: 10 });
    bar.append(s("title", {}, `${phase}: ${figure(start)} to ${figure(end)} s`));
    box.append(bar);
  }
  return h("div", { class: "lane" }, h("span", {}, name), box, h("span", { class: "idle" }, total ? `idle ${percent(total.idle)}` : ""));
}
