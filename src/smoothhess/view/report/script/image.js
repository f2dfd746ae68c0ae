/* An image: what acts together with one of its segments, painted over it, and beside it the input as it is. */

const LEAST_ROOM = 14; // pixels on the screen that a number needs
const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));

function geometry(b = state.b) { // middles of the segments, where their numbers have room, and the lines between them
  return remember(`geometry ${b}`, () => {
    const [height, width] = P.examples[b].size, ids = labels(b), count = new Float64Array(D), room = new Float64Array(D);
    const x = new Float64Array(D), y = new Float64Array(D), lines = new Path2D(), spot = [];
    const depth = depths(ids, height, width);
    for (let r = 0, k = 0; r < height; r++) for (let c = 0; c < width; c++, k++) {
      const id = ids[k];
      count[id]++;
      x[id] += c + 0.5;
      y[id] += r + 0.5;
      if (c + 1 < width && id !== ids[k + 1]) stroke(lines, c + 1, r, c + 1, r + 1);
      if (r + 1 < height && id !== ids[k + width]) stroke(lines, c, r + 1, c + 1, r + 1);
    }
    const middle = [x.map((sum, k) => sum / count[k]), y.map((sum, k) => sum / count[k])], near = new Float64Array(D);
    for (let k = 0; k < ids.length; k++) { // deepest inside; of equally deep places, the one nearest to the middle
      const id = ids[k], at = [(k % width) + 0.5, Math.floor(k / width) + 0.5];
      const away = Math.hypot(at[0] - middle[0][id], at[1] - middle[1][id]);
      if (depth[k] < room[id] || (depth[k] === room[id] && away >= near[id])) continue;
      [room[id], near[id], spot[id]] = [depth[k], away, away < 1 ? [middle[0][id], middle[1][id]] : at];
    }
    return { x: middle[0], y: middle[1], count, lines, spot, room };
  });
}

function depths(ids, height, width) { // steps from each pixel to the edge of its segment
  const depth = new Int32Array(ids.length).fill(1 << 20), at = (r, c, id) => {
    if (r < 0 || c < 0 || r >= height || c >= width || ids[r * width + c] !== id) return 0;
    return depth[r * width + c];
  };
  const sweep = (r, c, step) => {
    const k = r * width + c, id = ids[k];
    depth[k] = Math.min(depth[k], 1 + at(r - step, c, id), 1 + at(r, c - step, id));
  };
  for (let r = 0; r < height; r++) for (let c = 0; c < width; c++) sweep(r, c, 1);
  for (let r = height - 1; r >= 0; r--) for (let c = width - 1; c >= 0; c--) sweep(r, c, -1);
  return depth;
}

function tagOf(k) { // the number or short name that stands on a feature in the picture; null: none
  if (P.kind === "series") return String(k);
  if (P.kind !== "image" || gridOf()) return null;
  const name = names()[k], number = name.match(/^[a-z]+ (\d+)$/);
  return number ? number[1] : name.length <= 4 ? name : String(k);
}

function gridOf(b = state.b) { // [rows, columns] where features are named by row and column: "pixel (2, 3)"
  return remember(`grid ${b}`, () => {
    const found = P.examples[b].names.map((name) => name.match(/\((\d+), (\d+)\)$/));
    if (!found.every(Boolean)) return null;
    const sides = [1, 2].map((k) => 1 + Math.max(...found.map((match) => Number(match[k]))));
    return sides[0] * sides[1] === D ? sides : null;
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

function tint(part, faint, colour = colourOf) { // colour and opacity of a number that is `part` of the limit
  const opacity = part === 0 ? 0 : (0.08 + 0.84 * Math.min(1, Math.abs(part))) * (faint ? FAINT : 1);
  return [...rgb(css(colour(part))), opacity];
}

/* A picture: the input, in pale grey under the tint of each segment (none where there is none), or in its colours if
   `tints` is null; over it outlines and the numbers of the segments. */
function paint(canvas, tints, marks) {
  const [height, width] = P.examples[state.b].size, most = Math.max(height, width);
  const zoom = Math.max(1, Math.ceil(1100 / most)), line = most / 500, shown = canvas.clientWidth || 400;
  canvas.width = width * zoom;
  canvas.height = height * zoom;
  const context = canvas.getContext("2d", { willReadFrequently: true }), picture = known.get(`picture ${state.b}`);
  context.imageSmoothingEnabled = most > 64;
  if (picture) {
    const below = tints ? remember(`pale ${state.b} ${dark()}`, () => pale(picture)) : picture;
    context.drawImage(below, 0, 0, canvas.width, canvas.height);
  }
  if (tints) layTints(context, tints);
  context.scale(zoom, zoom);
  context.lineCap = "square";
  const along = (path, colour, weight) => {
    context.strokeStyle = colour;
    context.lineWidth = weight * line;
    context.stroke(path);
  };
  const soft = most > 64 ? (tints ? 0.8 : 0.5) : tints ? 0.8 : 0.22;
  const edge = tints ? (dark() ? `rgb(0 0 0 / ${soft})` : `rgb(255 255 255 / ${soft})`) : `rgb(128 128 128 / ${2 * soft})`;
  along(geometry().lines, edge, 1);
  for (const [id, colour, halo, weight] of marks) {
    along(outline(id), halo, weight + 3);
    along(outline(id), colour, weight);
  }
  drawTags(context, tints, width / shown);
}

function layTints(context, tints) {
  const [height, width] = P.examples[state.b].size, ids = labels(), layer = new OffscreenCanvas(width, height);
  const overlay = new ImageData(width, height);
  for (let k = 0; k < ids.length; k++) {
    const found = tints[ids[k]];
    if (found) overlay.data.set([found[0], found[1], found[2], 255 * found[3]], 4 * k);
  }
  layer.getContext("2d").putImageData(overlay, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(layer, 0, 0, context.canvas.width, context.canvas.height);
}

function drawTags(context, tints, unit) { // `unit`: pixels of the image per pixel of the screen
  if (tagOf(0) === null) return;
  const { spot, room, count } = geometry();
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineJoin = "round";
  for (let k = 0; k < D; k++) {
    const wide = (2 * room[k]) / unit, size = Math.max(9, Math.min(13, 0.75 * wide)), tag = tagOf(k);
    if (!count[k] || wide < LEAST_ROOM || tag.length * 0.62 * size > wide) continue;
    const strong = tints?.[k]?.[3] > 0.5;
    const ink = tints && (strong || dark()) ? "#fff" : tints ? "#222" : "#fff";
    context.font = `600 ${size * unit}px ${css("--font")}`;
    context.lineWidth = 2.6 * unit;
    context.strokeStyle = ink === "#fff" ? "rgb(0 0 0 / .55)" : "rgb(255 255 255 / .75)";
    context.strokeText(tag, ...spot[k]);
    context.fillStyle = ink;
    context.fillText(tag, ...spot[k]);
  }
}

function pale(picture) { // in grey, light or dark as the page, so that colours are seen on it
  const canvas = new OffscreenCanvas(picture.naturalWidth, picture.naturalHeight), context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const image = context.getImageData(0, 0, canvas.width, canvas.height), px = image.data;
  const much = Math.max(canvas.width, canvas.height) <= 64 ? 0.3 : 1; // of few pixels, each would shade a whole colour
  for (let k = 0; k < px.length; k += 4) {
    const grey = 0.3 * px[k] + 0.59 * px[k + 1] + 0.11 * px[k + 2];
    px[k] = px[k + 1] = px[k + 2] = dark() ? 14 + 0.36 * much * grey : 255 - 0.55 * much * (255 - grey);
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
  const [height, width] = P.examples[state.b].size;
  if (!$("map")) makePictures();
  const map = $("map"), list = others(state.i), limit = largest(list.map((p) => p.value)), tints = [], at = partner();
  for (const p of list.filter(visible)) tints[p.j] = tint(p.value / limit, p.faint);
  const marks = [...(at === state.i ? [] : [[at, "#111", "#fff", 2.2]]), [state.i, css("--mark"), "#111", 4]];
  paint(map, tints, marks);
  paint($("input"), null, marks);
  $("view").style.setProperty("--ratio", `${width} / ${height}`);
  map.setAttribute("aria-label", `Picture with ${D} ${P.words}. ${names()[state.i]} is chosen.`);
  Object.assign(map.dataset, { source: state.i, partner: at, held: state.held, limit, example: state.b });
  $("below").replaceChildren(ramp(limit, ["less together", "more together"], "Gold: chosen; black and white: its partner."));
  const p = pair(state.i, at);
  $("map-title").textContent = at === state.i ? names()[at] : `With ${names()[at]}: ${plusMinus(p.value, p.half)}`;
}

function makePictures() {
  const map = h("canvas", { id: "map", tabindex: 0, role: "application", "aria-describedby": "sentence" });
  const input = h("canvas", { id: "input", role: "img", "aria-label": "The input, with the chosen pair outlined" });
  for (const canvas of [map, input]) {
    canvas.addEventListener("pointermove", (e) => e.pointerType === "mouse" && look(segmentAt(e)));
    canvas.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && state.held && update({ j: null }));
    canvas.addEventListener("click", (e) => hold(segmentAt(e)));
  }
  map.addEventListener("keydown", steer);
  $("view").replaceChildren(h("div", { class: "pictures" },
    h("figure", {}, h("figcaption", { id: "map-title" }), withAxes(map)),
    h("figure", {}, h("figcaption", {}, "Input"), withAxes(input))), h("div", { id: "below" }));
}

function withAxes(canvas) { // a picture of few rows and columns has their numbers beside it
  const sides = gridOf();
  if (!sides || Math.max(...sides) > 32) return canvas;
  const every = Math.max(...sides) > 16 ? 4 : 1;
  const numbered = (count) => [...Array(count).keys()].map((k) => h("span", {}, k % every ? "" : String(k)));
  const [rows, columns] = sides.map((count) => h("div", { class: "numbers", "aria-hidden": "true" }, ...numbered(count)));
  return h("div", { class: "axes" }, h("i"), columns, rows, canvas);
}

function segmentAt(event) {
  const box = event.currentTarget.getBoundingClientRect(), [height, width] = P.examples[state.b].size;
  const cell = (part, count) => Math.max(0, Math.min(count - 1, Math.floor(part * count)));
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
