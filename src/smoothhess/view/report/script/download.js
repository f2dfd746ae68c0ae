/* The pairs as a CSV file, and the view as a PNG picture. */

const INK = { ink: "#1d1c1a", soft: "#5f5b56", line: "#d8d3cb", pos: "#b2182b", neg: "#2166ac", mark: "#ffc20a" };

function save(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function fileName(ending) {
  const words = P.examples.length > 1 ? `${P.title} ${P.examples[state.b].heading}` : P.title;
  return `${words.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 80) || "interactions"}.${ending}`;
}

/* A cell that begins with =, +, - or @ is taken for a formula by spreadsheets; numbers are not names. */
function csvCell(x) {
  if (typeof x === "number") return Number.isFinite(x) ? String(Number(x.toPrecision(7))) : "";
  const safe = /^[=+\-@\t\r]/.test(x) ? `'${x}` : x;
  return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

function csvText() {
  const head = ["first", "second", "i", "j", "extra_change", "low", "high", "q_value", "significant", "H", "H_stderr"];
  if (!P.derivative) head[4] = "interaction";
  const rows = everyPair().map((p) => [
    names()[p.i], names()[p.j], p.i, p.j, p.value, p.low, p.high, p.q, String(p.significant), p.perUnit,
    numbers().stderr[place(p.i, p.j)],
  ]);
  return `${[head, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n")}\r\n`;
}

const saveCsv = () => save(fileName("csv"), new Blob(["\ufeff", csvText()], { type: "text/csv" }));

/* A picture for a slide: the sentence, what is seen, the strongest partners with intervals, and how it was made. */
async function savePng() {
  const before = document.documentElement.dataset.theme, change = (name) => { theme(name); render(); };
  if (dark()) change("light"); // the picture is on white paper
  try {
    const canvas = await asPicture();
    canvas.toBlob((blob) => save(fileName("png"), blob));
  } finally {
    if (before === "dark") change(before);
  }
}

async function asPicture() {
  const width = 1400, canvas = h("canvas", { width, height: 1600 }), context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, canvas.height);
  const pen = (size, colour = INK.ink, weight = 400) => {
    context.font = `${weight} ${size}px ${css("--font")}`;
    context.fillStyle = colour;
  };
  pen(22, INK.soft);
  let y = wrap(context, P.title, 40, 52, width - 80, 28);
  pen(36, INK.ink, 500);
  y = wrap(context, $("sentence").firstChild.textContent, 40, y + 26, width - 80, 46);
  pen(21, INK.soft);
  y = wrap(context, `${$("chip").dataset.words} · ${$("sentence").lastChild.firstChild?.textContent ?? ""}`, 40, y + 4, width - 80, 28) + 18;
  const view = await viewAsCanvas(), room = view ? 700 : 0;
  let left = y;
  if (view) {
    const wide = Math.min(room, view.width), high = (view.height / view.width) * wide;
    context.drawImage(view, 40, y, wide, high);
    left = y + high;
  }
  const bottom = partnersAsPicture(context, pen, view ? 790 : 40, y, view ? width - 830 : width - 80);
  pen(17, INK.soft);
  const made = Object.fromEntries(P.made[state.s][state.b]);
  const source = [made.Model, made.Date, made.Noise ?? made.Method, made["Made with"]].filter(Boolean).join(" · ");
  const end = wrap(context, source, 40, Math.max(left, bottom) + 40, width - 80, 24);
  const last = wrap(context, P.limits, 40, end, width - 80, 24);
  const cut = h("canvas", { width, height: Math.min(canvas.height, Math.ceil(last)) });
  cut.getContext("2d").drawImage(canvas, 0, 0);
  return cut;
}

function wrap(context, words, x, y, width, step) { // returns the base line of the line after
  let line = "";
  for (const word of words.split(" ")) {
    if (line && context.measureText(`${line} ${word}`).width > width) {
      context.fillText(line, x, y);
      [line, y] = [word, y + step];
    } else line = line ? `${line} ${word}` : word;
  }
  context.fillText(line, x, y);
  return y + step;
}

function partnersAsPicture(context, pen, x, y, width) {
  const list = others(state.i).filter(visible).slice(0, 14), limit = largest(list.flatMap((p) => [p.low, p.high, p.value])), e = listed(limit);
  pen(22, INK.ink, 600);
  y = wrap(context, $("partners-title").firstChild.textContent, x, y + 20, width, 28);
  pen(17, INK.soft);
  context.fillText($("partners-hint").textContent, x, y, width);
  const middle = x + 0.52 * width, reach = 0.2 * width, at = (v) => middle + reach * Math.max(-1, Math.min(1, v / limit));
  for (const p of list) {
    y += 38;
    context.globalAlpha = p.faint ? 0.45 : 1;
    pen(19);
    context.fillText(short(`${tagOf(p.j) && P.kind === "series" ? `${tagOf(p.j)}: ` : ""}${names()[p.j]}`, 30), x, y, 0.31 * width);
    context.textAlign = "right";
    context.fillText(plusMinus(p.value, p.half, true, e), x + width, y, 0.26 * width);
    context.textAlign = "left";
    context.fillStyle = p.value > 0 ? INK.pos : INK.neg;
    context.fillRect(Math.min(middle, at(p.value)), y - 14, Math.abs(at(p.value) - middle), 14);
    context.fillStyle = INK.ink;
    if (p.half > 0 && Number.isFinite(p.half)) context.fillRect(at(p.low), y - 8, at(p.high) - at(p.low), 2);
    context.globalAlpha = 1;
    context.fillStyle = INK.soft;
    context.fillRect(middle, y - 22, 1, 30);
  }
  return y;
}

async function viewAsCanvas() { // what is on the left of the page; null for a table
  if (P.kind === "image") {
    const both = h("canvas", { width: 700, height: 350 }), [height, width] = P.examples[state.b].size;
    both.height = Math.round((340 * height) / width);
    for (const [k, id] of ["map", "input"].entries()) both.getContext("2d").drawImage($(id), 360 * k, 0, 340, both.height);
    return both;
  }
  if (P.kind === "series") return svgAsCanvas($("chart"));
  return P.kind === "text" && D <= 120 ? tokensAsCanvas() : null;
}

function svgAsCanvas(chart) { // styles come from the page: they are written into a copy of the picture
  const copy = chart.cloneNode(true), before = chart.querySelectorAll("*"), after = copy.querySelectorAll("*");
  const kept = ["fill", "stroke", "stroke-width", "fill-opacity", "font-size", "font-family", "font-weight", "text-anchor"];
  before.forEach((element, k) => {
    const found = getComputedStyle(element);
    after[k].setAttribute("style", kept.map((name) => `${name}:${found.getPropertyValue(name)}`).join(";"));
  });
  const { width, height } = chart.viewBox.baseVal;
  for (const [name, value] of [["xmlns", SVG], ["width", width], ["height", height]]) copy.setAttribute(name, value);
  const picture = new Image(), canvas = h("canvas", { width: 2 * width, height: 2 * height });
  return new Promise((done) => {
    picture.onload = () => {
      canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
      done(canvas);
    };
    picture.onerror = () => done(null);
    picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  });
}

function tokensAsCanvas() { // the tokens in lines, and behind them the arcs of the page
  const canvas = h("canvas", { width: 1400 }), context = canvas.getContext("2d"), font = `34px ${css("--font")}`;
  const all = tokens(), half = 28, lift = 27, boxes = [];
  let x = 0, y = 0;
  context.font = font;
  for (const [letters, gap] of P.examples[state.b].tokens) {
    const width = context.measureText(letters).width + 20;
    x += gap ? 12 : 3;
    if (x + width > 1390 || gap === "\n") [x, y] = [0, y + 2 * half + lift];
    boxes.push({ x: x + width / 2, y, half, width });
    x += width;
  }
  const pairs = arcPairs(), wide = y === 0 && pairs.length ? boxes.at(-1).x - boxes[0].x : 0, top = half + (wide ? 4 : 1.5) * lift;
  for (const box of boxes) box.y += top;
  canvas.height = top + y + half + 40; // which resets the font
  context.font = font;
  for (const p of pairs) {
    const [a, b] = [boxes[Math.min(p.i, p.j)], boxes[Math.max(p.i, p.j)]];
    context.globalAlpha = isOwn(p) ? 1 : 0.38;
    context.strokeStyle = p.value > 0 ? INK.pos : INK.neg;
    context.lineWidth = 1.5 + (3 * Math.abs(p.value)) / largest(pairs.map((pair) => pair.value));
    context.stroke(new Path2D(a.y === b.y ? over(a, b, lift, wide) : across(a, b, lift)));
  }
  context.globalAlpha = 1;
  P.examples[state.b].tokens.forEach(([letters], k) => {
    const box = boxes[k], colour = all[k].style.getPropertyValue("--tint"), at = partner();
    const place = [box.x - box.width / 2, box.y - half, box.width, 2 * half];
    for (const fill of ["#ffffff", k === state.i ? INK.mark : colour]) {
      context.fillStyle = fill;
      context.fillRect(...place);
    }
    context.strokeStyle = k === at ? INK.ink : INK.line;
    context.lineWidth = k === at ? 4 : 1;
    context.strokeRect(...place);
    const white = k !== state.i && readsBetter(colour.match(/[\d.]+/g).map(Number), "#ffffff", INK.ink);
    context.fillStyle = white ? "#ffffff" : INK.ink;
    context.fillText(letters, place[0] + 10, box.y + 12);
  });
  return canvas;
}
