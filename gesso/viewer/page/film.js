"use strict";
// Components of the evolution view: image slots, the wipe, the timeline with its slider.

// A container for one image or video. The next one is decoded before it replaces the current one, to
// avoid flicker.
class Slot {
  constructor(run, size, displayWidth) {
    Object.assign(this, { run, size, displayWidth, url: null });
    this.node = h("div", { class: "slot" });
  }

  async show(cell, alt) {
    if (cell && cell.video && videoUrl(this.run, cell.video)) await this.play(cell, alt);
    else await this.still(cell, alt);
  }

  async play(cell, alt) {
    const url = videoUrl(this.run, cell.video);
    if (url === this.url) return;
    this.url = url;
    const video = await videoNode(url, alt, cell.fps, this.size && Math.max(...this.size) <= TINY);
    if (this.url !== url) { // another one was requested meanwhile
      player.videos.delete(video);
      return;
    }
    if (video) this.node.replaceChildren(video);
    else await this.still(cell, `${alt} (first frame: this browser cannot play the video)`);
  }

  async still(cell, alt) {
    const url = cell && cell.image ? imageUrl(this.run, cell.image, this.displayWidth, this.size) : "";
    if (url === this.url) return;
    this.url = url;
    const img = url && (await decoded(url));
    if (this.url !== url) return; // another image was requested meanwhile
    if (!img) {
      this.node.replaceChildren(cell ? unreadable(alt) : h("div", { class: "unreadable" }, "not saved"));
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
    const tiny = Math.max(...(this.size || [img.naturalWidth, img.naturalHeight])) <= TINY;
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
    return null; // the file is damaged or missing; the slot shows this
  }
}

// Two overlaid nodes: the first is visible left of the cut, the second right of it. The cut is the
// variable --cut of `host`, so that several wipes can move together.
let cutAt = 50; // percent, shared by all wipes
function wipe(before, after, names, host) {
  const set = (share) => {
    cutAt = Math.round(100 * Math.min(1, Math.max(0, share)));
    range.value = cutAt;
    host.style.setProperty("--cut", `${cutAt}%`);
  };
  host.style.setProperty("--cut", `${cutAt}%`);
  const range = h("input", {
    type: "range", min: 0, max: 100, value: cutAt, "aria-label": `compare ${names[0]} with ${names[1]}`,
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

// The slider over evaluations, below the reward curve.
class Timeline {
  constructor(steps, values, onmove) {
    this.steps = steps;
    const last = Math.max(1, steps.length - 1);
    this.range = h("input", {
      type: "range", min: 0, max: steps.length - 1, step: 1, "aria-label": "training step", class: "step-slider", "data-keep": "slider",
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
    const points = values.map((v, i) => [i, v]).filter(([, v]) => v !== null);
    const box = s("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": "true" });
    if (points.length < 2) return box;
    const [low, high] = extent(points.map(([, v]) => v));
    const y = (v) => (high > low ? 92 - ((v - low) / (high - low)) * 80 : 50);
    const d = points.map(([i, v], k) => `${k ? "L" : "M"}${((1000 * i) / last).toFixed(1)} ${y(v).toFixed(1)}`).join("");
    box.append(s("path", { class: "under", d: `${d}L${(1000 * points[points.length - 1][0]) / last} 100L${(1000 * points[0][0]) / last} 100Z` }), s("path", { class: "top", d }));
    return box;
  }

  set(i) {
    this.range.value = i;
    this.range.setAttribute("aria-valuetext", `step ${this.steps[i]}`);
    this.marker.style.setProperty("left", `${(100 * i) / Math.max(1, this.steps.length - 1)}%`);
  }
}

// How the result of a prompt changed between the first evaluation and the last.
const TRENDS = [
  ["learned", "Learned", "incorrect in the first evaluation, correct in the last"],
  ["lost", "Lost", "correct in the first evaluation, incorrect in the last"],
  ["right", "Always correct", "correct in every evaluation"],
  ["wrong", "Always incorrect", "incorrect in every evaluation"],
  ["mixed", "Mixed", "same result in the first and the last evaluation, different in between"],
  ["better", "Better", "higher reward in the last evaluation than in the first"],
  ["worse", "Worse", "lower reward in the last evaluation than in the first"],
  ["same", "Same", "same reward in the first and the last evaluation"],
];

function trendOf(prompt) {
  const cells = prompt.cells.filter(Boolean);
  const correct = cells.filter((c) => c.right !== undefined).map((c) => c.right);
  if (correct.length) {
    const first = correct[0], last = correct[correct.length - 1];
    if (first !== last) return last ? "learned" : "lost";
    return correct.every((r) => r === first) ? (first ? "right" : "wrong") : "mixed";
  }
  const scored = cells.map((c) => c.reward).filter((v) => v !== null);
  const by = scored.length ? scored[scored.length - 1] - scored[0] : 0;
  return by > 5e-4 ? "better" : by < -5e-4 ? "worse" : "same";
}

// The reward below an image or a response, with a mark if it is known to be correct or incorrect.
function rewardOf(cell, before) {
  if (!cell) return h("span", { class: "reward" }, "–");
  if (cell.reward === null || cell.reward === undefined) return h("span", { class: "reward bad", title: cell.error || "" }, "no score");
  return h("span", { class: "reward" }, mark(cell), figure(cell.reward), before && before !== cell ? change(before.reward, cell.reward) : null);
}

function mark(cell) {
  if (!cell || cell.right === undefined) return null;
  return h("span", { class: `mark-${cell.right ? "right" : "wrong"}`, role: "img", "aria-label": cell.right ? "correct" : "incorrect" }, icon(cell.right ? "tick" : "cross"));
}

// The components of the reward, and the text that a reward read.
function partsOf(cell) {
  if (!cell) return null;
  const parts = Object.entries(cell.parts || {});
  const rows = parts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, figure(value))]);
  if (cell.text) rows.push([h("dt", {}, "text read by the reward"), h("dd", {}, h("q", {}, cell.text))]);
  if (cell.error) rows.push([h("dt", {}, "error"), h("dd", { class: "bad" }, cell.error)]);
  return rows.length ? h("dl", { class: "facts" }, rows) : null;
}
