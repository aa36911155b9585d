"use strict";
// The same prompts and seeds over training: slider, film strips, before / after, source / result of
// edits; one prompt enlarged.

const SPEEDS = [["0.5", "½×"], ["1", "1×"], ["2", "2×"], ["4", "4×"]];
const PACE = 700; // ms per step at speed 1
const PATIENCE = 2000; // maximum ms that the animation waits for images

const evo = { run: null, data: null, at: 0, mode: "now", chosen: false, trend: "all", words: "", playing: false, speed: "1", content: null };

views.evolution = {
  title: "Evolution",
  async show(root) {
    evo.root = root;
    const run = mainRun();
    if (evo.run !== run) Object.assign(evo, { run, trend: "all", words: "" });
    let data;
    try {
      const waiting = setTimeout(() => { if (activeView === views.evolution) root.replaceChildren(loading()); }, 150);
      data = await loadOnce("/api/evolution", { run }).finally(() => clearTimeout(waiting));
    } catch (error) {
      root.replaceChildren(emptyState(`The samples of ${run} cannot be shown: ${error.message}.`));
      return;
    }
    if (activeView !== views.evolution || mainRun() !== run) return;
    buildEvolution(data);
  },
  async refresh() {
    const data = await loadOnce("/api/evolution", { run: evo.run }).catch(() => null);
    if (!data || activeView !== this || data === evo.data) return;
    const grown = evo.data && data.steps.length - evo.data.steps.length;
    if (evo.data && !grown && JSON.stringify(data) === JSON.stringify(evo.data)) return;
    buildEvolution(data);
  },
  leave() {
    evo.playing = false;
    if (evo.content && evo.content.close) evo.content.close();
  },
  key(event) {
    const input = event.target.matches("input"), pressed = event.target.matches("button, a, summary, input, select");
    const large = place.params.has("prompt");
    if (event.key === "Escape" && large) go("evolution", { prompt: null });
    else if (event.key === " " && (!pressed || event.target.type === "range")) setPlaying(!evo.playing);
    else if (input || !evo.timeline) return false;
    else if (event.key === "ArrowRight") moveTo(evo.at + 1);
    else if (event.key === "ArrowLeft") moveTo(evo.at - 1);
    else if (event.key === "Home") moveTo(0);
    else if (event.key === ",") stepFrame(-1);
    else if (event.key === ".") stepFrame(1);
    else if (event.key === "End") moveTo(evo.data.steps.length - 1);
    else if (large && event.key === "ArrowDown") neighbour(1);
    else if (large && event.key === "ArrowUp") neighbour(-1);
    else return false;
    return true;
  },
};

function buildEvolution(data) {
  if (evo.content && evo.content.close) evo.content.close();
  const focus = document.activeElement && document.activeElement.dataset.keep;
  const high = scrollY;
  evo.data = data;
  const { root, run } = evo;
  if (!data.prompts.length) {
    root.replaceChildren(h("div", { class: "bar" }, h("h2", {}, "Evolution"), h("span", { class: "grow" }), runPicker()),
      emptyState("No evaluation has saved samples yet.", "Samples appear here after the first evaluation."));
    evo.timeline = null;
    return;
  }
  const step = place.params.get("step");
  const requested = step === null ? -1 : data.steps.indexOf(Number(step));
  evo.at = requested >= 0 ? requested : data.steps.length - 1; // without a step: always the newest
  evo.hasImages = data.prompts.some((p) => p.cells.some((c) => c && c.image));
  evo.hasVideos = data.prompts.some((p) => p.cells.some((c) => c && c.video && videoUrl(run, c.video)));
  evo.edits = evo.hasImages && data.prompts.some((p) => p.shown.length);
  if (!evo.chosen || (evo.mode === "source" && !evo.edits)) evo.mode = evo.edits ? "source" : "now";
  const index = place.params.get("prompt");
  const large = index === null ? null : data.prompts.find((p) => String(p.index) === index);
  evo.large = large;
  const over = large ? [large] : data.prompts;
  evo.values = data.steps.map((_, i) => mean(rewardsAt(over, i)));
  evo.timeline = new Timeline(data.steps, evo.values, (i) => moveTo(i));
  evo.place = h("div", { class: "content" });
  put(root, large ? largeHead(large) : h("div", { class: "bar" }, h("h2", {}, "Evolution"), runPicker(), h("span", { class: "grow" }), exports()), transport(), large ? null : filters(), evo.place);
  if (large) evo.content = evo.hasImages ? new LargeImage(run, data, large) : new LargeResponse(run, data, large);
  else buildContent();
  if (large) evo.place.replaceChildren(evo.content.node);
  moveTo(evo.at, true);
  showPlaying();
  scrollTo(0, high); // new data must not scroll the page
  const again = focus && root.querySelector(`[data-keep="${focus}"]`);
  if (again) again.focus({ preventScroll: true });
}

function buildContent() {
  if (evo.content && evo.content.close) evo.content.close();
  const words = evo.words.toLowerCase().split(/\s+/).filter(Boolean);
  const prompts = evo.data.prompts.filter((p) => (evo.trend === "all" || trendOf(p) === evo.trend) && words.every((w) => p.prompt.toLowerCase().includes(w)));
  const kind = evo.hasImages ? { film: FilmStrips }[evo.mode] || ImageGrid : ResponseCards;
  evo.content = prompts.length ? new kind(evo.run, evo.data, prompts, evo.mode) : { node: emptyState("No prompts match the filter."), to() {} };
  evo.place.replaceChildren(evo.content.node);
  evo.content.to(evo.at);
}

function transport() {
  evo.button = button(icon("play"), () => setPlaying(!evo.playing), { class: "play", "aria-label": "play", title: "play (space)" });
  evo.read = h("div", { class: "readout", "aria-live": "off" });
  const speed = choice("Speed", SPEEDS, evo.speed, (value) => { evo.speed = value; });
  return h("div", { class: "transport" }, evo.button, evo.timeline.node, evo.read, speed, evo.hasVideos ? videoBar() : null);
}

function filters() {
  const counts = {};
  for (const p of evo.data.prompts) counts[trendOf(p)] = (counts[trendOf(p)] || 0) + 1;
  const present = TRENDS.filter(([name]) => counts[name]);
  const options = [["all", `All ${evo.data.prompts.length}`], ...present.map(([name, title, note]) => [name, `${title} ${counts[name]}`, note])];
  const modes = [["now", evo.hasVideos ? "Videos" : "Images"], ["wipe", "Before / after"], ["film", "Film strips"]];
  if (evo.edits) modes.unshift(["source", "Source / result"]);
  const show = (mode) => {
    Object.assign(evo, { mode, chosen: true });
    buildContent();
  };
  const search = h("input", { type: "search", placeholder: "Search prompts …", "aria-label": "search prompts", "data-keep": "find", value: evo.words, oninput: (e) => { evo.words = e.target.value; buildContent(); } });
  return h("div", { class: "bar filters" },
    evo.hasImages ? choice("Show", modes, evo.mode, show) : null,
    choice("Prompts", options, evo.trend, (t) => { evo.trend = t; buildContent(); }), h("span", { class: "grow" }), search);
}

function exports(prompt) {
  if (isReport || !evo.hasImages) return null;
  const link = (kind, text, title) => h("a", { class: "button", href: address("film", { run: evo.run, kind, ...(prompt ? { prompt: prompt.index } : {}) }), download: "", title }, icon("down"), text);
  if (!prompt) return link("sheet", "Contact sheet", "all prompts over training as one PNG");
  return [link("gif", "GIF", "this prompt over training"), link("mp4", "MP4", "this prompt over training")];
}

function moveTo(index, quiet = false) {
  const last = evo.data.steps.length - 1;
  evo.at = Math.max(0, Math.min(last, index));
  evo.timeline.set(evo.at);
  const now = evo.values[evo.at];
  evo.read.replaceChildren(
    h("span", { class: "big" }, `step ${evo.data.steps[evo.at]}`),
    h("span", { class: "soft" }, `${evo.large ? "reward" : "mean reward"} ${figure(now)} `, evo.at ? change(evo.values[0], now) : null));
  evo.content.to(evo.at);
  if (!quiet) adjust({ step: evo.at === last ? null : evo.data.steps[evo.at] });
}

async function setPlaying(on) {
  evo.playing = on;
  const turn = (evo.turn = (evo.turn || 0) + 1);
  showPlaying();
  if (on && evo.at === evo.data.steps.length - 1) moveTo(0);
  while (evo.playing && evo.turn === turn && evo.at < evo.data.steps.length - 1) {
    const rest = new Promise((done) => { setTimeout(done, PACE / Number(evo.speed)); });
    const late = new Promise((done) => { setTimeout(done, PATIENCE); });
    await Promise.all([rest, Promise.race([late, evo.content.ready ? evo.content.ready(evo.at + 1) : null])]);
    if (evo.playing && evo.turn === turn) moveTo(evo.at + 1);
  }
  if (evo.turn === turn) {
    evo.playing = false;
    showPlaying();
  }
}

function showPlaying() {
  evo.button.replaceChildren(icon(evo.playing ? "pause" : "play"));
  evo.button.setAttribute("aria-label", evo.playing ? "pause" : "play");
}

function neighbour(by) {
  const all = evo.data.prompts, next = all[all.indexOf(evo.large) + by];
  if (next) go("evolution", { prompt: next.index, step: place.params.get("step") });
}

function largeHead(prompt) {
  const all = evo.data.prompts, at = all.indexOf(prompt);
  const step = (by, name, text) => button(icon(name), () => neighbour(by), { class: "round", "aria-label": text, disabled: !all[at + by] });
  return h("div", { class: "bar" },
    h("a", { class: "button", href: addressOf("evolution", { step: place.params.get("step") }) }, icon("left"), "All prompts"),
    h("span", { class: "soft" }, `prompt ${at + 1} of ${all.length}`), step(-1, "left", "previous prompt"), step(1, "right", "next prompt"),
    h("span", { class: "grow" }), exports(prompt));
}

const altOf = (prompt, step, cell) => `${prompt.prompt}, step ${step}${cell && cell.reward !== null ? `, reward ${figure(cell.reward)}` : ""}`;

// What a wipe compares with: the source of an edit, or the first step.
function leftOf(prompt, data, isSource) {
  if (isSource && prompt.shown.length) return { name: "source", cell: { image: prompt.shown[0] }, alt: `${prompt.prompt}, source` };
  return { name: `step ${data.steps[0]}`, cell: prompt.cells[0], alt: altOf(prompt, data.steps[0], prompt.cells[0]), reward: rewardOf(prompt.cells[0]) };
}

// All prompts at the selected step, optionally compared with the first step or the source by a wipe.
class ImageGrid {
  constructor(run, data, prompts, mode) {
    Object.assign(this, { run, data, mode, at: 0, visible: new Set() });
    this.node = h("div", { class: "images" });
    this.cards = prompts.map((p) => this.card(p));
    this.node.append(...this.cards.map((c) => c.node));
    const enter = (card) => { this.visible.add(card); this.update(card); };
    this.observer = whenNear(this.cards, enter, (card) => this.visible.delete(card));
  }

  card(prompt) {
    const slot = new Slot(this.run, this.data.size, 384);
    const left = this.mode === "now" ? null : leftOf(prompt, this.data, this.mode === "source");
    const first = left && new Slot(this.run, left.name === "source" ? null : this.data.size, 384);
    const under = h("div", { class: "under" }), read = h("div", { class: "read" });
    const shape = shapeOf(this.data);
    const link = () => addressOf("evolution", { prompt: prompt.index, step: place.params.get("step") });
    const frame = first ? wipe(first.node, slot.node, [left.name, "the selected step"], this.node) : slot.node;
    const words = h("span", { class: "prompt" }, prompt.prompt);
    const node = first
      ? h("div", { class: "card" }, frame, h("a", { href: link(), class: "words" }, words), under, read)
      : h("a", { class: "card", href: link(), "data-prompt": prompt.index }, frame, words, under, read);
    for (const [k, v] of Object.entries(shape)) node.style.setProperty(k, v);
    node.addEventListener("pointerdown", () => { const a = node.href !== undefined ? node : node.querySelector("a"); a.href = link(); });
    return { prompt, slot, left, first, under, read, node };
  }

  update(card) {
    const { prompt, slot, left, first, under, read, node } = card, cell = prompt.cells[this.at], step = this.data.steps[this.at];
    slot.show(cell, altOf(prompt, step, cell));
    if (first) first.show(left.cell, left.alt);
    node.classList.toggle("is-wrong", Boolean(cell && cell.right === false));
    put(under, left && left.reward ? [left.reward, h("span", { class: "to" }, "→")] : null, rewardOf(cell, prompt.cells[0]));
    put(read, cell && cell.text ? ["read ", h("q", {}, cell.text)] : null);
  }

  to(at) {
    this.at = at;
    for (const card of this.visible) this.update(card);
  }

  ready(at) {
    return Promise.all([...this.visible].map(({ prompt, slot }) => {
      const cell = prompt.cells[at];
      return cell && cell.image ? decoded(imageUrl(this.run, cell.image, slot.displayWidth, slot.size)) : null;
    }));
  }

  close() { this.observer.disconnect(); }
}

// One row per prompt, one image per evaluation. Rows are built when they come near the viewport.
class FilmStrips {
  constructor(run, data, prompts) {
    Object.assign(this, { run, data, at: 0 });
    const shape = shapeOf(data);
    this.rows = prompts.map((prompt) => ({
      prompt, node: h("div", { class: "film-row", vars: shape }, h("a", { class: "prompt", href: addressOf("evolution", { prompt: prompt.index }) }, prompt.prompt)),
    }));
    this.node = h("div", { class: "films" }, this.rows.map((r) => r.node));
    this.observer = whenNear(this.rows, (row) => {
      if (row.strip) return;
      row.strip = filmStrip(run, data, row.prompt);
      row.node.append(row.strip.node);
      row.strip.to(this.at);
    });
  }

  to(at) {
    this.at = at;
    for (const { strip } of this.rows) if (strip) strip.to(at);
  }

  close() { this.observer.disconnect(); }
}

function filmStrip(run, data, prompt) {
  const frames = data.steps.map((step, i) => {
    const cell = prompt.cells[i];
    const what = cell && cell.image ? imageNode(run, cell.image, altOf(prompt, step, cell), 192, data.size) : h("div", { class: "unreadable" }, "not saved");
    return h("button", { type: "button", class: "frame", title: cell && cell.text ? `read “${cell.text}”` : "", onclick: () => moveTo(i) }, what, h("span", { class: "cap" }, h("span", {}, `step ${step}`), rewardOf(cell)));
  });
  const sources = prompt.shown.map((name) => h("div", { class: "frame source" }, imageNode(run, name, `${prompt.prompt}, source`, 192, null), h("span", { class: "cap" }, "source")));
  const node = h("div", { class: "strip" }, sources, frames);
  const to = (at) => {
    frames.forEach((frame, i) => {
      frame.classList.toggle("here", i === at);
      frame.setAttribute("aria-current", i === at ? "step" : "false");
    });
    const frame = frames[at], left = frame.offsetLeft - node.clientWidth / 2 + frame.offsetWidth / 2;
    node.scrollTo({ left, behavior: reducedMotion() ? "auto" : "smooth" });
  };
  return { node, to };
}

// One prompt: a large wipe between the first step, or the source, and the selected step, details, the
// film strip.
class LargeImage {
  constructor(run, data, prompt) {
    Object.assign(this, { run, data, prompt, at: 0, isSource: prompt.shown.length > 0 });
    const displayWidth = 1200;
    this.before = new Slot(run, this.isSource ? null : data.size, displayWidth);
    this.after = new Slot(run, data.size, displayWidth);
    const stage = h("div", { class: "stage", vars: shapeOf(data) });
    this.tags = h("div", { class: "tags" });
    stage.append(wipe(this.before.node, this.after.node, ["before", "the selected step"], stage), this.tags);
    const compare = (value) => {
      this.isSource = value === "source";
      this.to(this.at);
    };
    const options = [["source", "Source"], ["first", `Step ${data.steps[0]}`]];
    if (this.isSource) stage.prepend(choice("Compare with", options, "source", compare));
    this.facts = h("div", { class: "large-facts" });
    this.strip = filmStrip(run, data, prompt);
    this.node = h("div", { class: "large" }, h("h1", { class: "prompt" }, prompt.prompt), h("div", { class: "large-two" }, stage, this.facts), h("div", { vars: shapeOf(data) }, this.strip.node));
  }

  to(at) {
    this.at = at;
    const { prompt, data } = this, first = prompt.cells[0], cell = prompt.cells[at], step = data.steps[at];
    const left = leftOf(prompt, data, this.isSource);
    this.before.show(left.cell, left.alt);
    this.after.show(cell, altOf(prompt, step, cell));
    this.tags.replaceChildren(h("span", {}, left.name, left.reward), h("span", {}, `step ${step}`, rewardOf(cell, first)));
    put(this.facts, partsOf(cell), h("dl", { class: "facts" }, h("dt", {}, "seed"), h("dd", {}, prompt.seed)));
    this.strip.to(at);
  }

  ready(at) {
    const cell = this.prompt.cells[at];
    return cell && cell.image ? decoded(imageUrl(this.run, cell.image, this.after.displayWidth, this.data.size)) : null;
  }
}
