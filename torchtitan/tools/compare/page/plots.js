"use strict";
// Draws FIGURES in the colors of the style sheet, along steps or units, with the variants that are to be shown.

const controls = document.getElementById("controls");
const checked = (name, is) => [...controls.querySelectorAll(`[name=${name}]`)].filter((input) => input.checked === is).map((input) => input.value);

function draw() {
  const style = getComputedStyle(document.documentElement);
  const color = (key, value) => (/color$/.test(key) ? value.replace(/^var\((.*)\)$/, (_, name) => style.getPropertyValue(name).trim()) : value);
  const [along] = checked("along", true);
  const hidden = checked("shown", false);
  for (const [name, figures] of Object.entries(FIGURES)) {
    const { data, layout } = JSON.parse(JSON.stringify(figures[along] ?? figures.steps), color);
    for (const trace of data) trace.visible = !hidden.includes(trace.meta.variant ?? trace.meta.tolerance);
    layout.dragmode = matchMedia("(pointer: fine)").matches ? "zoom" : false;
    Plotly.react(`plot-${name}`, data, layout, { displayModeBar: false, responsive: true });
  }
}

const curve = document.querySelector("#figure-loss, #figure-grad_norm");
controls.hidden = !curve;
curve?.before(controls);
controls.addEventListener("change", draw);
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
