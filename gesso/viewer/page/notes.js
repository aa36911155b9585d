"use strict";
// What a run told: its health, its log, what of it cannot be read, its config; and the report.

const noted = { different: true };

views.notes = {
  title: "Notes",
  async show(root) {
    noted.root = root;
    const found = await Promise.allSettled(ticked().map((run) => loadOnce("/api/run", { run })));
    if (shown !== this) return;
    const told = found.filter((f) => f.status === "fulfilled").map((f) => f.value);
    const high = scrollY;
    put(root, h("div", { class: "bar" }, h("h2", {}, "Notes"), h("span", { class: "grow" }), reportButton()),
      told.length ? null : nothing("The notes cannot be shown.", found[0].reason.message),
      h("div", { class: "notes" }, told.map(notesOf)), told.length ? configs(told) : null);
    scrollTo(0, high);
  },
  refresh() { return this.show(noted.root); },
};

function notesOf(told) {
  const { health } = told;
  const sentences = health.sentences.length ? health.sentences : ["No warning is open."];
  return h("section", { class: "note-card", "aria-label": told.id },
    h("h3", {}, dot(told.id), told.id),
    told.about ? h("p", { class: "soft" }, told.about) : null,
    h("p", { class: "soft" }, stateSentence(told)),
    h("div", { class: `verdict ${healthOf(told)}` }, h("b", {}, h("i", { class: `health ${healthOf(told)}`, "aria-hidden": "true" }), HEALTHY[healthOf(told)]), sentences.map((t) => h("p", {}, t))),
    told.damaged.length ? h("div", { class: "verdict amber damaged" }, h("b", {}, "Could not be read"), told.damaged.map((t) => h("p", {}, t))) : null,
    h("h4", {}, "Log"),
    told.log.length ? h("ol", { class: "log", tabindex: "0", "aria-label": `log of ${told.id}` }, told.log.slice().reverse().map(logLine)) : h("p", { class: "soft" }, "Nothing was noted."));
}

function logLine(line) {
  const [, when, text] = line.match(/^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)$/) || [null, "", line];
  const kind = /warning|stopped/.test(text) ? "warn" : "";
  return h("li", { class: kind }, when ? h("time", {}, when) : null, text);
}

// Config as lines "section.key = value", compared over the ticked runs.
function configs(told) {
  const flat = told.map((t) => flatten(t.config));
  const keys = [...new Set(flat.flatMap((f) => [...f.keys()]))];
  const differs = (key) => flat.some((f) => f.get(key) !== flat[0].get(key));
  const several = told.length > 1;
  const count = keys.filter(differs).length;
  const rows = several && noted.different ? keys.filter(differs) : keys;
  const check = several ? h("label", { class: "check" }, h("input", { type: "checkbox", checked: noted.different, onchange: (e) => {
    noted.different = e.target.checked;
    views.notes.show(noted.root);
  } }), `only what differs (${count} of ${keys.length})`) : null;
  return h("section", { class: "configs" }, h("div", { class: "bar" }, h("h3", {}, "Config"), check),
    rows.length ? h("div", { class: "table-frame" }, h("table", { class: "plain-table config" },
      several ? h("thead", {}, h("tr", {}, h("th", {}, "key"), told.map((t) => h("th", {}, dot(t.id), t.id)))) : null,
      h("tbody", {}, rows.map((key) => h("tr", { class: several && differs(key) ? "differs" : "" }, h("th", { scope: "row" }, key), flat.map((f) => h("td", {}, f.has(key) ? f.get(key) : h("span", { class: "soft" }, "–"))))))))
      : h("p", { class: "soft" }, keys.length ? "They have the same config." : "No config could be read."));
}

// The TOML that runs write: tables, arrays of tables, values over several lines.
function flatten(text) {
  const found = new Map();
  let table = "", open = null;
  const counts = new Map();
  for (const line of text.split("\n")) {
    if (open) {
      open.value += ` ${line.trim()}`;
      if (isWhole(open.value)) {
        found.set(open.key, open.value.replace(/\[ /g, "[").replace(/,? \]/g, "]"));
        open = null;
      }
      continue;
    }
    const many_ = line.match(/^\[\[(.+)\]\]\s*$/), one = line.match(/^\[(.+)\]\s*$/), pair = line.match(/^([^=]+?)\s*=\s*(.*)$/);
    if (many_) {
      const n = (counts.get(many_[1]) || 0) + 1;
      counts.set(many_[1], n);
      table = `${many_[1]}[${n}].`;
    } else if (one) table = `${one[1]}.`;
    else if (pair && isWhole(pair[2])) found.set(table + pair[1], pair[2]);
    else if (pair) open = { key: table + pair[1], value: pair[2] };
  }
  return found;
}

// Whether brackets and triple quotes end where they should.
function isWhole(value) {
  const bare = value.replace(/"(?:[^"\\]|\\.)*"/g, "");
  return (bare.match(/[[{]/g) || []).length === (bare.match(/[\]}]/g) || []).length && !/"""|'''/.test(bare);
}
