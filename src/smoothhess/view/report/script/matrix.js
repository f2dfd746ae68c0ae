/* The whole matrix as a heat map. */

const NAMED = 40; // names that fit on an axis

function renderMatrix(panel) {
  if (!$("matrix")) {
    panel.replaceChildren(h("div", { class: "beside" }, h("div", { id: "matrix", class: "chart" }),
      h("div", { class: "hint", id: "matrix-hint" })));
  }
  $("matrix-hint").replaceChildren(...matrixWords().map((words) => h("p", {}, words)));
  const chart = $("matrix"), room = chart.parentElement.clientWidth, at = partner();
  const cell = (r, c) => ({
    type: "rect", x0: c - 0.5, x1: c + 0.5, y0: r - 0.5, y1: r + 0.5, line: { color: css("--ink"), width: 2 },
  });
  const shown = inMatrix(), row = shown.indexOf(state.i), column = shown.indexOf(at);
  const shapes = row < 0 || column < 0 ? [] : [cell(row, column), cell(column, row)];
  const { s, b, mode, only, unit, estimate } = state, drawn = [s, b, mode, only, unit, estimate, room, dark()].join();
  if (chart.dataset.drawn === drawn) { // another cell is chosen, nothing else
    Plotly.relayout(chart, { shapes });
    return;
  }
  chart.dataset.drawn = drawn;
  const narrow = room < 560, { traces, limit } = heat(narrow);
  const { margin, ...axis } = matrixAxis(narrow);
  const side = narrow ? room : Math.min(0.68 * room, axis.ticktext?.length > 20 ? 800 : 640);
  draw(chart, traces, {
    width: side, height: narrow ? side : 0.9 * side, margin: { l: margin, r: 10, t: 6, b: margin }, shapes,
    xaxis: { ...axis, tickangle: P.word === "pixel" || !axis.ticktext ? "auto" : -60 },
    yaxis: { ...axis, autorange: "reversed", scaleanchor: "x" },
  }).then(() => {
    chart.dataset.limit = limit;
    if (chart.dataset.ready) return;
    chart.dataset.ready = "yes";
    chart.on("plotly_hover", (e) => sentence(pair(inMatrix()[e.points[0].y], inMatrix()[e.points[0].x])));
    chart.on("plotly_unhover", () => sentence(pair(state.i, partner())));
    chart.on("plotly_click", (e) => {
      update({ i: inMatrix()[e.points[0].y], j: inMatrix()[e.points[0].x], held: true });
    });
  });
}

function matrixWords() {
  const together = P.directed ? "moved together along the given direction, the two" : "the two together";
  const signed = P.derivative
    ? `Red: ${together} raise ${output()} beyond their separate effects; blue: they stay below them.`
    : "Red: the interaction is positive; blue: it is negative.";
  const colours = state.mode === "magnitude" ? "The stronger the colour, the larger; signs are left out." : signed;
  const alone = P.derivative ? `each ${P.word} by itself` : `each ${P.word} with itself`;
  const order = P.word === "pixel" ? " Pixels go row by row." : "";
  const part = inMatrix().length, strongest = `The ${part} of ${D} ${P.words} in the strongest pairs`;
  const which = part === D ? "Every pair at once" : strongest;
  return [
    `${which}${denoised() ? ", denoised" : ""}. ${colours}${order}`,
    `The diagonal is ${alone}.${noise()}${numbers().still.size ? " Empty: no noise." : ""}`,
    "The boxed cells are the pair of the sentence above: point at a cell to read it there, click to choose it.",
  ];
}

function inMatrix() { // the features of the matrix: of a long text, those with the strongest interactions
  if (P.kind !== "text" || D <= NAMED) return [...names().keys()];
  return remember(`matrix ${state.s} ${state.b}`, () => {
    const found = new Set();
    for (const p of everyPair()) {
      if (found.size + !found.has(p.i) + !found.has(p.j) > NAMED) break;
      found.add(p.i).add(p.j);
    }
    return [...found].sort((a, b) => a - b);
  });
}

function heat(narrow) { // what is clear, and over it, faintly, what is within noise
  const clear = [], faint = [], all = [];
  const shown = inMatrix();
  shown.forEach((i, r) => {
    clear.push(Array(shown.length).fill(null));
    faint.push(Array(shown.length).fill(null));
    shown.forEach((j, c) => {
      const p = pair(i, j);
      if (!visible(p) || !p.moves) return;
      (p.faint ? faint : clear)[r][c] = sized(p.shown);
      all.push(p.shown);
    });
  });
  const limit = largest(all), middle = css("--middle"), gap = shown.length <= NAMED ? 1 : 0;
  const soft = { color: css("--soft"), size: 12 };
  const size = state.mode === "magnitude";
  const colorscale = size ? [[0, middle], [1, css("--size")]] : [[0, css("--neg")], [0.5, middle], [1, css("--pos")]];
  const colorbar = {
    thickness: 12, len: 0.6, outlinewidth: 0, exponentformat: "power", tickfont: soft,
    title: { text: "interaction", side: "right", font: soft },
  };
  const trace = (z, opacity, showscale) => ({
    type: "heatmap", z, opacity, colorscale, zmin: size ? 0 : -limit, zmax: limit, hoverinfo: "none",
    showscale, colorbar, xgap: gap, ygap: gap,
  });
  return { traces: [trace(clear, 1, !narrow), trace(faint, FAINT, false)], limit };
}

function matrixAxis(narrow) {
  // Room for the names is made here: beside an axis that is tied to the other, Plotly's own way can go round in circles.
  const base = { showgrid: false, zeroline: false, constrain: "domain", automargin: false, margin: 50 };
  if (P.word === "pixel") {
    const width = P.examples[state.b].size[1], rows = [...Array(D / width).keys()];
    const tickvals = rows.map((row) => (row + 0.5) * width - 0.5);
    return { ...base, tickvals, ticktext: rows.map(String), title: { text: "pixels, by row of the image" } };
  }
  const shown = inMatrix().map((k) => short(names()[k])), size = shown.length > 24 ? 10 : 12;
  if (narrow || shown.length > NAMED) return { ...base, title: { text: P.word } };
  const margin = 16 + 0.6 * size * Math.max(...shown.map((name) => name.length));
  const tickfont = { size, color: css("--soft") };
  return { ...base, tickvals: [...shown.keys()], ticktext: shown.map(plain), tickfont, margin };
}
