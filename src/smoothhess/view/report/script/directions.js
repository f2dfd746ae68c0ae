/* The leading directions, and one pair across the scales of a sweep. */

function renderDirections(panel) {
  const { eigenvalues, shares, vectors } = numbers(), k = Math.min(state.direction, eigenvalues.length - 1);
  const limit = largest(eigenvalues), list = listed(limit), focused = focusedIn("panel")?.direction;
  const part = (m) => `${Math.round(100 * shares[m])}\u00a0%`;
  const buttons = eigenvalues.map((value, m) => {
    const choose = () => m !== state.direction && update({ direction: m });
    return h("button", {
      type: "button", class: "row", "aria-pressed": String(m === k), "data-direction": m, "data-value": value,
      onclick: choose, onfocus: choose,
    }, h("span", { class: "name" }, `Direction ${m + 1}`), track(value, 0, limit, false, bySign),
    h("span", { class: "figure" }, `${text(value, true, list)}${power(list.e)} · ${part(m)}`));
  });
  const words = `${directionWords(k, eigenvalues[k])}: λ = ${text(eigenvalues[k])}, ${part(k)} of the `
    + `${numbers().directionsDenoised ? "denoised " : ""}matrix by squared size. ${cap(P.words)} of one colour ${P.derivative ? "move" : "go"} together, those of the other `
    + "colour in the opposite direction; the overall sign is arbitrary. The weights have no intervals.";
  const box = h("div", { class: "rows", onkeydown: (e) => walk(e, box, "button") }, ...buttons);
  const about = { id: "direction", class: "chart", "data-index": k, role: "img", "aria-label": words };
  const vector = [...vectors.slice(k * D, (k + 1) * D)];
  const side = h("div", { class: P.kind === "image" ? "stage" : null });
  panel.replaceChildren(h("div", { class: "directions" }, h("div", {}, h("p", { class: "hint" }, words), box), side));
  if (focused !== undefined) buttons[k].focus({ preventScroll: true });
  if (P.kind === "image") directionOnImage(side, about, vector);
  else if (P.kind === "series") directionAlongTime(side, about, vector);
  else directionAsRows(side, about, vector);
}

function directionWords(k, value) {
  if (!P.derivative) return `Direction ${k + 1}`;
  const bends = value > 0 ? "bends upwards" : value < 0 ? "bends downwards" : "does not bend";
  return `Along direction ${k + 1} ${output()} ${bends}`;
}

function directionOnImage(side, about, vector) {
  const [height, width] = P.examples[state.b].size, most = largest(vector), canvas = h("canvas", about);
  canvas.style.setProperty("--ratio", `${width} / ${height}`);
  side.append(canvas);
  paint(canvas, vector.map((weight) => tint(weight / most, false, bySign)), []);
}

function directionAlongTime(side, about, vector) {
  const width = Math.max(280, side.clientWidth), time = timeScale(width), spans = windows(), order = inOrder();
  const box = { ...time, top: 10, bottom: 250 }, range = around(order.map((m) => vector[m])), y = scaled(range, [box.bottom, box.top]);
  const columns = order.map((m) => {
    const [x0, x1] = spans[m].map(time.at), inset = 0.09 * (x1 - x0), value = vector[m];
    const at = { x: x0 + inset, width: x1 - x0 - 2 * inset, y: Math.min(y(0), y(value)), height: Math.abs(y(value) - y(0)) };
    return svg("rect", { ...at, style: `fill:var(${bySign(value)});fill-opacity:.85` });
  });
  side.append(svg("svg", { ...about, viewBox: `0 0 ${width} 292` }, yAxis(box, range, "weight"), ...columns, ...timeAxis(box)));
}

function directionAsRows(side, about, vector) { // the largest weights
  const shown = [...vector.keys()].sort((a, b) => Math.abs(vector[b]) - Math.abs(vector[a])).slice(0, 15), most = largest(vector);
  const rows = shown.map((m) => h("div", { class: "row head" }, h("span", { class: "name" }, names()[m]),
    track(vector[m], 0, most, false, bySign), h("span", { class: "figure" }, text(vector[m], true, listed(most)))));
  const hidden = D > shown.length ? [h("p", { class: "hint" }, `The ${shown.length} largest weights of ${D}.`)] : [];
  side.append(...hidden, h("div", { ...about, class: "rows" }, ...rows));
}

function renderSigma(panel) {
  if (!$("sigma-chart")) {
    panel.replaceChildren(h("p", { class: "hint", id: "sigma-hint" }), svg("svg", { id: "sigma-chart", class: "chart", role: "img" }));
  }
  const at = partner(), points = P.sweep.map((_, s) => pair(state.i, at, s)), sigmas = P.sweep.map((each) => each.sigma);
  const moved = state.unit === "effect" && !P.directed ? "each moved by that σ" : unitWords();
  const chart = $("sigma-chart"), width = Math.max(280, Math.min(820, panel.clientWidth));
  const words = `${names()[state.i]} × ${names()[at]} at each σ, ${moved}; bars: ${percent} intervals of each σ${
    points.every((p) => Number.isFinite(p.half)) ? "" : "; no bar: too few draws"}.`;
  $("sigma-hint").textContent = words;
  chart.setAttribute("aria-label", words);
  chart.setAttribute("viewBox", `0 0 ${width} 330`);
  chart.style.maxWidth = `${width}px`;
  chart.dataset.values = JSON.stringify(points.map((p) => p.value));
  const log = sigmas.at(-1) > 10 * sigmas[0] ? Math.log : (x) => x, box = { left: 66, right: width - 16, top: 10, bottom: 280 };
  const along = around(sigmas.map(log), false), x = (sigma) => scaled(along, [box.left, box.right])(log(sigma));
  const half = (p) => (Number.isFinite(p.half) ? p.half : 0);
  const range = around(points.flatMap((p) => [p.value - half(p), p.value + half(p)])), y = scaled(range, [box.bottom, box.top]);
  chart.replaceChildren(
    yAxis(box, range, P.derivative ? "extra change" : "interaction"), xAxis(box, sigmas, sigmas.map((v) => text(v, false)), x, "σ"),
    svg("path", { class: "line", d: `M${points.map((p, s) => `${x(sigmas[s])} ${y(p.value)}`).join("L")}`, style: "stroke:var(--accent)" }),
    ...points.flatMap((p, s) => [
      ...(half(p) ? [errorBar(x(sigmas[s]), y(p.value - p.half), y(p.value + p.half))] : []),
      svg("circle", { cx: x(sigmas[s]), cy: y(p.value), r: s === state.s ? 6.5 : 4, style: "fill:var(--accent)" }),
    ]));
}
