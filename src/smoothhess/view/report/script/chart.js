/* Axes of charts in SVG; `box` is the rectangle of the data in the units of the picture. */

function ticks(low, high, most = 6) { // round numbers between two ends
  const raw = (high - low) / most, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * size >= raw) * size, found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

function scaled([low, high], [from, to]) { // the place of a number
  const span = high - low || 1;
  return (x) => from + ((x - low) / span) * (to - from);
}

function tickTexts(values) {
  const list = listed(largest(values)), step = values.length > 1 ? Math.abs(values[1] - values[0]) / 10 ** list.e : 1;
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return { e: list.e, texts: values.map((x) => minus((x / 10 ** list.e || 0).toFixed(digits))) };
}

function yAxis(box, range, title) {
  const values = ticks(...range, Math.max(2, Math.floor((box.bottom - box.top) / 34))), at = scaled(range, [box.bottom, box.top]);
  const { e, texts } = tickTexts(values), middle = (box.top + box.bottom) / 2;
  return svg("g", {}, ...values.flatMap((x, k) => [
    svg("line", { class: x === 0 ? "zero" : "axis", x1: box.left, x2: box.right, y1: at(x), y2: at(x) }),
    svg("text", { x: box.left - 6, y: at(x) + 4, "text-anchor": "end" }, texts[k]),
  ]), svg("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` },
    `${title}${e ? `, ${ten(e)}` : ""}`));
}

function xAxis(box, values, texts, at, title) {
  return svg("g", {}, ...values.flatMap((x, k) => [
    svg("line", { class: "axis", x1: at(x), x2: at(x), y1: box.bottom, y2: box.bottom + 5 }),
    svg("text", { x: at(x), y: box.bottom + 18, "text-anchor": "middle" }, texts[k]),
  ]), svg("text", { x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, title));
}

function around(values, zero = true) { // a range with some room
  const found = values.filter(Number.isFinite).concat(zero ? [0] : []);
  const low = found.reduce((a, b) => Math.min(a, b), Infinity), high = found.reduce((a, b) => Math.max(a, b), -Infinity);
  const room = 0.06 * (high - low || 1);
  return [low < 0 || !zero ? low - room : low, high > 0 || !zero ? high + room : high];
}

function errorBar(x, low, high) {
  const d = `M${x} ${low}V${high}M${x - 3} ${low}H${x + 3}M${x - 3} ${high}H${x + 3}`;
  return svg("path", { class: "whisker", d, fill: "none" });
}
