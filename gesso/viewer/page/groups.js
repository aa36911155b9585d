"use strict";
// One training step in detail: the contributions of the groups to the gradient.

const grouped = { run: null, step: null, open: new Set() };

views.groups = {
  title: "Groups",
  async show(root) {
    grouped.root = root;
    const run = mainRun();
    if (grouped.run !== run) Object.assign(grouped, { run, open: new Set() });
    let details;
    try {
      details = await loadOnce("/api/run", { run });
    } catch (error) {
      put(root, emptyState(`The groups of ${run} cannot be shown: ${error.message}.`));
      return;
    }
    if (activeView !== this || mainRun() !== run) return;
    await drawGroups(run, details.group_steps);
  },
  async refresh() {
    const details = await loadOnce("/api/run", { run: grouped.run }).catch(() => null);
    if (details && activeView === this && details.group_steps.join() !== grouped.steps.join()) await drawGroups(grouped.run, details.group_steps);
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
    put(root, head, emptyState("No groups have been saved yet.", "A run saves the groups of its first step and of each step with an evaluation (save.groups)."));
    return;
  }
  const requested = Number(place.params.get("step"));
  const step = place.params.has("step") && steps.includes(requested) ? requested : steps[steps.length - 1];
  grouped.step = step;
  let groups;
  try {
    groups = await loadOnce("/api/groups", { run, step });
  } catch (error) {
    put(root, head, emptyState(`Step ${step} cannot be shown: ${error.message}.`));
    return;
  }
  if (activeView !== views.groups || grouped.step !== step) return;
  const focused = document.activeElement && document.activeElement.matches(".group-step");
  const at = steps.indexOf(step);
  const slider = h("input", {
    type: "range", class: "group-step", min: 0, max: steps.length - 1, value: at, "aria-label": "training step", "aria-valuetext": `step ${step}`,
    disabled: steps.length < 2, onchange: (e) => pickStep(steps[Number(e.target.value)]), oninput: (e) => { label.textContent = `step ${steps[Number(e.target.value)]}`; },
  });
  const label = h("span", { class: "big" }, `step ${step}`);
  const move = (by, name, text) => button(icon(name), () => pickStep(steps[at + by]), { class: "round", "aria-label": text, disabled: steps[at + by] === undefined });
  const all = groups.flatMap((g) => g.samples);
  const maxShare = Math.max(...groups.map((g) => g.share), 1e-9);
  const maxAdvantage = Math.max(...all.map((x) => Math.abs(x.advantage)), 1e-9);
  put(root, head,
    h("div", { class: "transport groups-transport" }, move(-1, "left", "previous step"), slider, move(1, "right", "next step"), label),
    h("div", { class: "intro" }, h("div", {}, h("p", { class: "lead" }, "A sample's share is its absolute advantage divided by the sum over the batch; on-policy, this is its weight in the gradient. Groups with equal rewards contribute no gradient."),
    h("div", { class: "stats" }, stat("samples", String(all.length)), stat("groups", String(groups.length)),
      stat("groups without gradient", String(groups.filter((g) => g.share < 1e-9).length)), stat("for half of the gradient", plural(halfOf(groups), "group")))),
      h("div", { class: "stat" }, histogram(all.map((x) => x.reward).filter((v) => v !== null)), h("span", {}, "rewards of the batch"))),
    h("div", { class: "groups" }, groups.map((g, i) => groupCard(run, g, i, maxShare, maxAdvantage))));
  scrollTo(0, high);
  if (focused) slider.focus({ preventScroll: true });
}

const stat = (name, value) => h("div", { class: "stat" }, h("b", {}, value), h("span", {}, name));

// Number of groups, largest first, that make up half of the gradient.
function halfOf(groups) {
  let sum = 0, n = 0;
  for (const share of groups.map((g) => g.share).sort((a, b) => b - a)) {
    if (sum >= 0.5) break;
    sum += share;
    n += 1;
  }
  return n;
}

function groupCard(run, group, rank, maxShare, maxAdvantage) {
  const key = group.prompt;
  const open = grouped.open.has(key) || (grouped.open.size === 0 && rank === 0);
  const body = h("div", { class: "group-body" });
  const fillBody = () => { if (!body.childElementCount) put(body, groupBody(run, group, maxAdvantage)); };
  const rewards = group.samples.map((x) => x.reward).filter((v) => v !== null);
  const node = h("details", { class: "group", open, ontoggle: () => {
    if (node.open) {
      grouped.open.add(key);
      fillBody();
    } else grouped.open.delete(key);
  } }, h("summary", {},
    h("span", { class: "group-share" }, h("b", {}, percent(group.share)), h("span", { class: "share-track" }, h("i", { vars: { width: `${(100 * group.share) / maxShare}%` } }))),
    h("span", { class: "group-prompt" }, group.prompt, group.answer === null || group.answer === undefined ? null : h("span", { class: "expected" }, "expected ", h("b", {}, typeof group.answer === "string" ? group.answer : JSON.stringify(group.answer)))),
    h("span", { class: "group-figures" }, `${figure(group.mean)} ± ${figure(group.std)}`), rewardDots(rewards)), body);
  if (open) fillBody();
  return node;
}

// One dot per sample on the scale of rewards.
function rewardDots(rewards) {
  const box = s("svg", { class: "dots", width: 120, height: 18, viewBox: "0 0 120 18", role: "img", "aria-label": `rewards ${rewards.map(figure).join(", ")}` });
  let [low, high] = extent(rewards);
  if (low >= 0 && high <= 1) [low, high] = [0, 1];
  box.append(s("line", { x1: 5, x2: 115, y1: 9, y2: 9 }));
  for (const v of rewards) box.append(s("circle", { cx: 5 + (high > low ? (v - low) / (high - low) : 0.5) * 110, cy: 9, r: 4 }));
  return box;
}

function groupBody(run, group, maxAdvantage) {
  const sorted = group.samples.map((x, i) => ({ ...x, i })).sort((a, b) => b.advantage - a.advantage);
  const bare = sorted.every((x) => x.image === undefined && x.response === undefined);
  const images = (group.shown || []).length ? h("div", { class: "prompt-images" }, group.shown.map((name, k) => imageNode(run, name, `image ${k + 1} of the prompt: ${group.prompt}`, 192, null))) : null;
  const hasResponses = sorted.some((x) => x.response !== undefined);
  return [
    h("div", { class: "group-top" }, images, h("div", { class: "stat" }, histogram(sorted.map((x) => x.reward).filter((v) => v !== null), 160, 40), h("span", {}, "rewards of the group"))),
    h("div", { class: "group-rest" }, bare ? h("p", { class: "soft" }, "Only the values of this group were saved; images and responses are saved for the groups with the largest shares (save.groups).") : null,
    h("div", { class: hasResponses ? "samples with-text" : bare ? "samples bare" : "samples" }, sorted.map((x) => sampleCard(run, group, x, maxAdvantage)))),
  ];
}

function sampleCard(run, group, sample, maxAdvantage) {
  const alt = `sample ${sample.i + 1}: ${group.prompt}, reward ${figure(sample.reward)}`;
  const what = sample.image ? mediaNode(run, sample, alt)
    : sample.response === undefined ? null : responseText(sample.response);
  return h("div", { class: "sample" }, what,
    h("div", { class: "sample-figures" }, h("span", { class: "reward" }, figure(sample.reward)), sample.text ? h("span", { class: "read" }, "read ", h("q", {}, sample.text)) : null,
      h("span", { class: "grow" }), h("span", { class: "soft", title: "share of the gradient" }, percent(sample.share))),
    h("div", { class: "diverging", title: `advantage ${figure(sample.advantage)}` }, advantageBar(sample.advantage, maxAdvantage), h("span", {}, `${sample.advantage > 0 ? "+" : ""}${figure(sample.advantage)}`)));
}

function advantageBar(value, maximum) {
  const share = Math.min(1, Math.abs(value) / maximum) * 50;
  return h("span", { class: "track" }, h("i", { class: value >= 0 ? "plus" : "minus", vars: { width: `${share}%`, left: value >= 0 ? "50%" : `${50 - share}%` } }));
}
