"use strict";
// One training step opened up: which groups of samples the gradient came from, and why.

const grouped = { run: null, step: null, open: new Set() };

views.groups = {
  title: "Groups",
  async show(root) {
    grouped.root = root;
    const run = mainRun();
    if (grouped.run !== run) Object.assign(grouped, { run, open: new Set() });
    let told;
    try {
      told = await loadOnce("/api/run", { run });
    } catch (error) {
      put(root, nothing(`The groups of ${run} cannot be shown: ${error.message}.`));
      return;
    }
    if (shown !== this || mainRun() !== run) return;
    await drawGroups(run, told.group_steps);
  },
  async refresh() {
    const told = await loadOnce("/api/run", { run: grouped.run }).catch(() => null);
    if (told && shown === this && told.group_steps.join() !== grouped.steps.join()) await drawGroups(grouped.run, told.group_steps);
  },
  key(event) {
    if (event.target.matches("input, select") || !grouped.steps || !grouped.steps.length) return false;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return false;
    pickStep(grouped.steps[grouped.steps.indexOf(grouped.step) + by]);
    return true;
  },
};

function pickStep(step) {
  if (step === undefined) return;
  adjust({ step: step === grouped.steps[grouped.steps.length - 1] ? null : step });
  drawGroups(grouped.run, grouped.steps);
}

async function drawGroups(run, steps) {
  const { root } = grouped, high = scrollY;
  grouped.steps = steps;
  const head = h("div", { class: "bar" }, h("h2", {}, "Groups"), runPicker());
  if (!steps.length) {
    put(root, head, nothing("No training step has been opened up yet.", "A run keeps the groups of its first step and of those that end in an evaluation (save.groups)."));
    return;
  }
  const asked = Number(place.params.get("step"));
  const step = place.params.has("step") && steps.includes(asked) ? asked : steps[steps.length - 1];
  grouped.step = step;
  let found;
  try {
    found = await loadOnce("/api/groups", { run, step });
  } catch (error) {
    put(root, head, nothing(`Step ${step} cannot be shown: ${error.message}.`));
    return;
  }
  if (shown !== views.groups || grouped.step !== step) return;
  const focused = document.activeElement && document.activeElement.matches(".group-step");
  const at = steps.indexOf(step);
  const slider = h("input", {
    type: "range", class: "group-step", min: 0, max: steps.length - 1, value: at, "aria-label": "training step", "aria-valuetext": `step ${step}`,
    disabled: steps.length < 2, onchange: (e) => pickStep(steps[Number(e.target.value)]), oninput: (e) => { label.textContent = `step ${steps[Number(e.target.value)]}`; },
  });
  const label = h("span", { class: "big" }, `step ${step}`);
  const move = (by, name, text) => button(icon(name), () => pickStep(steps[at + by]), { class: "round", "aria-label": text, disabled: steps[at + by] === undefined });
  const all = found.flatMap((g) => g.samples);
  const most = Math.max(...found.map((g) => g.share), 1e-9);
  const reach = Math.max(...all.map((x) => Math.abs(x.advantage)), 1e-9);
  put(root, head,
    h("div", { class: "transport groups-transport" }, move(-1, "left", "the step before"), slider, move(1, "right", "the next step"), label),
    h("div", { class: "intro" }, h("div", {}, h("p", { class: "lead" }, "A sample's share is the size of its advantage over the sum of the batch's: on-policy, its weight in the gradient. Groups whose samples all got the same reward give none."),
    h("div", { class: "stats" }, stat("samples", String(all.length)), stat("groups", String(found.length)),
      stat("groups without gradient", String(found.filter((g) => g.share < 1e-9).length)), stat("half of the gradient from", many(halfOf(found), "group")))),
      h("div", { class: "stat" }, histogram(all.map((x) => x.reward).filter((v) => v !== null)), h("span", {}, "rewards of the batch"))),
    h("div", { class: "groups" }, found.map((g, i) => groupCard(run, g, i, most, reach))));
  scrollTo(0, high);
  if (focused) slider.focus({ preventScroll: true });
}

const stat = (name, value) => h("div", { class: "stat" }, h("b", {}, value), h("span", {}, name));

// How many of the groups, the largest first, make half of the gradient.
function halfOf(groups) {
  let sum = 0, n = 0;
  for (const share of groups.map((g) => g.share).sort((a, b) => b - a)) {
    if (sum >= 0.5) break;
    sum += share;
    n += 1;
  }
  return n;
}

function groupCard(run, group, place_, most, reach) {
  const key = group.prompt;
  const open = grouped.open.has(key) || (grouped.open.size === 0 && place_ === 0);
  const body = h("div", { class: "group-body" });
  const fillBody = () => { if (!body.childElementCount) put(body, groupBody(run, group, reach)); };
  const rewards = group.samples.map((x) => x.reward).filter((v) => v !== null);
  const node = h("details", { class: "group", open, ontoggle: () => {
    if (node.open) {
      grouped.open.add(key);
      fillBody();
    } else grouped.open.delete(key);
  } }, h("summary", {},
    h("span", { class: "group-share" }, h("b", {}, percent(group.share)), h("span", { class: "share-track" }, h("i", { vars: { width: `${(100 * group.share) / most}%` } }))),
    h("span", { class: "group-prompt" }, group.prompt, group.answer === null || group.answer === undefined ? null : h("span", { class: "wanted" }, "wanted ", h("b", {}, typeof group.answer === "string" ? group.answer : JSON.stringify(group.answer)))),
    h("span", { class: "group-figures" }, `${figure(group.mean)} ± ${figure(group.std)}`), rewardDots(rewards)), body);
  if (open) fillBody();
  return node;
}

// Every sample a dot, from the least reward to the greatest.
function rewardDots(rewards) {
  const box = s("svg", { class: "dots", width: 120, height: 18, viewBox: "0 0 120 18", role: "img", "aria-label": `rewards ${rewards.map(figure).join(", ")}` });
  let [low, high] = extent(rewards);
  if (low >= 0 && high <= 1) [low, high] = [0, 1];
  box.append(s("line", { x1: 5, x2: 115, y1: 9, y2: 9 }));
  for (const v of rewards) box.append(s("circle", { cx: 5 + (high > low ? (v - low) / (high - low) : 0.5) * 110, cy: 9, r: 4 }));
  return box;
}

function groupBody(run, group, reach) {
  const sorted = group.samples.map((x, i) => ({ ...x, i })).sort((a, b) => b.advantage - a.advantage);
  const bare = sorted.every((x) => x.image === undefined && x.response === undefined);
  const seen = (group.shown || []).length ? h("div", { class: "shown" }, group.shown.map((name, k) => picture(run, name, `picture ${k + 1} of the prompt: ${group.prompt}`, 192, null))) : null;
  const writes = sorted.some((x) => x.response !== undefined);
  return [
    h("div", { class: "group-top" }, seen, h("div", { class: "stat" }, histogram(sorted.map((x) => x.reward).filter((v) => v !== null), 160, 40), h("span", {}, "rewards of the group"))),
    h("div", { class: "group-rest" }, bare ? h("p", { class: "soft" }, "Of this group only the figures were kept: pictures and responses are kept of the groups with the largest shares (save.groups).") : null,
    h("div", { class: writes ? "samples said" : bare ? "samples bare" : "samples" }, sorted.map((x) => sampleCard(run, group, x, reach)))),
  ];
}

function sampleCard(run, group, sample, reach) {
  const what = sample.image ? picture(run, sample.image, `sample ${sample.i + 1}: ${group.prompt}, reward ${figure(sample.reward)}`, 192, null)
    : sample.response === undefined ? null : responseText(sample.response);
  return h("div", { class: "sample" }, what,
    h("div", { class: "sample-figures" }, h("span", { class: "reward" }, figure(sample.reward)), sample.text ? h("span", { class: "read" }, "read ", h("q", {}, sample.text)) : null,
      h("span", { class: "grow" }), h("span", { class: "soft", title: "share of the gradient" }, percent(sample.share))),
    h("div", { class: "diverging", title: `advantage ${figure(sample.advantage)}` }, advantageBar(sample.advantage, reach), h("span", {}, `${sample.advantage > 0 ? "+" : ""}${figure(sample.advantage)}`)));
}

function advantageBar(value, reach) {
  const share = Math.min(1, Math.abs(value) / reach) * 50;
  return h("span", { class: "track" }, h("i", { class: value >= 0 ? "plus" : "minus", vars: { width: `${share}%`, left: value >= 0 ? "50%" : `${50 - share}%` } }));
}
