"use strict";
// The evolution of a model that writes: picture, question, wanted answer, and what it replied.

const DIFF = 250_000; // pairs of words compared at most; longer responses are shown without marks
const ALIKE = 0.4; // of two responses; beneath it they are different, and marks would cover everything

const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];

// Which words of `now` are not in `before`: pairs of [word, isNew]; null where the two have little
// in common or are too long. Longest common subsequence.
function newWords(before, now) {
  const a = wordsOf(before), b = wordsOf(now);
  if (a.length * b.length > DIFF) return null;
  const wide = b.length + 1, length = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      length[i * wide + j] = a[i] === b[j] ? length[(i + 1) * wide + j + 1] + 1 : Math.max(length[(i + 1) * wide + j], length[i * wide + j + 1]);
    }
  }
  if ((2 * length[0]) / Math.max(1, a.length + b.length) < ALIKE) return null;
  const told = [];
  let i = 0, j = 0;
  while (j < b.length) {
    if (i < a.length && a[i] === b[j]) {
      told.push([b[j], false]);
      i += 1;
      j += 1;
    } else if (i < a.length && length[(i + 1) * wide + j] >= length[i * wide + j + 1]) i += 1;
    else {
      told.push([b[j], true]);
      j += 1;
    }
  }
  return told;
}

function responseText(response, before) {
  if (!response.trim()) return h("div", { class: "says soft" }, "empty");
  const told = before === undefined || before === response ? null : newWords(before, response);
  if (!told) return h("div", { class: "says" }, response);
  return h("div", { class: "says" }, told.map(([word, isNew]) => (isNew && word.trim() ? h("mark", {}, word) : word)));
}

// A square an evaluation, coloured by right and wrong, or by how high the reward is.
function course(prompt, found, onpick) {
  const [low, high] = extent(prompt.cells.filter((c) => c && c.reward !== null).map((c) => c.reward));
  return prompt.cells.map((cell, i) => {
    const kind = !cell || cell.reward === null ? "none" : cell.right === undefined ? "scored" : cell.right ? "right" : "wrong";
    const share = cell && high > low ? (cell.reward - low) / (high - low) : 1;
    const told = `step ${found.steps[i]}: ${cell ? `${kind === "scored" ? "" : `${kind}, `}reward ${figure(cell.reward)}` : "none kept"}`;
    return h("button", { type: "button", class: `square ${kind}`, title: told, "aria-label": told, tabindex: "-1", vars: { "--share": share }, onclick: () => onpick(i) });
  });
}

const wanted = (prompt) => (prompt.answer ? h("span", { class: "wanted" }, "wanted ", h("b", {}, prompt.answer)) : null);

function seenPictures(run, prompt, width) {
  if (!prompt.shown.length) return null;
  return h("div", { class: "shown" }, prompt.shown.map((name, i) => picture(run, name, `picture ${i + 1} of the prompt: ${prompt.prompt}`, width, null)));
}

class ResponseCards {
  constructor(run, found, prompts) {
    Object.assign(this, { run, found, at: 0, seen: new Set() });
    this.cards = prompts.map((p) => this.card(p));
    this.node = h("div", { class: "responses" }, this.cards.map((c) => c.node));
    const come = (card) => { this.seen.add(card); this.update(card); };
    this.eyes = nearing(this.cards, come, (card) => this.seen.delete(card));
  }

  card(prompt) {
    const first = prompt.cells[0], now = h("div", { class: "turn now" });
    const squares = course(prompt, this.found, moveTo);
    const then = h("div", { class: "turn then" }, h("div", { class: "when" }, `step ${this.found.steps[0]}`, rewardOf(first)), first ? responseText(first.response || "") : h("div", { class: "says soft" }, "none kept"));
    const node = h("article", { class: "response-card" }, seenPictures(this.run, prompt, 192),
      h("div", { class: "talk" },
        h("div", { class: "ask" }, h("a", { href: addressOf("evolution", { prompt: prompt.index }), "data-prompt": prompt.index }, prompt.prompt), wanted(prompt)),
        then, now, h("div", { class: "squares" }, squares)));
    return { prompt, squares, now, then, node };
  }

  update({ prompt, squares, now, then }) {
    const cell = prompt.cells[this.at], first = prompt.cells[0];
    then.hidden = this.at === 0;
    put(now, h("div", { class: "when" }, `step ${this.found.steps[this.at]}`, rewardOf(cell, first)),
      cell ? responseText(cell.response || "", first ? first.response : undefined) : h("div", { class: "says soft" }, "none kept"));
    squares.forEach((square, i) => square.classList.toggle("here", i === this.at));
  }

  to(at) {
    this.at = at;
    for (const card of this.seen) this.update(card);
  }

  close() { this.eyes.disconnect(); }
}

// One question with all its answers; equal ones after one another are told once.
class LargeResponse {
  constructor(run, found, prompt) {
    Object.assign(this, { found, prompt });
    this.turns = turnsOf(prompt, found).map(({ from, to, cell, before }) => {
      const when = from === to ? `step ${found.steps[from]}` : `steps ${found.steps[from]} to ${found.steps[to]}`;
      const node = h("li", { class: cell && cell.right !== undefined ? (cell.right ? "is-right" : "is-wrong") : "" },
        h("div", { class: "when" }, button(when, () => moveTo(to), { class: "plain" }), rewardOf(cell, before), cell && cell.text ? h("span", { class: "read" }, "read ", h("q", {}, cell.text)) : null),
        cell ? responseText(cell.response || "", before ? before.response : undefined) : h("div", { class: "says soft" }, "none kept"));
      return { from, to, node };
    });
    this.facts = h("div", { class: "large-facts" });
    this.node = h("div", { class: "large" }, h("h1", { class: "prompt" }, prompt.prompt), wanted(prompt),
      h("div", { class: "large-two" }, h("ol", { class: "turns" }, this.turns.map((t) => t.node)), h("div", {}, seenPictures(run, prompt, 384), this.facts)));
  }

  to(at) {
    for (const { from, to, node } of this.turns) node.classList.toggle("here", from <= at && at <= to);
    put(this.facts, partsOf(this.prompt.cells[at]), h("dl", { class: "facts" }, h("dt", {}, "seed"), h("dd", {}, this.prompt.seed)));
  }
}

function turnsOf(prompt, found) {
  const turns = [];
  found.steps.forEach((_, i) => {
    const cell = prompt.cells[i], last = turns[turns.length - 1];
    const same = last && (last.cell ? cell && cell.response === last.cell.response && cell.reward === last.cell.reward : !cell);
    if (same) last.to = i;
    else turns.push({ from: i, to: i, cell, before: last ? last.cell : null });
  });
  return turns;
}
