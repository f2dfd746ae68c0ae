/* The whole matrix as a heat map. */

const NAMED = 40; // names that fit on an axis

function renderMatrix(panel) {
  if (!$("matrix")) makeMatrix(panel);
  $("matrix-hint").replaceChildren(...matrixWords().map((words) => h("p", {}, words)));
  const chart = $("matrix"), shown = inMatrix(), room = chart.parentElement.clientWidth, narrow = room < 560;
  const { names: labelled, margin } = matrixNames(shown, narrow);
  const side = Math.max(160, Math.min(narrow ? room : 0.66 * room, labelled?.length > 24 ? 760 : 620)), inner = side - margin - 2;
  const cell = inner / shown.length, canvas = chart.querySelector("canvas");
  const limit = paintMatrix(canvas, { shown, side, margin, cell });
  Object.assign(chart.dataset, { limit, side, margin, cell, count: shown.length, ready: "yes" });
  if (labelled) nameMatrix(canvas, labelled, margin, cell);
  boxCells(canvas, shown, margin, cell);
}

function makeMatrix(panel) {
  const canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": "Matrix of all pairs; move with the arrow keys" });
  canvas.addEventListener("pointermove", (e) => e.pointerType === "mouse" && cellAt(e, (i, j) => sentence(pair(i, j))));
  canvas.addEventListener("pointerleave", () => sentence(pair(state.i, partner())));
  canvas.addEventListener("click", (e) => cellAt(e, (i, j) => update({ i, j, held: true })));
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!way) return;
    event.preventDefault();
    const shown = inMatrix(), within = (k) => shown[Math.max(0, Math.min(shown.length - 1, k))];
    update({ i: within(shown.indexOf(state.i) + way[0]), j: within(shown.indexOf(partner()) + way[1]), held: true });
  });
  panel.replaceChildren(h("div", { class: "beside" }, h("div", { id: "matrix" }, canvas),
    h("div", { class: "hint", id: "matrix-hint" })));
}

function cellAt(event, act) {
  const { margin, cell, side } = $("matrix").dataset, box = event.currentTarget.getBoundingClientRect(), shown = inMatrix();
  const scale = side / box.width, index = (x) => Math.floor((x * scale - margin) / cell);
  const [column, row] = [index(event.clientX - box.left), index(event.clientY - box.top)];
  if (row >= 0 && column >= 0 && row < shown.length && column < shown.length) act(shown[row], shown[column]);
}

function paintMatrix(canvas, { shown, side, margin, cell }) {
  const sharp = Math.max(2, devicePixelRatio), context = canvas.getContext("2d", { willReadFrequently: true });
  canvas.width = canvas.height = Math.round(side * sharp);
  canvas.style.width = canvas.style.height = `${side}px`;
  context.scale(sharp, sharp);
  const all = shown.map((i) => shown.map((j) => pair(i, j))), gap = cell > 6 ? 1 : 0;
  const limit = largest(all.flat().filter((p) => p.i !== p.j && visible(p) && p.moves).map((p) => p.value)); // not of the diagonal
  context.fillStyle = css("--well");
  context.fillRect(margin, margin, cell * shown.length, cell * shown.length);
  all.forEach((row, r) => row.forEach((p, c) => {
    if (!visible(p) || !p.moves) return;
    const at = [margin + c * cell, margin + r * cell, cell - gap, cell - gap];
    context.fillStyle = css("--middle");
    context.fillRect(...at);
    context.globalAlpha = Math.min(1, Math.abs(p.value) / limit) * (p.faint ? FAINT : 1);
    context.fillStyle = css(colourOf(p.value));
    context.fillRect(...at);
    context.globalAlpha = 1;
  }));
  return limit;
}

function matrixNames(shown, narrow) { // the names beside the rows and columns, and the room for them
  if (P.word === "pixel") {
    const width = P.examples[state.b].size[1], rows = D / width;
    return { names: rows <= 32 ? [...Array(rows).keys()].map((row) => [(row + 0.5) * width, `row ${row}`]) : null, margin: 44 };
  }
  if (narrow || shown.length > NAMED) return { names: null, margin: 4 };
  const texts = shown.map((k, n) => [n + 0.5, short(names()[k], 24)]), longest = Math.max(...texts.map(([, name]) => name.length));
  return { names: texts, margin: Math.min(170, 14 + 6 * longest) };
}

function nameMatrix(canvas, labelled, margin, cell) {
  const context = canvas.getContext("2d"), size = Math.max(8, Math.min(12, 0.85 * cell * (P.word === "pixel" ? 9 : 1)));
  context.fillStyle = css("--soft");
  context.font = `${size}px ${css("--font")}`;
  context.textBaseline = "middle";
  for (const [at, name] of labelled) {
    context.textAlign = "right";
    context.fillText(name, margin - 6, margin + at * cell, margin - 8);
    context.save();
    context.translate(margin + at * cell, margin - 6);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(name, 0, 0, margin - 8);
    context.restore();
  }
}

function boxCells(canvas, shown, margin, cell) { // the chosen pair, above and below the diagonal
  const context = canvas.getContext("2d"), row = shown.indexOf(state.i), column = shown.indexOf(partner());
  if (row < 0 || column < 0) return;
  for (const [r, c] of [[row, column], [column, row]]) {
    context.lineWidth = 3.5;
    context.strokeStyle = css("--mark");
    context.strokeRect(margin + c * cell - 1, margin + r * cell - 1, cell + 1, cell + 1);
    context.lineWidth = 1.2;
    context.strokeStyle = css("--ink");
    context.strokeRect(margin + c * cell - 3, margin + r * cell - 3, cell + 5, cell + 5);
  }
}

function matrixWords() {
  const signed = P.derivative
    ? `Red: moved together, the two put ${output()} above the sum of their separate effects; blue: below.`
    : "Red: the interaction is positive; blue: it is negative.";
  const colours = state.mode === "magnitude" ? "The stronger the colour, the larger; signs are left out." : signed;
  const alone = P.derivative ? `each ${P.word} by itself` : `each ${P.word} with itself`;
  const order = P.word === "pixel" ? " Pixels go row by row." : "";
  const part = inMatrix().length, strongest = `The ${part} of ${D} ${P.words} in the strongest pairs`;
  const which = part === D ? "Every pair at once" : strongest;
  return [
    `${which}. ${colours}${order}`,
    `The diagonal is ${alone}, in the colour of the largest pair where it is larger.${noise()}${numbers().still.size ? " Empty: no noise." : ""}`,
    "The boxed cells are the pair of the sentence. Point at a cell to read it, click to choose it.",
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
