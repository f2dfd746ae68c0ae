/* A series: the curve with its windows, and under it what acts together with one of them. */

const SLOP = 4; // pixels that a press may move

function windows(b = state.b) { // beginning and end of each, half way to its neighbours
  return remember(`windows ${b}`, () => {
    const ids = labels(b), t = P.examples[b].times, last = t.length - 1, found = [];
    const before = (k) => {
      if (k === 0) return t[0] - (t[1] - t[0]) / 2;
      return k > last ? t[last] + (t[last] - t[last - 1]) / 2 : (t[k - 1] + t[k]) / 2;
    };
    for (let k = 0, start = 0; k <= last; k++) {
      if (k < last && ids[k + 1] === ids[k]) continue;
      found[ids[k]] = [before(start), before(k + 1)];
      start = k + 1;
    }
    return found;
  });
}

function inOrder() { // the windows that there are, as time goes
  const spans = windows();
  return [...spans.keys()].filter((k) => spans[k]).sort((a, b) => spans[a][0] - spans[b][0]);
}

function renderSeries() {
  if (!$("chart")) makeChart();
  const chart = $("chart"), list = others(state.i).filter(visible), limit = largest(list.map((p) => p.shown));
  draw(chart, seriesTraces(list), seriesLayout()).then(() => listen(chart));
  chart.setAttribute("aria-label", `Curve with ${D} ${P.words}. ${names()[state.i]} is chosen.`);
  Object.assign(chart.dataset, { source: state.i, partner: partner(), held: state.held, limit });
}

function makeChart() {
  const about = { role: "application", "aria-describedby": "where-hint sentence" };
  const chart = h("div", { id: "chart", class: "chart", tabindex: 0, ...about });
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], order = inOrder();
    if (event.key === "Escape") update({ held: false, j: null });
    if (!step) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(order.length - 1, order.indexOf(state.i) + step));
    update({ i: order[to], j: null, held: true });
  });
  $("view").replaceChildren(chart);
}

function seriesTraces(list) {
  const { times, curves } = P.examples[state.b], spans = windows(), order = inOrder();
  const middle = (k) => (spans[k][0] + spans[k][1]) / 2, wide = (k) => spans[k][1] - spans[k][0];
  const unseen = { opacity: 0 };
  return [
    ...curves.map((curve, c) => ({
      x: times, y: [...floats(curve)], mode: "lines", hoverinfo: "skip",
      line: { color: css(c ? "--soft" : "--ink"), width: 1.6 },
    })),
    {
      type: "bar", yaxis: "y2", hoverinfo: "skip", x: list.map((p) => middle(p.j)), y: list.map((p) => sized(p.shown)),
      width: list.map((p) => 0.82 * wide(p.j)),
      marker: { color: list.map((p) => css(colourOf(p.shown))), opacity: list.map((p) => (p.faint ? FAINT : 0.85)) },
      error_y: {
        type: "data", array: bars(list.map((p) => p.half)), color: css("--ink"), thickness: 1.2, width: 2,
        visible: !denoised(), // the intervals are of the unbiased numbers
      },
    },
    // Unseen bars over all of each window catch the mouse.
    ...["y3", "y4"].map((axis) => ({
      type: "bar", yaxis: axis, hoverinfo: "none", x: order.map(middle), y: order.map(() => 1), width: order.map(wide),
      customdata: order, marker: { color: "rgba(0,0,0,0)" },
      selected: { marker: unseen }, unselected: { marker: unseen },
    })),
  ];
}

function seriesLayout() {
  const spans = windows(), order = inOrder(), at = partner(), top = [0.53, 1], bottom = [0, 0.45];
  const fill = (k, name, opacity) => ["y domain", "y2 domain"].map((yref) => ({
    type: "rect", layer: "below", xref: "x", yref, x0: spans[k][0], x1: spans[k][1], y0: 0, y1: 1,
    fillcolor: css(name), opacity, line: { width: 0 },
  }));
  const time = plain(P.units?.[0] ? `time, ${P.units[0]}` : "time"), cover = { range: [0, 1], visible: false };
  return {
    height: 460, barmode: "overlay", bargap: 0, margin: { l: 58, r: 10, t: 8, b: 42 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "select", selectdirection: "h",
    xaxis: { anchor: "y2", range: [spans[order[0]][0], spans[order.at(-1)][1]], title: { text: time, standoff: 8 } },
    yaxis: { domain: top, title: { text: "input" } },
    yaxis2: { domain: bottom, title: { text: "interaction" }, zeroline: true, zerolinecolor: css("--soft") },
    yaxis3: { domain: top, ...cover },
    yaxis4: { domain: bottom, ...cover },
    shapes: [
      ...order.filter((_, k) => k % 2).flatMap((k) => fill(k, "--well", 0.8)),
      ...(at === state.i || !spans[at] ? [] : fill(at, "--soft", 0.25)), ...fill(state.i, "--mark", 0.45),
    ],
  };
}

function listen(chart) {
  if (chart.dataset.ready) return;
  chart.dataset.ready = "yes";
  chart.on("plotly_hover", (e) => look(e.points.at(-1).customdata));
  // Plotly loses a click while the chart is drawn anew, which the hover before it begins: presses are seen to here.
  chart.addEventListener("pointerdown", (down) => {
    if (down.button !== 0 || !down.isPrimary) return;
    addEventListener("pointerup", (up) => {
      if (Math.hypot(up.clientX - down.clientX, up.clientY - down.clientY) > SLOP) return; // a brush
      const k = windowAt(chart, up);
      if (k >= 0) hold(k);
    }, { capture: true, once: true });
  }, true);
  chart.on("plotly_selected", (e) => { // a stretch that was brushed stands for the window it covers most of
    if (!e?.range?.x) return;
    const [from, to] = e.range.x, spans = windows();
    const overlap = (k) => Math.min(to, spans[k][1]) - Math.max(from, spans[k][0]);
    const best = inOrder().reduce((a, k) => (overlap(k) > overlap(a) ? k : a));
    chart.dataset.brushed = best;
    update({ i: best, j: null, held: true });
  });
}

function windowAt(chart, { clientX, clientY }) { // -1: none
  const boxes = [...chart.querySelectorAll(".nsewdrag")].map((area) => area.getBoundingClientRect());
  if (!boxes.some((box) => box.top <= clientY && clientY <= box.bottom)) return -1;
  const [box] = boxes, { range } = chart.layout.xaxis;
  const t = range[0] + ((clientX - box.left) / box.width) * (range[1] - range[0]);
  return windows().findIndex((span) => span && span[0] <= t && t <= span[1]);
}
