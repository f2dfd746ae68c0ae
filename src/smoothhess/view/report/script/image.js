/* An image: what acts together with one of its segments, painted over it. */

const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));

function geometry(b = state.b) { // middles of the segments, and the lines between them
  return remember(`geometry ${b}`, () => {
    const [height, width] = P.examples[b].size, ids = labels(b), count = new Float64Array(D);
    const x = new Float64Array(D), y = new Float64Array(D), lines = new Path2D();
    for (let r = 0, k = 0; r < height; r++) for (let c = 0; c < width; c++, k++) {
      count[ids[k]]++;
      x[ids[k]] += c + 0.5;
      y[ids[k]] += r + 0.5;
      if (c + 1 < width && ids[k] !== ids[k + 1]) stroke(lines, c + 1, r, c + 1, r + 1);
      if (r + 1 < height && ids[k] !== ids[k + width]) stroke(lines, c, r + 1, c + 1, r + 1);
    }
    return { x: x.map((sum, k) => sum / count[k]), y: y.map((sum, k) => sum / count[k]), count, lines };
  });
}

function stroke(path, x0, y0, x1, y1) {
  path.moveTo(x0, y0);
  path.lineTo(x1, y1);
}

function outline(id, b = state.b) {
  return remember(`outline ${b} ${id}`, () => {
    const [height, width] = P.examples[b].size, ids = labels(b), path = new Path2D();
    const inside = (r, c) => r >= 0 && c >= 0 && r < height && c < width && ids[r * width + c] === id;
    for (let r = 0; r < height; r++) for (let c = 0; c < width; c++) if (inside(r, c)) {
      if (!inside(r - 1, c)) stroke(path, c, r, c + 1, r);
      if (!inside(r + 1, c)) stroke(path, c, r + 1, c + 1, r + 1);
      if (!inside(r, c - 1)) stroke(path, c, r, c, r + 1);
      if (!inside(r, c + 1)) stroke(path, c + 1, r, c + 1, r + 1);
    }
    return path;
  });
}

function tint(share, faint, colour = colourOf) { // colour and opacity of a number that is `share` of the limit
  const opacity = share === 0 ? 0 : (0.08 + 0.84 * Math.min(1, Math.abs(share))) * (faint ? FAINT : 1);
  return [...rgb(css(colour(share))), opacity];
}

/* The picture in pale grey, over it the tint of each segment (none where there is none), and outlines. */
function paint(canvas, tints, marks) {
  const [height, width] = P.examples[state.b].size, most = Math.max(height, width), ids = labels();
  const zoom = Math.max(1, Math.ceil(1100 / most)), line = most / 600;
  canvas.width = width * zoom;
  canvas.height = height * zoom;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingEnabled = most > 64;
  const picture = known.get(`picture ${state.b}`);
  if (picture) {
    const grey = remember(`pale ${state.b} ${dark()}`, () => pale(picture));
    context.drawImage(grey, 0, 0, canvas.width, canvas.height);
  }
  const overlay = new ImageData(width, height), layer = new OffscreenCanvas(width, height);
  for (let k = 0; k < ids.length; k++) {
    const found = tints[ids[k]];
    if (found) overlay.data.set([found[0], found[1], found[2], 255 * found[3]], 4 * k);
  }
  layer.getContext("2d").putImageData(overlay, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(layer, 0, 0, canvas.width, canvas.height);
  context.scale(zoom, zoom);
  context.lineCap = "square";
  const along = (path, colour, weight) => {
    context.strokeStyle = colour;
    context.lineWidth = weight * line;
    context.stroke(path);
  };
  along(geometry().lines, dark() ? "rgb(0 0 0 / .55)" : "rgb(255 255 255 / .8)", 1.2);
  for (const [id, colour, halo, weight] of marks) {
    along(outline(id), halo, weight + 3);
    along(outline(id), colour, weight);
  }
}

function pale(picture) { // in grey, light or dark as the page, so that colours are seen on it
  const canvas = new OffscreenCanvas(picture.naturalWidth, picture.naturalHeight), context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const image = context.getImageData(0, 0, canvas.width, canvas.height), px = image.data;
  const share = Math.max(canvas.width, canvas.height) <= 64 ? 0.3 : 1; // of few pixels, each would shade a whole colour
  for (let k = 0; k < px.length; k += 4) {
    const grey = 0.3 * px[k] + 0.59 * px[k + 1] + 0.11 * px[k + 2];
    px[k] = px[k + 1] = px[k + 2] = dark() ? 14 + 0.36 * share * grey : 255 - 0.55 * share * (255 - grey);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function loadPicture(b) {
  if (P.kind !== "image" || known.has(`picture ${b}`)) return;
  const picture = new Image();
  picture.onload = () => {
    known.set(`picture ${b}`, picture);
    if (b === state.b) render();
  };
  picture.src = P.examples[b].picture;
}

function ramp(limit, [less, more], marks) { // what the colours and the marks mean
  const size = state.mode === "magnitude";
  const colours = size ? ["transparent", "var(--size)"] : ["var(--neg)", "var(--middle)", "var(--pos)"];
  const [low, high] = [text(-limit), text(limit)];
  const signed = P.derivative ? [`${low} ${less}`, "0", `${more} ${high}`] : [low, "0", high];
  const ends = size ? ["0", "", text(limit, false)] : signed;
  return h("div", { class: "scale" },
    h("div", { class: "ramp", style: `background:linear-gradient(90deg,${colours})` }),
    h("div", { class: "ends" }, ...ends.map((words) => h("span", {}, words))),
    h("div", {}, `${marks}${noise()}`));
}

function renderImage() {
  const example = P.examples[state.b], [height, width] = example.size;
  if (!$("map")) makeMap();
  const map = $("map"), list = others(state.i), limit = largest(list.map((p) => p.shown)), tints = [], at = partner();
  for (const p of list.filter(visible)) tints[p.j] = tint(p.shown / limit, p.faint);
  const marks = at === state.i ? [] : [[at, "#111", "#fff", 2.2]];
  paint(map, tints, [...marks, [state.i, css("--mark"), "#111", 4]]);
  map.style.setProperty("--ratio", `${width} / ${height}`);
  map.setAttribute("aria-label", `Picture with ${D} ${P.words}. ${names()[state.i]} is chosen.`);
  Object.assign(map.dataset, { source: state.i, partner: at, held: state.held, limit, example: state.b });
  const coarse = Math.max(height, width) <= 64 ? "coarse" : null;
  const input = h("img", { src: example.picture, alt: "the input", class: coarse });
  $("below").replaceChildren(h("figure", {}, input, "input"), ramp(limit, ["less together", "more together"],
    "Gold outline: chosen; dark outline: its partner."));
}

function makeMap() {
  const map = h("canvas", { id: "map", tabindex: 0, role: "application", "aria-describedby": "where-hint sentence" });
  map.addEventListener("pointermove", (e) => e.pointerType === "mouse" && look(segmentAt(e)));
  map.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && state.held && update({ j: null }));
  map.addEventListener("click", (e) => hold(segmentAt(e)));
  map.addEventListener("keydown", steer);
  $("view").replaceChildren(
    h("div", { class: "map" }, h("div", { class: "stage" }, map), h("div", { class: "below", id: "below" })));
}

function segmentAt(event) {
  const box = $("map").getBoundingClientRect(), [height, width] = P.examples[state.b].size;
  const cell = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
  const r = cell((event.clientY - box.top) / box.height, height);
  const c = cell((event.clientX - box.left) / box.width, width);
  return labels()[r * width + c];
}

function look(id) { // the mouse is over a segment: the chosen one, or the partner of one that is held
  if (!state.held && id !== state.i) update({ i: id, j: null });
  else if (state.held && id !== (state.j ?? state.i)) update({ j: id === state.i ? null : id });
}

function hold(id) {
  update(state.held && id === state.i ? { held: false } : { i: id, j: null, held: true });
}

function steer(event) { // to the next segment in the arrow's direction
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (event.key === "Escape") update({ held: false, j: null });
  if (event.key === "Enter" || event.key === " ") hold(state.i);
  if (way || event.key === "Enter" || event.key === " ") event.preventDefault();
  if (!way) return;
  const { x, y, count } = geometry(), i = state.i;
  let best = i, least = Infinity;
  for (let k = 0; k < D; k++) {
    const dx = x[k] - x[i], dy = y[k] - y[i];
    const along = dx * way[0] + dy * way[1], aside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
    if (k !== i && count[k] && along > aside / 2 && along + 2 * aside < least) [best, least] = [k, along + 2 * aside];
  }
  update({ i: best, j: null, held: true });
}
