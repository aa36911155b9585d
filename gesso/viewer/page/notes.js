"use strict";
// Health, log, damaged files and config of runs; and the report.

const noted = { different: true };

views.notes = {
  title: "Notes",
  async show(root) {
    noted.root = root;
    const results = await Promise.allSettled(ticked().map((run) => loadOnce("/api/run", { run })));
    if (activeView !== this) return;
    const loaded = results.filter((f) => f.status === "fulfilled").map((f) => f.value);
    const high = scrollY;
    put(root, h("div", { class: "bar" }, h("h2", {}, "Notes"), h("span", { class: "grow" }), reportButton()),
      loaded.length ? null : emptyState("The notes cannot be shown.", results[0].reason.message),
      h("div", { class: "notes" }, loaded.map(notesOf)), loaded.length ? configs(loaded) : null);
    scrollTo(0, high);
  },
  refresh() { return this.show(noted.root); },
};

function notesOf(run) {
  const { health } = run;
  const messages = health.sentences.length ? health.sentences : ["No active warnings."];
  return h("section", { class: "note-card", "aria-label": run.id },
    h("h3", {}, dot(run.id), run.id),
    run.about ? h("p", { class: "soft" }, run.about) : null,
    h("p", { class: "soft" }, stateText(run)),
    h("div", { class: `verdict ${healthOf(run)}` }, h("b", {}, h("i", { class: `health ${healthOf(run)}`, "aria-hidden": "true" }), HEALTH[healthOf(run)]), messages.map((t) => h("p", {}, t))),
    run.damaged.length ? h("div", { class: "verdict amber damaged" }, h("b", {}, "Damaged files"), run.damaged.map((t) => h("p", {}, t))) : null,
    h("h4", {}, "Log"),
    run.log.length ? h("ol", { class: "log", tabindex: "0", "aria-label": `log of ${run.id}` }, run.log.slice().reverse().map(logLine)) : h("p", { class: "soft" }, "The log is empty."));
}

function logLine(line) {
  const [, when, text] = line.match(/^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)$/) || [null, "", line];
  const kind = /warning|stopped|starting new workers|continue without it|sampled again/.test(text) ? "warn" : "";
  return h("li", { class: kind }, when ? h("time", {}, when) : null, text);
}

// Configs as rows "section.key = value", compared over the selected runs.
function configs(loaded) {
  const flat = loaded.map((t) => flatten(t.config));
  const keys = [...new Set(flat.flatMap((f) => [...f.keys()]))];
  const differs = (key) => flat.some((f) => f.get(key) !== flat[0].get(key));
  const several = loaded.length > 1;
  const count = keys.filter(differs).length;
  const rows = several && noted.different ? keys.filter(differs) : keys;
  const check = several ? h("label", { class: "check" }, h("input", { type: "checkbox", checked: noted.different, onchange: (e) => {
    noted.different = e.target.checked;
    views.notes.show(noted.root);
  } }), `only differences (${count} of ${keys.length})`) : null;
  return h("section", { class: "configs" }, h("div", { class: "bar" }, h("h3", {}, "Config"), check),
    rows.length ? h("div", { class: "table-frame" }, h("table", { class: "plain-table config" },
      several ? h("thead", {}, h("tr", {}, h("th", {}, "key"), loaded.map((t) => h("th", {}, dot(t.id), t.id)))) : null,
      h("tbody", {}, rows.map((key) => h("tr", { class: several && differs(key) ? "differs" : "" }, h("th", { scope: "row" }, key), flat.map((f) => h("td", {}, f.has(key) ? f.get(key) : h("span", { class: "soft" }, "–"))))))))
      : h("p", { class: "soft" }, keys.length ? "The configs are identical." : "No config could be read."));
}

// Parses the TOML subset that runs write: tables, arrays of tables, multi-line values.
function flatten(text) {
  const values = new Map();
  let table = "", open = null;
  const counts = new Map();
  for (const line of text.split("\n")) {
    if (open) {
      open.value += ` ${line.trim()}`;
      if (isWhole(open.value)) {
        values.set(open.key, open.value.replace(/\[ /g, "[").replace(/,? \]/g, "]"));
        open = null;
      }
      continue;
    }
    const array = line.match(/^\[\[(.+)\]\]\s*$/), one = line.match(/^\[(.+)\]\s*$/), pair = line.match(/^([^=]+?)\s*=\s*(.*)$/);
    if (array) {
      const n = (counts.get(array[1]) || 0) + 1;
      counts.set(array[1], n);
      table = `${array[1]}[${n}].`;
    } else if (one) table = `${one[1]}.`;
    else if (pair && isWhole(pair[2])) values.set(table + pair[1], pair[2]);
    else if (pair) open = { key: table + pair[1], value: pair[2] };
  }
  return values;
}

// Whether all brackets and triple quotes are closed.
function isWhole(value) {
  const bare = value.replace(/"(?:[^"\\]|\\.)*"/g, "");
  return (bare.match(/[[{]/g) || []).length === (bare.match(/[\]}]/g) || []).length && !/"""|'''/.test(bare);
}
