"use strict";
// The playground: a prompt of one's own, drawn by the base and the trained model with one seed.

const ASK_EVERY = 400; // ms between two questions how far it is
const playing = { prompt: "", seed: 0, n: 4, score: true, answer: "", image: "", imageName: "", busy: false, result: null, asked: null, mode: "side" };

views.playground = {
  title: "Playground",
  needsServer: true,
  show(root) {
    playing.root = root;
    const run = mainRun(), { family, limits } = runs.get(run), sees = family === "language";
    if (playing.run !== run) Object.assign(playing, { run, result: null, prompt: "", answer: "", image: "", imageName: "" });
    const set = (name, read) => (e) => { playing[name] = read(e.target); };
    const prompt = h("textarea", { rows: 3, required: true, maxlength: 20000, id: "play-prompt", value: playing.prompt, oninput: set("prompt", (t) => t.value),
      placeholder: sees ? "How many red circles are there?" : 'a red sign that says "KITE"', "aria-describedby": limits ? "play-limits" : null,
      onkeydown: (e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) form.requestSubmit(); } });
    const number = (label, name, low, high) => h("label", {}, label, h("input", { type: "number", min: low, max: high, required: true, value: playing[name], oninput: set(name, (t) => Number(t.value)) }));
    playing.button = h("button", { type: "submit", class: "button strong" }, sees ? "Ask both" : "Draw both");
    const form = h("form", { class: "ask-form", onsubmit: (e) => {
      e.preventDefault();
      play();
    } },
    h("label", { for: "play-prompt" }, sees ? "Question" : "Prompt"), prompt, limits ? h("small", { id: "play-limits" }, limits) : null,
    sees ? [pictureField(), h("label", { class: "field" }, "Wanted answer, to score with", h("input", { type: "text", id: "play-answer", maxlength: 2000, value: playing.answer, oninput: set("answer", (t) => t.value) }))] : null,
    h("div", { class: "row" }, number("Seed", "seed", 0, 2 ** 31 - 1), number(sees ? "Responses" : "Pictures", "n", 1, 16)),
    h("label", { class: "check" }, h("input", { type: "checkbox", checked: playing.score, onchange: set("score", (t) => t.checked) }), "score with the run's rewards"),
    h("div", { class: "row" }, playing.button, button("Another seed", () => {
      playing.seed = Math.floor(Math.random() * 2 ** 31);
      form.querySelector("input[type=number]").value = playing.seed;
      form.requestSubmit();
    }, { class: "button" })));
    playing.out = h("div", { class: "play-out" });
    put(root, h("div", { class: "bar" }, h("h2", {}, "Playground"), runPicker()), h("div", { class: "play-two" }, form, playing.out));
    drawPlay();
    suggest(run);
  },
  refresh() {},
};

function pictureField() {
  const file = h("input", { type: "file", accept: "image/*", "aria-label": "picture to look at", onchange: async () => {
    const [chosen] = file.files;
    if (!chosen) return;
    choosePicture(await base64Of(chosen), chosen.type, chosen.name);
  } });
  playing.preview = h("span", { class: "preview" });
  if (playing.image) choosePicture(playing.image, playing.imageType, playing.imageName);
  return h("label", { class: "file" }, playing.preview, h("span", {}, "Picture to look at", h("small", {}, "press to choose another")), file);
}

function choosePicture(data, type, name) {
  Object.assign(playing, { image: data, imageType: type, imageName: name });
  const img = h("img", { src: `data:${type};base64,${data}`, alt: name, onload: () => { if (img.naturalWidth <= TINY) img.classList.add("pixels"); } });
  put(playing.preview, img);
}

async function base64Of(file) {
  const reader = new FileReader();
  await new Promise((done, failed) => {
    reader.onload = done;
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
  return reader.result.slice(reader.result.indexOf(",") + 1);
}

// A prompt of the run's own evaluation to begin with.
async function suggest(run) {
  const found = await loadOnce("/api/evolution", { run }).catch(() => null);
  if (!found || shown !== views.playground || playing.run !== run || playing.prompt || !found.prompts.length) return;
  const first = found.prompts[0];
  playing.prompt = first.prompt;
  document.getElementById("play-prompt").value = first.prompt;
  const wantedField = document.getElementById("play-answer");
  if (wantedField) wantedField.value = playing.answer = first.answer;
  if (!first.shown.length || playing.image) return;
  const answer = await fetch(pictureUrl(run, first.shown[0], Infinity));
  if (!answer.ok || playing.image) return;
  const blob = await answer.blob();
  choosePicture(await base64Of(blob), blob.type, "the first picture of the evaluation");
}

async function play() {
  if (playing.busy) return;
  const { run, prompt, seed, n, score, image, answer } = playing;
  const body = { run, prompt, seed, n, score, image, answer }; // both are empty for a model that draws
  Object.assign(playing, { busy: true, result: null, asked: body, told: { doing: "asking", share: null } });
  drawPlay();
  try {
    const headers = { "Content-Type": "application/json" };
    let job = await answered(await fetch("api/play", { method: "POST", headers, body: JSON.stringify(body) }));
    while (job.state === "busy") {
      playing.told = job;
      drawPlay();
      await new Promise((done) => { setTimeout(done, ASK_EVERY); });
      job = await load("/api/play");
    }
    playing.result = job.result;
  } catch (error) {
    playing.result = { error: error instanceof Refused ? error.message : "the server does not answer; is `gesso view` still running?" };
  }
  playing.busy = false;
  drawPlay();
}

function drawPlay() {
  const { out, busy, result, told } = playing;
  playing.button.disabled = busy;
  if (busy) put(out, playProgress(told));
  else if (!result) put(out, nothing("The base model and the trained one, side by side, with the same seed.", "The first time, the model is loaded: that takes a while."));
  else if (result.error) put(out, h("div", { class: "trouble", role: "alert" }, result.error));
  else put(out, playResult(result));
}

function playProgress({ doing, share }) {
  const known = share !== null && share !== undefined;
  return h("div", { class: "working", role: "status" }, h("p", {}, `${doing || "working"} …`),
    h("div", { class: known ? "progress running" : "progress unknown", role: "progressbar", "aria-valuenow": known ? Math.round(100 * share) : null, "aria-label": doing }, h("i", { vars: { width: known ? `${100 * share}%` : "30%" } })));
}

function playResult(result) {
  const { asked } = playing;
  const scores = (cells) => mean(cells.map((c) => c.reward).filter((v) => v !== null && v !== undefined));
  const [base, trained] = [scores(result.base), scores(result.trained)];
  const modes = [["side", "Side by side"], ["wipe", "Wipe"]];
  const pick = (mode) => {
    playing.mode = mode;
    drawPlay();
  };
  const pairs = h("div", { class: "play-pairs" });
  put(pairs, result.base.map((cell, i) => playPair(cell, result.trained[i], i, pairs)));
  return [
    h("div", { class: "bar" }, h("h3", { class: "prompt" }, asked.prompt), h("span", { class: "grow" }), result.base.some((c) => c.image) ? choice("Show", modes, playing.mode, pick) : null),
    h("p", { class: "soft" }, `Base against the checkpoint of step ${result.step}, seed ${asked.seed}. `, base === null ? null : ["Mean reward ", figure(base), " → ", h("b", {}, figure(trained)), " ", change(base, trained)]),
    (result.notes || []).map((note) => h("p", { class: "note" }, note)), pairs,
  ];
}

function playPair(base, trained, i, host) {
  const label = (name, cell) => h("span", {}, h("em", {}, name), cell.reward === undefined ? null : rewardOf(cell), cell.text ? h("span", { class: "read" }, "read ", h("q", {}, cell.text)) : null);
  if (base.image) {
    const image = (cell, name) => {
      const img = h("img", { alt: `${playing.asked.prompt}, ${name}, sample ${i + 1}`, src: cell.image, draggable: "false", onload: () => { if (Math.max(img.naturalWidth, img.naturalHeight) <= TINY) img.classList.add("pixels"); } });
      return h("div", { class: "slot" }, img);
    };
    const [left, right] = [image(base, "base"), image(trained, "trained")];
    const both = playing.mode === "side" ? h("div", { class: "side" }, left, right) : wipe(left, right, ["base", "trained"], host);
    return h("figure", { class: "play-pair" }, both, h("figcaption", {}, label("base", base), label("trained", trained)));
  }
  return h("figure", { class: "play-pair words" },
    h("div", {}, label("base", base), responseText(base.response || "")), h("div", {}, label("trained", trained), responseText(trained.response || "", base.response || "")));
}
