// Draws the figures of an algorithm's page when they come into view. Their data stand beside them as JSON.
// Plotly is large, so it is loaded with the first figure.

const SCRIPT = document.currentScript.src;
const COLOURS = ["#4c78a8", "#e8873a", "#54a24b", "#b279a2", "#d64f4f"]; // one for each seed, readable on dark and light
const FIGURES = document.querySelectorAll("figure.curve");
let plotly = null;

function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("plotly.min.js", SCRIPT);
    script.onload = resolve;
    script.onerror = reject;
    document.head.append(script);
  });
  return plotly;
}

// Each seed has a colour and one entry in the legend. What was measured on held-out prompts is thick, the rest thin.
function traces(data) {
  const found = [];
  Object.entries(data.seeds).forEach(([seed, columns], index) => {
    for (const [column, points] of Object.entries(columns)) {
      if (points.length === 0) continue;
      const heldOut = column === "eval/accuracy";
      found.push({
        name: seed.replace("seed", "seed "),
        legendgroup: seed,
        showlegend: heldOut,
        x: points.map((point) => point[0]),
        y: points.map((point) => point[1]),
        mode: heldOut ? "lines+markers" : "lines",
        line: { color: COLOURS[index % COLOURS.length], width: heldOut ? 2.5 : 1 },
        opacity: heldOut ? 1 : 0.5,
        hovertemplate: `step %{x}: %{y:.3f}<extra>${data.names[column]}, ${seed}</extra>`,
      });
    }
  });
  return found;
}

function layout() {
  const ink = getComputedStyle(document.body).color;
  const axis = { color: ink, gridcolor: "rgba(128, 128, 128, 0.25)", zeroline: false };
  return {
    autosize: true,
    height: 360,
    margin: { l: 44, r: 12, t: 8, b: 84 },
    paper_bgcolor: "rgba(0, 0, 0, 0)",
    plot_bgcolor: "rgba(0, 0, 0, 0)",
    font: { color: ink, family: "inherit" },
    hovermode: "closest",
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
    xaxis: { ...axis, title: { text: "step", standoff: 8 } },
    yaxis: { ...axis, rangemode: "tozero" },
  };
}

async function draw(figure) {
  await loadPlotly();
  const data = JSON.parse(figure.querySelector("script").textContent);
  const settings = { responsive: true, displaylogo: false, displayModeBar: false };
  await Plotly.newPlot(figure.querySelector(".plot"), traces(data), layout(), settings);
  figure.classList.add("drawn");
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries.filter((entry) => entry.isIntersecting)) {
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  },
  { rootMargin: "300px" },
);
FIGURES.forEach((figure) => watcher.observe(figure));

// Light to dark and back: the theme notes its scheme on the body.
new MutationObserver(() => {
  for (const figure of document.querySelectorAll("figure.curve.drawn")) {
    Plotly.relayout(figure.querySelector(".plot"), layout());
  }
}).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
