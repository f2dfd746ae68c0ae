/* The leading directions, and one pair across the scales of a sweep. */

function renderDirections(panel) {
  const { eigenvalues, shares, vectors } = numbers(), k = Math.min(state.direction, eigenvalues.length - 1);
  const limit = largest(eigenvalues), list = listed(limit), focused = focusedIn("panel")?.direction;
  const share = (m) => `${Math.round(100 * shares[m])} %`;
  const buttons = eigenvalues.map((value, m) => {
    const choose = () => m !== state.direction && update({ direction: m });
    return h("button", {
      type: "button", class: "row", "aria-pressed": String(m === k), "data-direction": m, "data-value": value,
      onclick: choose, onfocus: choose,
    }, h("span", { class: "name" }, `Direction ${m + 1}`), track(value, 0, limit, false, bySign),
    h("span", { class: "figure" }, `${text(value, true, list)}${power(list.e)} · ${share(m)}`));
  });
  const words = `${directionWords(k, eigenvalues[k])}: λ = ${text(eigenvalues[k])}, ${share(k)} of the `
    + `${numbers().denoised ? "denoised " : ""}matrix by squared size. ${cap(P.words)} of one colour `
    + `${P.derivative ? "move" : "go"} together, those of the other colour in the opposite direction; the overall `
    + "sign is arbitrary. The weights have no intervals.";
  const box = h("div", { class: "rows", onkeydown: (e) => walk(e, box, "button") }, ...buttons);
  const about = { id: "direction", class: "chart", "data-index": k, role: "img", "aria-label": words };
  const picture = h(P.kind === "image" ? "canvas" : "div", about);
  const side = P.kind === "image" ? h("div", { class: "map stage" }, picture) : picture;
  panel.replaceChildren(h("div", { class: "directions" }, h("div", {}, h("p", { class: "hint" }, words), box), side));
  if (focused !== undefined) buttons[k].focus({ preventScroll: true });
  const vector = [...vectors.slice(k * D, (k + 1) * D)];
  if (P.kind === "image") directionOnImage(picture, vector);
  else directionAsBars(picture, vector);
}

function directionWords(k, value) {
  if (!P.derivative) return `Direction ${k + 1}`;
  const bends = value > 0 ? "bends upwards" : value < 0 ? "bends downwards" : "does not bend";
  return `Along direction ${k + 1} ${output()} ${bends}`;
}

function directionOnImage(canvas, vector) {
  const [height, width] = P.examples[state.b].size, most = largest(vector);
  canvas.style.setProperty("--ratio", `${width} / ${height}`);
  paint(canvas, vector.map((weight) => tint(weight / most, false, bySign)), []);
}

function directionAsBars(element, vector) { // along time, or the largest weights on top
  const upright = P.kind === "series", byWeight = (a, b) => Math.abs(vector[b]) - Math.abs(vector[a]);
  const shown = upright ? inOrder() : [...vector.keys()].sort(byWeight).slice(0, 15).reverse();
  const place = shown.map((_, r) => r), weight = shown.map((m) => vector[m]);
  const ticktext = shown.map((m) => plain(short(names()[m])));
  const ticks = { tickvals: place, ticktext, showgrid: false, tickangle: upright ? -60 : 0 };
  const weights = { title: { text: upright ? "weight" : `weight; the ${shown.length} largest of ${D}` } };
  draw(element, [{
    type: "bar", orientation: upright ? "v" : "h", hoverinfo: "none",
    x: upright ? place : weight, y: upright ? weight : place,
    marker: { color: weight.map((w) => css(bySign(w))), opacity: 0.85 },
  }], {
    height: upright ? 320 : 60 + 24 * shown.length, margin: { l: 10, r: 10, t: 6, b: 40 },
    xaxis: upright ? ticks : weights, yaxis: upright ? weights : ticks,
  });
}

function renderSigma(panel) {
  if (!$("sigma-chart")) {
    panel.replaceChildren(h("p", { class: "hint", id: "sigma-hint" }), h("div", { id: "sigma-chart", class: "chart" }));
  }
  const at = partner(), points = P.sweep.map((_, s) => pair(state.i, at, s)), x = P.sweep.map((each) => each.sigma);
  const moved = state.unit === "effect" && !P.directed ? "each moved by that σ" : unitWords();
  const both = `${names()[state.i]} × ${names()[at]}`, accent = css("--accent");
  $("sigma-hint").textContent = `${both} at each σ, ${moved}; bars: ${percent} intervals of each σ${
    points.every((p) => Number.isFinite(p.half)) ? "" : "; no bar: too few draws"}.`;
  $("sigma-chart").dataset.values = JSON.stringify(points.map((p) => p.value));
  draw($("sigma-chart"), [{
    x, y: points.map((p) => p.value), mode: "lines+markers", hoverinfo: "none", line: { color: accent, width: 2 },
    marker: { size: x.map((_, s) => (s === state.s ? 12 : 7)) },
    error_y: { type: "data", array: bars(points.map((p) => p.half)), color: accent, thickness: 1.5, width: 4 },
  }], {
    height: 340, margin: { l: 60, r: 16, t: 8, b: 46 },
    xaxis: {
      title: { text: "σ" }, type: x.at(-1) > 10 * x[0] ? "log" : "linear",
      tickvals: x, ticktext: x.map((v) => text(v, false)),
    },
    yaxis: { title: { text: "interaction" }, zeroline: true, zerolinecolor: css("--soft"), rangemode: "tozero" },
  });
}
