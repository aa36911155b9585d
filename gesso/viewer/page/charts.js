"use strict";
// Charts: curves over training with a crosshair, sparklines, histograms.

// 1, 2 or 5 times a power of ten, about `count` of them between low and high.
function ticksOf(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((m) => m * power >= raw * 0.999) * power;
  const values = [];
  for (let k = Math.ceil(low / unit - 1e-9); k * unit <= high + unit * 1e-9; k += 1) values.push(k * unit);
  return { values, unit };
}

function tickText(value, unit) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (Math.abs(value) >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (unit >= 1 && Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  if (unit < 1e-4) return value.toExponential(Math.max(0, exponent(value) - exponent(unit)));
  return value.toFixed(Math.max(0, -exponent(unit)));
}

// Decimal exponent; tolerates rounding errors just below a power of ten.
const exponent = (value) => Math.floor(Math.log10(Math.abs(value)) + 1e-9);

// Exponential moving average, corrected for its initial bias.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((v) => {
    sum = weight * sum + (1 - weight) * v;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Index of the point nearest to x; xs are ascending.
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return [low, high];
}

// A crosshair that several charts share.
class Crosshair {
  constructor() { this.charts = new Set(); }
  set(x, owner) { for (const chart of this.charts) chart.mark(x, chart === owner); }
}

const MARGIN = { top: 10, right: 14, bottom: 24, left: 46 };

// lines: [{label, short, colour, kind: "train" | "held" | "paper", x: […], y: […], low?, high?}]
class Chart {
  constructor(title, cross, { height = 210, xText = figure, log = false } = {}) {
    Object.assign(this, { title, cross, height, xText, log, lines: [], smooth: 0, at: null });
    this.svg = s("svg", { class: "plot", role: "img", height });
    this.tip = h("div", { class: "tip", hidden: true });
    this.node = h("div", {
      class: "chart", tabindex: "0", role: "group", "aria-roledescription": "chart",
      onpointermove: (e) => this.point(e), onpointerleave: () => this.cross.set(null, this),
      onkeydown: (e) => this.key(e), onblur: () => this.cross.set(null, this),
    }, this.svg, this.tip);
    this.width = 0;
    cross.charts.add(this);
    this.observer = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width && width !== this.width) {
        this.width = width;
        this.draw();
      }
    });
    this.observer.observe(this.node);
  }

  close() {
    this.observer.disconnect();
    this.cross.charts.delete(this);
  }

  set(lines, smooth, log) {
    this.lines = lines.filter((line) => line.x.length);
    this.smooth = smooth;
    this.log = log && this.lines.every((l) => (l.low || l.y).every((v) => v > 0));
    if (this.width) this.draw();
  }

  scale() {
    const xs = extent(this.lines.flatMap((l) => [l.x[0], l.x[l.x.length - 1]]));
    let [low, high] = extent(this.lines.flatMap((l) => [...extent(l.low || l.y), ...extent(l.high || l.y)]));
    if (this.log) [low, high] = [Math.log10(low), Math.log10(high)];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.1;
    const fraction = !this.log && low >= 0 && high <= 1; // fractions are limited to 0 … 1
    [low, high] = [fraction ? Math.max(0, low - margin) : low - margin, fraction ? Math.min(1.02, high + margin) : high + margin];
    if (!this.log && low < 0 && Math.min(...this.lines.map((l) => extent(l.low || l.y)[0])) >= 0) low = 0;
    if (xs[0] === xs[1]) xs[1] = xs[0] + 1;
    const inner = [this.width - MARGIN.left - MARGIN.right, this.height - MARGIN.top - MARGIN.bottom];
    const by = (v) => (this.log ? Math.log10(v) : v);
    this.x = (v) => MARGIN.left + ((v - xs[0]) / (xs[1] - xs[0])) * inner[0];
    this.y = (v) => MARGIN.top + (1 - (by(v) - low) / (high - low)) * inner[1];
    this.back = (px) => xs[0] + ((px - MARGIN.left) / inner[0]) * (xs[1] - xs[0]);
    return { xs, ys: [low, high] };
  }

  draw() {
    this.svg.replaceChildren();
    this.svg.setAttribute("width", this.width);
    this.node.setAttribute("aria-label", this.description());
    if (!this.lines.length) {
      this.svg.append(s("text", { class: "none", x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }, "no data for these runs"));
      return;
    }
    const { xs, ys } = this.scale();
    this.svg.append(this.axes(xs, ys), ...this.lines.map((line) => this.line(line)));
    this.mark_ = s("g", { class: "cross" });
    this.svg.append(this.mark_);
  }

  axes(xs, ys) {
    const grid = s("g", { class: "axes" });
    const bottom = this.height - MARGIN.bottom;
    const vertical = ticksOf(ys[0], ys[1], this.log ? 3 : 5);
    for (const value of vertical.values) {
      if (this.log && value % 1) continue;
      const y = Math.round(this.y(this.log ? 10 ** value : value)) + 0.5;
      const text = this.log ? (10 ** value).toExponential(0) : tickText(value, vertical.unit);
      grid.append(s("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      grid.append(s("text", { x: MARGIN.left - 8, y: y + 3.5, "text-anchor": "end" }, text));
    }
    const across = ticksOf(xs[0], xs[1], Math.max(2, this.width / 85));
    for (const value of across.values) {
      const text = this.xText === clock ? clock(value) : tickText(value, across.unit);
      grid.append(s("text", { x: this.x(value), y: bottom + 16, "text-anchor": "middle" }, text));
    }
    return grid;
  }

  path(xs, ys) {
    let d = "";
    for (let i = 0; i < xs.length; i += 1) d += `${i ? "L" : "M"}${this.x(xs[i]).toFixed(1)} ${this.y(ys[i]).toFixed(1)}`;
    return d;
  }

  // Evaluations are few and already means: smoothing would only add lag.
  smoothedY(line) { return smoothed(line.y, line.kind === "train" ? this.smooth : 0); }

  line(line) {
    const group = s("g", { class: `line ${line.kind}`, stroke: line.colour, fill: line.colour });
    if (line.low) {
      const upper = this.path(line.x, line.high);
      const lower = this.path([...line.x].reverse(), [...line.low].reverse());
      group.append(s("path", { class: "band", d: `${upper}L${lower.slice(1)}Z` }));
    }
    const ys = this.smoothedY(line);
    if (ys !== line.y) group.append(s("path", { class: "raw", d: this.path(line.x, line.y) }));
    group.append(s("path", { class: "mean", d: this.path(line.x, ys) }));
    if (line.x.length <= 40) {
      const r = line.kind === "held" ? 3 : line.x.length === 1 ? 3 : 0;
      if (r) line.x.forEach((x, i) => group.append(s("circle", { cx: this.x(x), cy: this.y(ys[i]), r })));
    }
    return group;
  }

  point(event) {
    if (!this.lines.length || !this.x) return;
    const left = event.clientX - this.svg.getBoundingClientRect().left;
    this.cross.set(this.back(left), this);
  }

  key(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction || !this.lines.length) {
      if (event.key === "Escape") this.cross.set(null, this);
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    const longest = this.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
    const now = this.at === null ? (direction > 0 ? -1 : longest.length) : nearest(longest, this.at);
    const next = Math.min(longest.length - 1, Math.max(0, now + direction * (event.shiftKey ? 10 : 1)));
    this.cross.set(longest[next], this);
    announce(`${this.title}, ${this.tip.innerText.replace(/\n/g, ", ")}`);
  }

  mark(x, isOwner) {
    this.at = x;
    this.tip.hidden = !isOwner || x === null;
    if (!this.mark_) return;
    this.mark_.replaceChildren();
    if (x === null || !this.lines.length) return;
    const points = this.lines.map((line) => {
      const i = nearest(line.x, x);
      return { line, i, x: line.x[i], y: this.smoothedY(line)[i] };
    });
    const close = points.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a)).x;
    const px = Math.round(this.x(close)) + 0.5;
    this.mark_.append(s("line", { x1: px, x2: px, y1: MARGIN.top, y2: this.height - MARGIN.bottom }));
    for (const { line, x: at, y } of points) this.mark_.append(s("circle", { cx: this.x(at), cy: this.y(y), r: 3.5, fill: line.colour }));
    if (isOwner) this.showTip(close, px, points);
  }

  showTip(x, px, points) {
    const rows = points.map(({ line, i, x: at, y }) => h("div", { class: "tip-row" },
      h("i", { class: `key ${line.kind}`, vars: { "--c": line.colour } }),
      h("span", {}, at === x ? line.label : `${line.label} (${this.xText(at)})`), h("b", {}, figure(y)),
      line.low ? h("small", {}, `${figure(line.low[i])} to ${figure(line.high[i])}`) : null));
    this.tip.replaceChildren(h("div", { class: "tip-head" }, `${this.xLabel} ${this.xText(x)}`), ...rows);
    const left = px > this.width / 2 ? px - 14 - this.tip.offsetWidth : px + 14;
    this.tip.style.setProperty("left", `${Math.max(0, Math.min(left, this.width - this.tip.offsetWidth))}px`);
  }

  description() {
    const each = this.lines.map((l) => `${l.label}: ${figure(l.y[0])} to ${figure(l.y[l.y.length - 1])}`);
    return `${this.title}. ${each.join("; ")}. Use the arrow keys to read the values.`;
  }
}

// A small line chart of some values, with the last one marked.
function sparkline(values, stroke, width = 96, height = 26, label = "") {
  const box = s("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  if (values.length < 2) return box;
  const [low, high] = extent(values);
  const x = (i) => 3 + (i / (values.length - 1)) * (width - 6);
  const y = (v) => (high > low ? height - 4 - ((v - low) / (high - low)) * (height - 8) : height / 2);
  const d = values.map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  const last = values.length - 1;
  box.append(s("path", { class: "under", d: `${d}L${x(last)} ${height}L${x(0)} ${height}Z`, fill: stroke }));
  box.append(s("path", { d, stroke, fill: "none" }));
  box.append(s("circle", { cx: x(last), cy: y(values[last]), r: 2.5, fill: stroke }));
  return box;
}

function histogram(values, width = 180, height = 54) {
  const box = s("svg", { class: "histogram", width, height: height + 14, viewBox: `0 0 ${width} ${height + 14}`, role: "img" });
  if (!values.length) return box;
  let [low, high] = extent(values);
  if (low >= 0 && high <= 1) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const bins = new Array(12).fill(0);
  for (const v of values) bins[Math.min(bins.length - 1, Math.floor(((v - low) / (high - low)) * bins.length))] += 1;
  const most = Math.max(...bins), wide = width / bins.length;
  bins.forEach((n, i) => {
    const tall = n ? Math.max(3, (n / most) * height) : 1;
    box.append(s("rect", { class: n ? "some" : "none", x: i * wide + 1, y: height - tall, width: wide - 2, height: tall, rx: 1.5 },
      s("title", {}, `${n} samples from ${figure(low + (i * (high - low)) / bins.length)}`)));
  });
  box.append(s("text", { x: 1, y: height + 12 }, figure(low)), s("text", { x: width - 1, y: height + 12, "text-anchor": "end" }, figure(high)));
  box.setAttribute("aria-label", `rewards of ${values.length} samples from ${figure(extent(values)[0])} to ${figure(extent(values)[1])}`);
  return box;
}
