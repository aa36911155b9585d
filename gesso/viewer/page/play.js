"use strict";
// The playground: samples for a custom prompt from the base and the trained model with the same seed.

const POLL_EVERY = 400; // ms between two requests for the progress
const playing = { prompt: "", seed: 0, n: 4, score: true, answer: "", images: [], busy: false, result: null, request: null, mode: "side" };

views.playground = {
  title: "Playground",
  needsServer: true,
  show(root) {
    playing.root = root;
    const run = mainRun(), { family, frames, limits } = runs.get(run), isLanguage = family === "language";
    const made = isLanguage ? "Responses" : frames > 1 ? "Videos" : "Images";
    if (playing.run !== run) Object.assign(playing, { run, result: null, prompt: "", answer: "", images: [] });
    const set = (name, read) => (e) => { playing[name] = read(e.target); };
    const prompt = h("textarea", { rows: 3, required: true, maxlength: 20000, id: "play-prompt", value: playing.prompt, oninput: set("prompt", (t) => t.value),
      placeholder: isLanguage ? "How many red circles are there?" : 'a red sign that says "KITE"', "aria-describedby": limits ? "play-limits" : null,
      onkeydown: (e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) form.requestSubmit(); } });
    const number = (label, name, low, high) => h("label", {}, label, h("input", { type: "number", min: low, max: high, required: true, value: playing[name], oninput: set(name, (t) => Number(t.value)) }));
    playing.field = h("div", { class: "image-field" }, isLanguage ? imageField() : null); // of image models: see suggest
    playing.button = h("button", { type: "submit", class: "button strong" }, `Generate ${made.toLowerCase()}`);
    const form = h("form", { class: "play-form", onsubmit: (e) => {
      e.preventDefault();
      play();
    } },
    h("label", { for: "play-prompt" }, isLanguage ? "Question" : "Prompt"), prompt, limits ? h("small", { id: "play-limits" }, limits) : null,
    playing.field, isLanguage ? [ h("label", { class: "field" }, "Expected answer, for scoring", h("input", { type: "text", id: "play-answer", maxlength: 2000, value: playing.answer, oninput: set("answer", (t) => t.value) }))] : null,
    h("div", { class: "row" }, number("Seed", "seed", 0, 2 ** 31 - 1), number(made, "n", 1, 16)),
    h("label", { class: "check" }, h("input", { type: "checkbox", checked: playing.score, onchange: set("score", (t) => t.checked) }), "score with the run's rewards"),
    h("div", { class: "row" }, playing.button, button("New seed", () => {
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

function imageField() {
  const file = h("input", { type: "file", accept: "image/*", multiple: true, "aria-label": "prompt images", onchange: async () => {
    const chosen = [...file.files], limit = Number(document.querySelector("meta[name=max-upload]").content);
    if (!chosen.length) return;
    if (chosen.reduce((sum, { size }) => sum + size, 0) > limit) { // the server would close the connection
      const [what, choose] = chosen.length > 1 ? [`these ${chosen.length} images are`, "images of together"] : [`${chosen[0].name} is`, "an image of"];
      playing.result = { error: `${what} too large; choose ${choose} at most ${Math.floor(limit / 2 ** 20)} MiB` };
      file.value = "";
      drawPlay();
      return;
    }
    chooseImages(await Promise.all(chosen.map(uploaded)));
  } });
  playing.preview = h("span", { class: "preview" });
  playing.remove = button("Remove", () => {
    file.value = "";
    chooseImages([]);
  }, { class: "button" });
  chooseImages(playing.images);
  return [h("label", { class: "file" }, playing.preview, h("span", {}, "Prompt image", h("small", {}, "click to choose one or several")), file), playing.remove];
}

function chooseImages(images) {
  playing.images = images;
  playing.remove.hidden = !images.length;
  put(playing.preview, images.map((image) => {
    const img = h("img", { src: uriOf(image), alt: image.name, onload: () => { if (img.naturalWidth <= TINY) img.classList.add("pixels"); } });
    return img;
  }));
}

const uriOf = ({ type, data }) => `data:${type};base64,${data}`;
const uploaded = async (file) => ({ data: await base64Of(file), type: file.type, name: file.name });

async function base64Of(file) {
  const reader = new FileReader();
  await new Promise((done, failed) => {
    reader.onload = done;
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
  return reader.result.slice(reader.result.indexOf(",") + 1);
}

// Fills in the first prompt of the run's evaluation.
async function suggest(run) {
  const evolution = await loadOnce("/api/evolution", { run }).catch(() => null);
  if (!evolution || activeView !== views.playground || playing.run !== run || !evolution.prompts.length) return;
  const first = evolution.prompts[0];
  if (first.shown.length && !playing.field.childElementCount) put(playing.field, imageField()); // the model edits images
  if (playing.prompt) return;
  playing.prompt = first.prompt;
  document.getElementById("play-prompt").value = first.prompt;
  const answerField = document.getElementById("play-answer");
  if (answerField) answerField.value = playing.answer = first.answer;
  if (!first.shown.length || playing.images.length) return;
  const responses = await Promise.all(first.shown.map((shown) => fetch(imageUrl(run, shown, Infinity))));
  if (responses.some(({ ok }) => !ok)) return;
  const blobs = await Promise.all(responses.map((response) => response.blob()));
  const images = await Promise.all(blobs.map(async (blob, i) => ({ data: await base64Of(blob), type: blob.type, name: `image ${i + 1} of the first prompt` })));
  if (playing.run === run && !playing.images.length) chooseImages(images);
}

async function play() {
  if (playing.busy) return;
  const { run, prompt, seed, n, score, images, answer } = playing;
  const body = { run, prompt, seed, n, score, answer, images: images.map(({ data }) => data) }; // no answer for image models
  playing.source = images.length ? uriOf(images[0]) : ""; // the image that is edited; further ones are references
  Object.assign(playing, { busy: true, result: null, request: body, progress: { doing: "sending the request", share: null } });
  drawPlay();
  try {
    const headers = { "Content-Type": "application/json" };
    let job = await parsed(await fetch("api/play", { method: "POST", headers, body: JSON.stringify(body) }));
    while (job.state === "busy") {
      playing.progress = job;
      drawPlay();
      await new Promise((done) => { setTimeout(done, POLL_EVERY); });
      job = await load("/api/play");
    }
    playing.result = job.result;
  } catch (error) {
    playing.result = { error: error instanceof RequestError ? error.message : "the server does not respond; is `gesso view` still running?" };
  }
  playing.busy = false;
  drawPlay();
}

function drawPlay() {
  const { out, busy, result, progress } = playing;
  playing.button.disabled = busy;
  if (busy) put(out, playProgress(progress));
  else if (!result) put(out, emptyState("Compare the base model with the trained model for the same prompt and seeds.", "The first request loads the model, which takes a while."));
  else if (result.error) put(out, h("div", { class: "error", role: "alert" }, result.error));
  else put(out, playResult(result));
}

function playProgress({ doing, share }) {
  const hasShare = share !== null && share !== undefined;
  return h("div", { class: "working", role: "status" }, h("p", {}, `${doing || "working"} …`),
    h("div", { class: hasShare ? "progress running" : "progress unknown", role: "progressbar", "aria-valuenow": hasShare ? Math.round(100 * share) : null, "aria-label": doing }, h("i", { vars: { width: hasShare ? `${100 * share}%` : "30%" } })));
}

function playResult(result) {
  const { request } = playing;
  const scores = (cells) => mean(cells.map((c) => c.reward).filter((v) => v !== null && v !== undefined));
  const [base, trained] = [scores(result.base), scores(result.trained)];
  const modes = [["side", "Side by side"], ["wipe", playing.source ? "Base / trained" : "Slider"]];
  if (playing.source) modes.push(["source", "Source / trained"]);
  else if (playing.mode === "source") playing.mode = "side"; // its images were removed
  const pick = (mode) => {
    playing.mode = mode;
    drawPlay();
  };
  const pairs = h("div", { class: "play-pairs" });
  put(pairs, result.base.map((cell, i) => playPair(cell, result.trained[i], i, pairs)));
  return [
    h("div", { class: "bar" }, h("h3", { class: "prompt" }, request.prompt), h("span", { class: "grow" }), result.base.some((c) => c.image) ? choice("Show", modes, playing.mode, pick) : null),
    h("p", { class: "soft" }, `Base model compared with the checkpoint of step ${result.step}, seed ${request.seed}. `, base === null ? null : ["Mean reward ", figure(base), " → ", h("b", {}, figure(trained)), " ", change(base, trained)]),
    (result.notes || []).map((note) => h("p", { class: "note" }, note)), result.base.some((c) => c.video) ? videoBar() : null, pairs,
  ];
}

function playPair(base, trained, i, host) {
  const label = (name, cell) => h("span", {}, h("em", {}, name), cell.reward === undefined ? null : rewardOf(cell), cell.text ? h("span", { class: "read" }, "read ", h("q", {}, cell.text)) : null);
  if (base.image) {
    const image = (cell, name) => {
      const img = h("img", { alt: `${playing.request.prompt}, ${name}, sample ${i + 1}`, src: cell.image, draggable: "false", onload: () => { if (Math.max(img.naturalWidth, img.naturalHeight) <= TINY) img.classList.add("pixels"); } });
      const slot = h("div", { class: "slot" }, img);
      if (cell.video) videoNode(cell.video, img.alt, cell.fps, false).then((video) => { if (video) img.replaceWith(video); });
      return slot;
    };
    const [left, right] = [image(base, "base"), image(trained, "trained")];
    const source = playing.source ? image({ image: playing.source }, "source") : null;
    const name = source && h("span", {}, h("em", {}, "source"));
    const captions = [name, label("base", base), label("trained", trained)];
    if (playing.mode === "side") return h("figure", { class: source ? "play-pair three" : "play-pair" }, h("div", { class: "side" }, source, left, right), h("figcaption", {}, captions));
    if (source && playing.mode === "source") return h("figure", { class: "play-pair" }, wipe(source, right, ["source", "trained"], host), h("figcaption", {}, name, captions[2]));
    return h("figure", { class: "play-pair" }, wipe(left, right, ["base", "trained"], host), h("figcaption", {}, captions[1], captions[2]));
  }
  return h("figure", { class: "play-pair words" },
    h("div", {}, label("base", base), responseText(base.response || "")), h("div", {}, label("trained", trained), responseText(trained.response || "", base.response || "")));
}
