"use strict";
// Draws FIGURES in the colours of the style sheet, along steps or units, with the variants that are to be shown.

const place = (name) => document.getElementById(`plot-${name}`);
const inputs = (selector) => [...document.querySelectorAll(`#controls input${selector}`)];
const pencil = document.createElement("canvas").getContext("2d");

/** A label of bars, its name (up to U+2069) cut until all of it has room; Plotly reads tags and templates in it. */
function fitted(text, room) {
  const [name, value] = text.split("\u2069");
  const letters = [...name];
  const whole = () => `${letters.join("")}${letters.length < [...name].length ? "…" : ""}\u2069${value}`;
  pencil.font = `13px ${getComputedStyle(document.body).fontFamily}`;
  while (letters.length > 1 && pencil.measureText(whole()).width > room) letters.pop();
  return whole().replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%&#123;");
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  const colour = (key, value) => (/color$/.test(key) ? value.replace(/^var\((.*)\)$/, (_, name) => style.getPropertyValue(name).trim()) : value);
  const along = inputs("[name=along]:checked")[0]?.value;
  const hidden = new Set(inputs("[name=shown]:not(:checked)").map((input) => input.value));
  for (const [name, figures] of Object.entries(FIGURES)) {
    const { data, layout } = JSON.parse(JSON.stringify(figures[along] ?? figures.steps), colour);
    for (const trace of data) trace.visible = !hidden.has(trace.meta.variant ?? trace.meta.tolerance);
    for (const label of layout.annotations ?? []) label.text = fitted(label.text, place(name).clientWidth - 32);
    layout.dragmode = matchMedia("(pointer: fine)").matches ? "zoom" : false;
    document.querySelector(`#figure-${name} .equal`).textContent = layout.meta?.note ?? "";
    Plotly.react(place(name), data, layout, { displayModeBar: false, responsive: true });
  }
}

const controls = document.getElementById("controls");
if (controls) controls.hidden = false;
controls?.addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
draw();
