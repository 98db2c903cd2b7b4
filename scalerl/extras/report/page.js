"use strict";
// Each figure of the page holds the specification of its plot.
const isNarrow = window.innerWidth < 700;
Promise.all(
  Array.from(document.querySelectorAll(".plot"), (figure) => {
    const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
    const target = document.createElement("div");
    // In a narrow window each name of the legend has a line.
    layout.height = (layout.height ?? 340) + (isNarrow ? 18 * data.length : 0);
    target.style.height = `${layout.height}px`;
    figure.append(target);
    return Plotly.newPlot(target, data, layout, { responsive: true, displayModeBar: false });
  })
).then((plots) => {
  document.documentElement.dataset.plots = plots.length;
});
