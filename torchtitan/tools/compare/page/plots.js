// Draws FIGURES along steps or units, with the variants that are to be shown.

const controls = document.getElementById("controls");
const checked = (name, is) => [...controls.querySelectorAll(`[name=${name}]`)].filter((input) => input.checked === is).map((input) => input.value);

function draw() {
  const [along] = checked("along", true);
  const hidden = checked("shown", false);
  const isVisible = (trace) => !hidden.includes(trace.meta.variant ?? trace.meta.tolerance);
  for (const [name, figures] of Object.entries(FIGURES)) plot(name, figures[along] ?? figures.steps, isVisible);
}

const curve = document.querySelector("#figure-loss, #figure-grad_norm");
controls.hidden = !curve;
curve?.before(controls);
controls.addEventListener("change", draw);
