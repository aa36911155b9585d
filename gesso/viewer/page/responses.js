"use strict";
// The evolution of a language model: image, question, expected answer, and responses.

const DIFF = 250_000; // maximum pairs of words to compare; longer responses are shown without marks
const ALIKE = 0.4; // minimum similarity of two responses; below it, marks would cover everything

const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];

// The words of `now` as pairs of [word, isNew], where new words are not in `before`; null if the two
// have little in common or are too long. Longest common subsequence.
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
  const pairs = [];
  let i = 0, j = 0;
  while (j < b.length) {
    if (i < a.length && a[i] === b[j]) {
      pairs.push([b[j], false]);
      i += 1;
      j += 1;
    } else if (i < a.length && length[(i + 1) * wide + j] >= length[i * wide + j + 1]) i += 1;
    else {
      pairs.push([b[j], true]);
      j += 1;
    }
  }
  return pairs;
}

function responseText(response, before) {
  if (!response.trim()) return h("div", { class: "response-text soft" }, "empty");
  const words = before === undefined || before === response ? null : newWords(before, response);
  if (!words) return h("div", { class: "response-text" }, response);
  return h("div", { class: "response-text" }, words.map(([word, isNew]) => (isNew && word.trim() ? h("mark", {}, word) : word)));
}

// One square per evaluation, coloured by correctness, or by the reward.
function rewardSquares(prompt, data, onpick) {
  const [low, high] = extent(prompt.cells.filter((c) => c && c.reward !== null).map((c) => c.reward));
  return prompt.cells.map((cell, i) => {
    const kind = !cell || cell.reward === null ? "none" : cell.right === undefined ? "scored" : cell.right ? "right" : "wrong";
    const share = cell && high > low ? (cell.reward - low) / (high - low) : 1;
    const result = { right: "correct, ", wrong: "incorrect, " }[kind] || "";
    const label = `step ${data.steps[i]}: ${cell ? `${result}reward ${figure(cell.reward)}` : "not saved"}`;
    return h("button", { type: "button", class: `square ${kind}`, title: label, "aria-label": label, tabindex: "-1", vars: { "--share": share }, onclick: () => onpick(i) });
  });
}

const expectedAnswer = (prompt) => (prompt.answer ? h("span", { class: "expected" }, "expected ", h("b", {}, prompt.answer)) : null);

function promptImages(run, prompt, width) {
  if (!prompt.shown.length) return null;
  return h("div", { class: "prompt-images" }, prompt.shown.map((name, i) => imageNode(run, name, `image ${i + 1} of the prompt: ${prompt.prompt}`, width, null)));
}

class ResponseCards {
  constructor(run, data, prompts) {
    Object.assign(this, { run, data, at: 0, visible: new Set() });
    this.cards = prompts.map((p) => this.card(p));
    this.node = h("div", { class: "responses" }, this.cards.map((c) => c.node));
    const enter = (card) => { this.visible.add(card); this.update(card); };
    this.observer = whenNear(this.cards, enter, (card) => this.visible.delete(card));
  }

  card(prompt) {
    const first = prompt.cells[0], now = h("div", { class: "turn now" });
    const squares = rewardSquares(prompt, this.data, moveTo);
    const then = h("div", { class: "turn then" }, h("div", { class: "when" }, `step ${this.data.steps[0]}`, rewardOf(first)), first ? responseText(first.response || "") : h("div", { class: "response-text soft" }, "not saved"));
    const node = h("article", { class: "response-card" }, promptImages(this.run, prompt, 192),
      h("div", { class: "conversation" },
        h("div", { class: "question" }, h("a", { href: addressOf("evolution", { prompt: prompt.index }), "data-prompt": prompt.index }, prompt.prompt), expectedAnswer(prompt)),
        then, now, h("div", { class: "squares" }, squares)));
    return { prompt, squares, now, then, node };
  }

  update({ prompt, squares, now, then }) {
    const cell = prompt.cells[this.at], first = prompt.cells[0];
    then.hidden = this.at === 0;
    put(now, h("div", { class: "when" }, `step ${this.data.steps[this.at]}`, rewardOf(cell, first)),
      cell ? responseText(cell.response || "", first ? first.response : undefined) : h("div", { class: "response-text soft" }, "not saved"));
    squares.forEach((square, i) => square.classList.toggle("here", i === this.at));
  }

  to(at) {
    this.at = at;
    for (const card of this.visible) this.update(card);
  }

  close() { this.observer.disconnect(); }
}

// One question with all its responses; consecutive equal responses are shown once.
class LargeResponse {
  constructor(run, data, prompt) {
    Object.assign(this, { data, prompt });
    this.turns = turnsOf(prompt, data).map(({ from, to, cell, before }) => {
      const when = from === to ? `step ${data.steps[from]}` : `steps ${data.steps[from]} to ${data.steps[to]}`;
      const node = h("li", { class: cell && cell.right !== undefined ? (cell.right ? "is-right" : "is-wrong") : "" },
        h("div", { class: "when" }, button(when, () => moveTo(to), { class: "plain" }), rewardOf(cell, before), cell && cell.text ? h("span", { class: "read" }, "read ", h("q", {}, cell.text)) : null),
        cell ? responseText(cell.response || "", before ? before.response : undefined) : h("div", { class: "response-text soft" }, "not saved"));
      return { from, to, node };
    });
    this.facts = h("div", { class: "large-facts" });
    this.node = h("div", { class: "large" }, h("h1", { class: "prompt" }, prompt.prompt), expectedAnswer(prompt),
      h("div", { class: "large-two" }, h("ol", { class: "turns" }, this.turns.map((t) => t.node)), h("div", {}, promptImages(run, prompt, 384), this.facts)));
  }

  to(at) {
    for (const { from, to, node } of this.turns) node.classList.toggle("here", from <= at && at <= to);
    put(this.facts, partsOf(this.prompt.cells[at]), h("dl", { class: "facts" }, h("dt", {}, "seed"), h("dd", {}, this.prompt.seed)));
  }
}

function turnsOf(prompt, data) {
  const turns = [];
  data.steps.forEach((_, i) => {
    const cell = prompt.cells[i], last = turns[turns.length - 1];
    const same = last && (last.cell ? cell && cell.response === last.cell.response && cell.reward === last.cell.reward : !cell);
    if (same) last.to = i;
    else turns.push({ from: i, to: i, cell, before: last ? last.cell : null });
  });
  return turns;
}
