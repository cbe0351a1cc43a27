// Plots a figure in the colors of the style sheet.
function plot(name, figure, isVisible) {
  const style = getComputedStyle(document.documentElement);
  const color = (key, value) => (/color$|^[01]$/.test(key) && typeof value === "string" ? value.replace(/^var\((.*)\)$/, (_, name) => style.getPropertyValue(name).trim()) : value);
  const { data, layout } = JSON.parse(JSON.stringify(figure), color);
  for (const trace of data) trace.visible = isVisible(trace);
  layout.dragmode = matchMedia("(pointer: fine)").matches ? "zoom" : false;
  Plotly.react(`plot-${name}`, data, layout, { displayModeBar: false, responsive: true });
}

