"use strict";
// Videos. All videos of a view share one player, so that before and after are in step; its bar has
// play, pause and a scrubber over the frames.

const SYNC_EVERY = 120; // ms
const player = { videos: new Map(), playing: null, bar: null }; // video → frames per second

const videoUrl = (run, name) => (isReport ? (inside.images[run] || {})[name] || "" : name.startsWith("data:") ? name : address("video", { run, name }));
const isPlaying = () => (player.playing === null ? !reducedMotion() : player.playing);
const framesOf = (video) => Math.max(1, Math.round(video.duration * player.videos.get(video)));
const frameAt = (video) => Math.min(framesOf(video) - 1, Math.floor(video.currentTime * player.videos.get(video)));

// A video that has loaded, or null if it cannot be played.
function videoNode(url, alt, fps, small) {
  const video = h("video", { "aria-label": alt, role: "img", loop: true, playsinline: true, preload: "auto", class: small ? "pixels" : null });
  video.muted = true; // browsers do not start videos with sound
  return new Promise((done) => {
    video.addEventListener("loadeddata", () => {
      player.videos.set(video, fps);
      join(video);
      done(video);
    }, { once: true });
    video.addEventListener("error", () => done(null), { once: true });
    video.src = url;
  });
}

// The image of a sample, or its video once it has loaded.
function mediaNode(run, sample, alt, size = null) {
  const image = imageNode(run, sample.image, alt, 192, size), url = sample.video ? videoUrl(run, sample.video) : "";
  const small = size && Math.max(...size) <= TINY;
  if (url) videoNode(url, alt, sample.fps, small).then((video) => { if (video) image.replaceWith(video); });
  return image;
}

// The video goes on where the others are.
function join(video) {
  const leader = liveVideos().find((v) => v !== video);
  if (leader) video.currentTime = leader.currentTime;
  if (isPlaying()) video.play().catch(() => {}); // rejected if it is removed meanwhile
  watchClock();
}

function liveVideos() {
  for (const video of player.videos.keys()) {
    if (video.isConnected) video.dataset.shown = "";
    else if (video.dataset.shown !== undefined) player.videos.delete(video); // it was replaced
  }
  return [...player.videos.keys()].filter((v) => v.isConnected);
}

// Videos drift apart: the first one sets the time of the others.
function watchClock() {
  if (player.timer) return;
  player.timer = setInterval(() => {
    const [leader, ...others] = liveVideos();
    if (!leader) {
      clearInterval(player.timer);
      player.timer = null;
      return;
    }
    const late = (v) => Math.abs(v.currentTime - leader.currentTime) > 1 / player.videos.get(v);
    if (isPlaying()) for (const v of others) if (late(v)) v.currentTime = leader.currentTime;
    drawBar(leader);
  }, SYNC_EVERY);
}

function playVideos(on) {
  player.playing = on;
  const [leader, ...others] = liveVideos();
  for (const v of others) v.currentTime = leader.currentTime;
  for (const v of player.videos.keys()) {
    if (on) v.play().catch(() => {});
    else v.pause();
  }
  if (leader) drawBar(leader);
}

function showFrame(index) {
  const all = liveVideos();
  if (!all.length) return;
  const last = framesOf(all[0]) - 1, frame = Math.max(0, Math.min(last, index));
  playVideos(false);
  for (const v of all) v.currentTime = Math.min((frame + 0.5) / player.videos.get(v), v.duration);
  drawBar(all[0], frame);
}

function stepFrame(by) {
  const [leader] = liveVideos();
  if (leader) showFrame(frameAt(leader) + by);
}

// It takes its place before any video has loaded: appearing later, it would push a button that is
// just being clicked from under the pointer.
function videoBar() {
  const toggle = button(icon("pause"), () => playVideos(!isPlaying()), { class: "round", title: "play or pause the videos" });
  const range = h("input", { type: "range", min: 0, max: 0, value: 0, class: "frame-slider", "aria-label": "frame", oninput: (e) => showFrame(Number(e.target.value)) });
  const read = h("span", { class: "soft" });
  const move = (by, name, text) => button(icon(name), () => stepFrame(by), { class: "round", "aria-label": text, title: `${text} (${by < 0 ? "," : "."})` });
  const node = h("div", { class: "video-bar waiting" }, toggle, move(-1, "left", "previous frame"), range, move(1, "right", "next frame"), read);
  player.bar = { node, toggle, range, read };
  return node;
}

function drawBar(leader, frame = frameAt(leader)) {
  if (!player.bar) return;
  const { node, toggle, range, read } = player.bar, name = isPlaying() ? "pause" : "play";
  node.classList.remove("waiting");
  if (toggle.getAttribute("aria-label") !== `${name} the videos`) {
    toggle.replaceChildren(icon(name));
    toggle.setAttribute("aria-label", `${name} the videos`);
  }
  range.max = framesOf(leader) - 1;
  range.value = frame;
  read.textContent = `frame ${frame + 1} of ${framesOf(leader)}`;
}
