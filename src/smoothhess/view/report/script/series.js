/* A series: the curve with its windows, and under it what acts together with one of them. */

const HEIGHT = 440, MIDDLE = 210; // of the chart, and where the curve ends and the bars begin

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

function timeScale(width) { // the rectangle of the data, and the place of a time
  const spans = windows(), order = inOrder(), range = [spans[order[0]][0], spans[order.at(-1)][1]];
  const box = { left: 62, right: width - 8 };
  return { range, ...box, at: scaled(range, [box.left, box.right]) };
}

function renderSeries() {
  if (!$("chart")) makeChart();
  const chart = $("chart"), list = others(state.i).filter(visible), limit = largest(list.map((p) => p.value));
  const width = Math.max(280, chart.parentElement.clientWidth), time = timeScale(width), order = inOrder();
  chart.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const upper = { ...time, top: 24, bottom: MIDDLE - 8 }, lower = { ...time, top: MIDDLE + 8, bottom: HEIGHT - 42 };
  chart.replaceChildren(...bands(order, time), ...curves(upper), ...interactionBars(list, lower), ...timeAxis(lower),
    ...bandTags(order, time));
  chart.setAttribute("aria-label", `Curve with ${D} ${P.words}. ${names()[state.i]} is chosen.`);
  Object.assign(chart.dataset, { source: state.i, partner: partner(), held: state.held, limit });
}

function bands(order, time) { // one behind every window: chosen, its partner, or every second one
  const spans = windows(), at = partner();
  return order.map((k, n) => {
    const [look, opacity] = k === state.i ? ["--mark", 0.42] : k === at ? ["--soft", 0.26] : ["--well", n % 2 ? 0.9 : 0];
    const [x0, x1] = spans[k].map(time.at);
    const box = { x: x0, width: x1 - x0, y: 4, height: HEIGHT - 46, "data-window": k };
    return svg("rect", { ...box, style: `fill:var(${look});fill-opacity:${opacity}` });
  });
}

function bandTags(order, time) {
  const spans = windows();
  const middle = (k) => (time.at(spans[k][0]) + time.at(spans[k][1])) / 2, wide = (k) => time.at(spans[k][1]) - time.at(spans[k][0]);
  const every = Math.ceil(20 / Math.min(...order.map(wide)));
  return order.filter((_, n) => n % every === 0).map((k) => svg("text", {
    x: middle(k), y: 17, "text-anchor": "middle", "font-weight": k === state.i ? 700 : 500, style: "pointer-events:none",
  }, tagOf(k)));
}

function curves(box) {
  const { times, curves: rows } = P.examples[state.b], all = rows.map(floats), flat = all.flatMap((row) => [...row]);
  const range = around(flat, false), y = scaled(range, [box.bottom, box.top]);
  const path = (row) => `M${times.map((t, k) => `${box.at(t).toFixed(1)} ${y(row[k]).toFixed(1)}`).join("L")}`;
  return [yAxis(box, range, "input"), ...all.map((row, c) => svg("path", {
    class: "line", d: path(row), style: c ? "stroke:var(--soft)" : null,
  }))];
}

function interactionBars(list, box) {
  const known = (p) => (Number.isFinite(p.half) ? p.half : 0), spans = windows();
  const range = around(list.flatMap((p) => [sized(p.value) - known(p), sized(p.value) + known(p)]));
  const y = scaled(range, [box.bottom, box.top]);
  return [yAxis(box, range, P.derivative ? "extra change" : "interaction"), ...list.flatMap((p) => {
    const [x0, x1] = spans[p.j].map(box.at), value = sized(p.value), inset = 0.09 * (x1 - x0), middle = (x0 + x1) / 2;
    const bar = svg("rect", {
      class: "bar", "data-partner": p.j, "data-value": value, "data-half": p.half, x: x0 + inset, width: x1 - x0 - 2 * inset,
      y: Math.min(y(0), y(value)), height: Math.abs(y(value) - y(0)),
      style: `fill:var(${colourOf(p.value)});fill-opacity:${p.faint ? FAINT : 0.85}`,
    });
    return p.half > 0 && known(p) ? [bar, errorBar(middle, y(value - p.half), y(value + p.half))] : [bar];
  })];
}

function timeAxis(box) {
  const values = ticks(...box.range, Math.max(3, Math.floor((box.right - box.left) / 80)));
  return [xAxis(box, values, tickTexts(values).texts, box.at, P.units?.[0] ? `time, ${P.units[0]}` : "time")];
}

function makeChart() {
  const about = { role: "application", "aria-describedby": "sentence", preserveAspectRatio: "none" };
  const chart = svg("svg", { id: "chart", class: "chart", tabindex: 0, ...about });
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], order = inOrder();
    if (event.key === "Escape") update({ held: false, j: null });
    if (event.key === "Enter" || event.key === " ") hold(state.i);
    if (step || event.key === "Enter" || event.key === " ") event.preventDefault();
    if (!step) return;
    const to = Math.max(0, Math.min(order.length - 1, order.indexOf(state.i) + step));
    update({ i: order[to], j: null, held: true });
  });
  const at = (act) => (event) => {
    const k = windowAt(event);
    if (k >= 0) act(k);
  };
  chart.addEventListener("pointermove", (event) => event.pointerType === "mouse" && at(look)(event));
  chart.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && state.held && update({ j: null }));
  chart.addEventListener("click", at(hold));
  $("view").replaceChildren(chart);
}

function windowAt({ clientX }) { // -1: none
  const box = $("chart").getBoundingClientRect(), spans = windows();
  const x = ((clientX - box.left) / box.width) * $("chart").viewBox.baseVal.width, { at } = timeScale($("chart").viewBox.baseVal.width);
  return spans.findIndex((span) => span && at(span[0]) <= x && x <= at(span[1]));
}
