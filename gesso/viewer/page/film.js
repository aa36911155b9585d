"use strict";
// Parts of the evolution: slots for pictures, the wipe, the timeline with its slider.

// A place for one picture at a time. The next is decoded before it takes the place: no flicker.
class Slot {
  constructor(run, size, wanted) {
    Object.assign(this, { run, size, wanted, url: null });
    this.node = h("div", { class: "slot" });
  }

  async show(cell, alt) {
    const url = cell && cell.image ? pictureUrl(this.run, cell.image, this.wanted, this.size) : "";
    if (url === this.url) return;
    this.url = url;
    const img = url && (await decoded(url));
    if (this.url !== url) return; // asked for another one meanwhile
    if (!img) {
      this.node.replaceChildren(cell ? gone(alt) : h("div", { class: "gone" }, "none kept"));
      return;
    }
    const present = this.node.querySelector("img");
    if (present) {
      present.src = url;
      present.alt = alt;
      return;
    }
    img.alt = alt;
    img.draggable = false;
    const tiny = this.size ? Math.max(...this.size) <= TINY : false;
    if (tiny) img.classList.add("pixels");
    this.node.replaceChildren(img);
  }
}

async function decoded(url) {
  const img = new Image();
  img.src = url;
  try {
    await img.decode();
    return img;
  } catch {
    return null; // the file is damaged or gone; the slot says so
  }
}

// Two nodes over one another: the first left of the cut, the second right of it. The cut is the
// variable --cut of `host`, so that several wipes may move together.
let cutAt = 50; // percent, kept from one wipe to the next
function wipe(before, after, names, host) {
  const set = (share) => {
    cutAt = Math.round(100 * Math.min(1, Math.max(0, share)));
    range.value = cutAt;
    host.style.setProperty("--cut", `${cutAt}%`);
  };
  host.style.setProperty("--cut", `${cutAt}%`);
  const range = h("input", {
    type: "range", min: 0, max: 100, value: cutAt, "aria-label": `wipe between ${names[0]} and ${names[1]}`,
    oninput: (e) => set(e.target.value / 100),
  });
  const drag = (event) => {
    if (event.type === "pointerdown") event.currentTarget.setPointerCapture(event.pointerId);
    else if (!event.currentTarget.hasPointerCapture(event.pointerId)) return;
    const box = event.currentTarget.getBoundingClientRect();
    set((event.clientX - box.left) / box.width);
  };
  return h("div", { class: "wipe", onpointerdown: drag, onpointermove: drag, onclick: (e) => e.preventDefault() },
    before, h("div", { class: "after" }, after), range, h("i", { class: "handle", "aria-hidden": "true" }));
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const rewardsAt = (prompts, i) => prompts.map((p) => p.cells[i] && p.cells[i].reward).filter((v) => v !== null && v !== undefined);

// The slider over evaluations, under the curve of the rewards.
class Timeline {
  constructor(steps, values, onmove) {
    this.steps = steps;
    const last = Math.max(1, steps.length - 1);
    this.range = h("input", {
      type: "range", min: 0, max: steps.length - 1, step: 1, "aria-label": "step of training", class: "step-slider", "data-keep": "slider",
      oninput: (e) => onmove(Number(e.target.value)),
    });
    this.marker = h("i", { class: "marker", "aria-hidden": "true" });
    const labels = h("div", { class: "labels", "aria-hidden": "true" });
    const every = Math.ceil(steps.length / 8);
    steps.forEach((step, i) => {
      if (i % every && i !== steps.length - 1) return;
      if (i !== steps.length - 1 && steps.length - 1 - i < every) return;
      labels.append(h("span", { vars: { left: `${(100 * i) / last}%` } }, String(step)));
    });
    this.node = h("div", { class: "timeline" }, h("div", { class: "hill" }, this.hill(values, last), this.marker), this.range, labels);
  }

  hill(values, last) {
    const there = values.map((v, i) => [i, v]).filter(([, v]) => v !== null);
    const box = s("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": "true" });
    if (there.length < 2) return box;
    const [low, high] = extent(there.map(([, v]) => v));
    const y = (v) => (high > low ? 92 - ((v - low) / (high - low)) * 80 : 50);
    const d = there.map(([i, v], k) => `${k ? "L" : "M"}${((1000 * i) / last).toFixed(1)} ${y(v).toFixed(1)}`).join("");
    box.append(s("path", { class: "under", d: `${d}L${(1000 * there[there.length - 1][0]) / last} 100L${(1000 * there[0][0]) / last} 100Z` }), s("path", { class: "top", d }));
    return box;
  }

  set(i) {
    this.range.value = i;
    this.range.setAttribute("aria-valuetext", `step ${this.steps[i]}`);
    this.marker.style.setProperty("left", `${(100 * i) / Math.max(1, this.steps.length - 1)}%`);
  }
}

// What has become of a prompt between the first evaluation and the last.
const COURSES = [
  ["learnt", "Learnt", "wrong at first, right at last"],
  ["lost", "Lost", "right at first, wrong at last"],
  ["right", "Always right", "right at every evaluation"],
  ["wrong", "Always wrong", "wrong at every evaluation"],
  ["wavering", "Wavering", "ends as it began, but was otherwise in between"],
  ["better", "Better", "a higher reward at last than at first"],
  ["worse", "Worse", "a lower reward at last than at first"],
  ["same", "Same", "the same reward at last as at first"],
];

function courseOf(prompt) {
  const cells = prompt.cells.filter(Boolean);
  const told = cells.filter((c) => c.right !== undefined).map((c) => c.right);
  if (told.length) {
    const first = told[0], last = told[told.length - 1];
    if (first !== last) return last ? "learnt" : "lost";
    return told.every((r) => r === first) ? (first ? "right" : "wrong") : "wavering";
  }
  const scored = cells.map((c) => c.reward).filter((v) => v !== null);
  const by = scored.length ? scored[scored.length - 1] - scored[0] : 0;
  return by > 5e-4 ? "better" : by < -5e-4 ? "worse" : "same";
}

// The reward under a picture or a response, with a mark where right and wrong are told apart.
function rewardOf(cell, before) {
  if (!cell) return h("span", { class: "reward" }, "–");
  if (cell.reward === null || cell.reward === undefined) return h("span", { class: "reward bad", title: cell.error || "" }, "no score");
  return h("span", { class: "reward" }, mark(cell), figure(cell.reward), before && before !== cell ? change(before.reward, cell.reward) : null);
}

function mark(cell) {
  if (!cell || cell.right === undefined) return null;
  return h("span", { class: `mark-${cell.right ? "right" : "wrong"}`, role: "img", "aria-label": cell.right ? "right" : "wrong" }, icon(cell.right ? "tick" : "cross"));
}

// Of several rewards each by itself, and what a reward read.
function partsOf(cell) {
  if (!cell) return null;
  const parts = Object.entries(cell.parts || {});
  const rows = parts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, figure(value))]);
  if (cell.text) rows.push([h("dt", {}, "the reward read"), h("dd", {}, h("q", {}, cell.text))]);
  if (cell.error) rows.push([h("dt", {}, "error"), h("dd", { class: "bad" }, cell.error)]);
  return rows.length ? h("dl", { class: "facts" }, rows) : null;
}
