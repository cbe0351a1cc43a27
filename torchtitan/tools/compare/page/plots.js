"use strict";
// Draws the figures from the report inside the page. Every number that is plotted is a number of the
// report; only the difference from the baseline is computed here.

const report = JSON.parse(document.getElementById("report").textContent);
const ran = report.variants.filter((variant) => variant.status === "ran");
const baseline = report.baseline;
const dark = matchMedia("(prefers-color-scheme: dark)");
const state = { along: "steps", hidden: new Set() };

// Neither colour alone nor form alone tells variants or parts apart.
const DASHES = ["solid", "5px,3px", "2px,2px", "9px,3px,2px,3px", "12px,4px", "9px,3px,2px,3px,2px,3px"];
const MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "pentagon"];
const PATTERNS = ["", "/", "x", ".", "\\", "-", "+", "|"];
const COLOURS = 8;
const ROW = 62; // pixels, of a row of bars with its label

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const series = (i) => `series-${i % COLOURS}`;
// Plotly reads tags and templates in what it is to write.
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%&#123;");

/** Colour, dash and marker of a variant: the baseline has the colour of text. */
function style(name) {
  const others = ran.filter((variant) => variant.name !== baseline);
  const i = name === baseline ? 0 : 1 + others.findIndex((variant) => variant.name === name);
  const hue = i === 0 ? "series-0" : `series-${1 + ((i - 1) % (COLOURS - 1))}`;
  return { hue, dash: DASHES[i % DASHES.length], symbol: MARKERS[i % MARKERS.length], base: i === 0 };
}

// --- Curves ------------------------------------------------------------------------------------

function line(variant, x, y) {
  const { hue, dash, symbol, base } = style(variant.name);
  return {
    type: "scatter", mode: "lines+markers", name: escaped(variant.name), meta: { variant: variant.name },
    x, y, visible: !state.hidden.has(variant.name), connectgaps: false,
    line: { color: colour(hue), width: base ? 4 : 2, dash },
    marker: { color: colour(hue), symbol, size: base ? 9 : 7, maxdisplayed: 9 },
    opacity: base ? 0.6 : 1, hoverlabel: { namelength: 28 },
  };
}

function curves(field) {
  const data = ran.filter((variant) => variant[field])
    .map((variant) => line(variant, variant[field][state.along], variant[field].values));
  return { data, layout: { height: 320, yaxis: { nticks: 6 } } };
}

/** Curves relative to the baseline's, where both have a value at the same step or token count. */
function differences(field) {
  const base = ran.find((variant) => variant.name === baseline)[field];
  const at = new Map(base[state.along].map((x, i) => [x, base.values[i]]));
  const data = [], equal = [], apart = [];
  for (const variant of ran.filter((variant) => variant[field] && variant.name !== baseline)) {
    const { values, steps, [state.along]: places } = variant[field];
    const shared = places.map((x, i) => [x, values[i], at.get(x)]).filter(([, v, b]) => v != null && b);
    if (!shared.length) apart.push(variant.name);
    else if (shared.every(([, v, b]) => v === b)) equal.push(variant.name);
    // A logarithmic axis has no place for 0.
    data.push(line(variant, shared.map(([x]) => x), shared.map(([, v, b]) => Math.abs(v - b) / Math.abs(b) || null)));
    const judged = variant.parity[field];
    if (judged?.tolerance) data.push(tolerance(variant, places[steps.indexOf(judged.step)], judged.tolerance));
  }
  const note = (words, names) => (names.length ? `${words}: ${names.join(", ")}. ` : "");
  document.querySelector(`#figure-${field}-difference .equal`).textContent =
    note("Equal to the last bit throughout", equal) + note(`Never at the same number of ${state.along} as the baseline`, apart);
  return { data, layout: { height: 320, yaxis: { type: "log", tickformat: "~e", ...decades(data.flatMap((trace) => trace.y)) } } };
}

function tolerance(variant, x, y) {
  const { hue } = style(variant.name);
  return {
    type: "scatter", mode: "markers", name: `allowed: ${escaped(variant.name)}`, meta: { tolerance: variant.name }, x: [x], y: [y],
    visible: !state.hidden.has(variant.name), marker: { symbol: "line-ew", size: 26, line: { color: colour(hue), width: 3 } },
  };
}

/** Range and ticks of a logarithmic axis: whole powers of ten. */
function decades(values) {
  const powers = values.filter((value) => value > 0).map(Math.log10);
  if (!powers.length) return {};
  const range = [Math.floor(Math.min(...powers)), Math.ceil(Math.max(...powers) + 0.05)];
  return { range, dtick: Math.ceil((range[1] - range[0]) / 7) };
}

const alongAxis = () => ({ title: { text: state.along === "steps" ? "step" : "tokens" }, ...(state.along === "tokens" && { tickformat: "~s" }) });

// --- Bars: a row for each variant, its name above it ---------------------------------------------

const pencil = document.createElement("canvas").getContext("2d");

/** A name and a value, the name cut so that both have room. */
function label(name, value, room) {
  pencil.font = `13px ${getComputedStyle(document.body).fontFamily}`;
  const letters = [...name];
  // The name is set apart: written from right to left, it is not to turn the number round.
  const whole = () => `\u2068${letters.join("")}${letters.length < [...name].length ? "…" : ""}\u2069${value && ` · ${value}`}`;
  while (letters.length && pencil.measureText(whole()).width > room) letters.pop();
  return escaped(whole());
}

function bars(variants, data, { value = () => "", ...xaxis }) {
  const width = document.getElementById("content").clientWidth;
  return {
    data,
    layout: {
      height: variants.length * ROW + 56, barmode: "stack", bargap: 0.58, hovermode: "closest",
      yaxis: { range: [variants.length - 0.5, -0.6], visible: false, fixedrange: true },
      xaxis: { rangemode: "tozero", nticks: width < 500 ? 5 : 9, ...xaxis },
      annotations: variants.map((variant, i) => ({
        text: label(variant.name, value(variant), width - 50), x: 0, xref: "paper", xanchor: "left", y: i - 0.2, yanchor: "bottom",
        showarrow: false, font: { size: 13, color: colour("ink") },
      })),
    },
  };
}

const rows = (variants) => variants.map((_, i) => i);
const bar = (name, x, y, hue, shape = "") => ({
  type: "bar", orientation: "h", name: escaped(name), meta: { part: name }, x, y, hoverinfo: "x+name",
  marker: { color: colour(hue), line: { color: colour("paper"), width: 1 }, pattern: { shape, fillmode: "overlay", fgcolor: colour("paper"), size: 7, solidity: 0.25 } },
});

function speed() {
  const shown = ran.filter((variant) => variant.tps);
  const spread = shown.map((variant) => variant.tps);
  const median = bar("median", spread.map((tps) => tps.median), rows(shown), "series-1");
  median.opacity = 0.75;
  median.error_x = {
    type: "data", symmetric: false, color: colour("ink"), thickness: 2, width: 7,
    array: spread.map((tps) => tps.quartile_3 - tps.median), arrayminus: spread.map((tps) => tps.median - tps.quartile_1),
  };
  const runs = shown.flatMap((variant, i) => variant.runs.filter((run) => run.tps).map((run) => [run.tps.median, i + 0.32]));
  const dots = {
    type: "scatter", mode: "markers", name: "median of a run", meta: { part: "median of a run" }, hoverinfo: "x+name", x: runs.map(([x]) => x), y: runs.map(([, y]) => y),
    marker: { color: colour("series-2"), size: 8, symbol: "circle", line: { color: colour("paper"), width: 1 } },
  };
  const value = ({ tps: { median } }) =>
    `${median.toLocaleString("en", median < 100 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 })} tokens/s`;
  return bars(shown, [median, dots], { value, tickformat: "~s", hoverformat: ",.5~r", title: { text: "tokens/s per device" } });
}

function stacked(shown, field) {
  const parts = [...new Set(shown.flatMap((variant) => Object.keys(variant[field])))];
  return parts.map((part, i) => bar(part, shown.map((variant) => variant[field][part] ?? null), rows(shown), series(i + 1), PATTERNS[i % PATTERNS.length]));
}

function time() {
  const shown = ran.filter((variant) => Object.keys(variant.time_shares).length);
  const data = stacked(shown, "time_shares");
  const exposed = shown.map((variant) => variant.exposed_communication);
  if (exposed.some((value) => value != null)) {
    data.push({
      type: "scatter", mode: "markers", name: "exposed communication", meta: { part: "exposed communication" },
      x: exposed, y: rows(shown).map((i) => i + 0.32), hoverinfo: "x+name", marker: { color: colour("ink"), size: 8, symbol: "diamond" },
      error_x: { type: "data", symmetric: false, array: exposed.map(() => 0), arrayminus: exposed, color: colour("ink"), thickness: 3, width: 0 },
    });
  }
  const value = ({ exposed_communication: share }) => (share == null ? "" : `${(100 * share).toFixed(1)} % exposed`);
  return bars(shown, data, { value, tickformat: ".0%", hoverformat: ".1%", range: [0, 1.002], title: { text: "share of time" } });
}

function memory() {
  const shown = ran.filter((variant) => variant.memory_gib != null);
  const value = (variant) => `${Number(variant.memory_gib.toPrecision(4))} GiB`;
  const peak = bar("peak", shown.map((variant) => variant.memory_gib), rows(shown), "series-1");
  return bars(shown, [peak], { value, hoverformat: ".4~r", title: { text: "GiB" } });
}

function sent() {
  const shown = ran.filter((variant) => Object.keys(variant.sent_bytes).length);
  return bars(shown, stacked(shown, "sent_bytes"), { tickformat: "~s", hoverformat: ".4~s", ticksuffix: "B", title: { text: "bytes a step" } });
}

// --- The page ----------------------------------------------------------------------------------

const FIGURES = {
  loss: () => curves("loss"),
  "loss-difference": () => differences("loss"),
  grad_norm: () => curves("grad_norm"),
  "grad_norm-difference": () => differences("grad_norm"),
  tps: speed, time, memory, sent,
};
const ALONG = ["loss", "loss-difference", "grad_norm", "grad_norm-difference"];

function draw(name) {
  const place = document.getElementById(`plot-${name}`);
  if (!place) return;
  const { data, layout } = FIGURES[name]();
  const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  const themed = {
    ...layout,
    xaxis: { ...axis, ...(ALONG.includes(name) && alongAxis()), ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    paper_bgcolor: colour("paper"), plot_bgcolor: colour("paper"), showlegend: false, autosize: true,
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
    margin: { l: 12, r: 16, t: 12, b: 44 }, uirevision: state.along,
    dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
  };
  Plotly.react(place, data, themed, { displayModeBar: false, responsive: true });
  if (!ALONG.includes(name)) legend(name, data);
}

const drawAll = (names = Object.keys(FIGURES)) => names.forEach(draw);

const SHAPES = {
  circle: "M22 8a4 4 0 1 1-8 0a4 4 0 1 1 8 0z", square: "M14 4h8v8h-8z", diamond: "M18 3l5 5-5 5-5-5z",
  "triangle-up": "M18 3l5 9H13z", "triangle-down": "M18 13l5-9H13z", x: "M14 2l4 4 4-4 2 2-4 4 4 4-2 2-4-4-4 4-2-2 4-4-4-4z",
  star: "M18 2l2 4h4l-3 3 1 5-4-3-4 3 1-5-3-3h4z", pentagon: "M18 3l5 4-2 6h-6l-2-6z",
};
const HATCHES = {
  "": "", "/": "M0 8L8 0", "\\": "M0 0L8 8", x: "M0 8L8 0M0 0L8 8", "-": "M0 4H8", "|": "M4 0V8", "+": "M0 4H8M4 0V8", ".": "M3 4h2",
};

const svg = (content) => `<svg class="swatch" viewBox="0 0 36 16" aria-hidden="true">${content}</svg>`;

function lineSwatch(name) {
  const { hue, dash, symbol, base } = style(name);
  const dashes = dash === "solid" ? "" : `stroke-dasharray="${dash.replace(/px/g, "")}"`;
  const ink = `var(--${hue})`;
  return svg(`<path d="M0 8H36" stroke="${ink}" stroke-width="${base ? 4 : 2}" ${dashes}/><path d="${SHAPES[symbol]}" fill="${ink}"/>`);
}

function partSwatch(trace, id) {
  const { color, symbol, pattern } = trace.marker;
  if (trace.type === "scatter") return svg(`<path d="${SHAPES[symbol]}" fill="${color}"/>`);
  const hatch = `<pattern id="${id}" width="8" height="8" patternUnits="userSpaceOnUse"><path d="${HATCHES[pattern.shape]}" stroke="var(--paper)" stroke-width="1.5"/></pattern>`;
  return svg(`${hatch}<path d="M0 1H36V15H0z" fill="${color}"/><path d="M0 1H36V15H0z" fill="url(#${id})"/>`);
}

/** The parts of bars, above their plot; the words are in the figure's table too. */
function legend(name, data) {
  const figure = document.getElementById(`figure-${name}`);
  let list = figure.querySelector(".legend");
  if (!list) {
    if (data.length === 1) return;
    list = document.createElement("ul");
    list.className = "legend";
    figure.querySelector("figcaption").append(list);
  }
  list.replaceChildren(...data.map((trace, i) => {
    const item = document.createElement("li");
    item.innerHTML = partSwatch(trace, `hatch-${name}-${i}`);
    item.append(trace.meta.part);
    return item;
  }));
}

function choice(kind, group, label, checked, changed) {
  const element = document.createElement("label"), input = document.createElement("input");
  Object.assign(input, { type: kind, name: group, checked });
  input.addEventListener("change", () => { changed(input.checked); drawAll(ALONG); });
  element.append(input);
  if (kind === "checkbox") element.insertAdjacentHTML("beforeend", lineSwatch(label));
  element.append(label);
  return element;
}

function fieldset(title, choices) {
  const element = document.createElement("fieldset"), legend = document.createElement("legend");
  legend.textContent = title;
  element.append(legend, ...choices);
  return element;
}

function controls() {
  const along = ["steps", "tokens"].map((axis) => choice("radio", "along", axis, axis === state.along, () => { state.along = axis; }));
  const shown = ran.filter((variant) => variant.loss || variant.grad_norm).map(({ name }) =>
    choice("checkbox", "shown", name, true, (on) => (on ? state.hidden.delete(name) : state.hidden.add(name))));
  document.getElementById("controls")?.append(fieldset("Along", along), fieldset("Show", shown));
}

for (const key of document.querySelectorAll(".key")) {
  if (ran.some((variant) => variant.name === key.dataset.variant)) key.innerHTML = lineSwatch(key.dataset.variant);
}
controls();
drawAll();
dark.addEventListener("change", () => drawAll());
// Labels of bars are cut to the width.
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
