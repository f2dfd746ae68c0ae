/* What is looked at, and the numbers of it.

   The scripts of this folder are put one after the other into one function: they share their names and nothing else
   sees them. Names and titles are the user's text: they enter the page as text nodes only. Numbers of pairs,
   their order, their intervals and the error in the chip are those of one estimate, the unbiased one. */

const $ = (id) => document.getElementById(id);
const P = JSON.parse($("payload").textContent);
const D = P.examples[0].names.length;
const names = () => P.examples[state.b].names;
const FEW = 16; // partners in the list at first
const NOISE = 2, FAINT = 0.25; // |z| below which a number is within noise, and how visible it then is

const state = {
  b: 0, // example
  s: P.start, // scale of the sweep
  i: 0, // the feature that was chosen
  j: null, // its partner; null: its strongest
  held: false, // whether i stays while the mouse moves
  mode: "signed", // or "magnitude"
  only: false, // significant pairs alone
  unit: P.derivative && !P.gates ? "effect" : "unit", // each feature moves by its σ, or by 1
  paint: "pairs", // or "alone": what the colours of a text show
  tab: "pairs", direction: 0, all: false,
  sort: null, down: true, filter: "", rows: 10, // of the table of pairs; null: as top_pairs ranks
};

const known = new Map();

function remember(key, make) {
  if (!known.has(key)) known.set(key, make());
  return known.get(key);
}

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
const floats = (text) => new Float32Array(bytes(text));

function numbers(s = state.s, b = state.b) {
  return remember(`numbers ${s} ${b}`, () => {
    const n = P.results[s][b];
    return {
      value: floats(n.value), stderr: floats(n.stderr), q: floats(n.q),
      separate: n.separate && floats(n.separate), spread: n.spread,
      width: n.width ?? Infinity, slope: floats(n.slope), slopeError: floats(n.slope_stderr),
      slopeWidth: n.slope_width ?? Infinity, move: floats(n.move), still: new Set(n.still),
      smoothed: n.smoothed, quality: n.quality, chip: n.chip,
      eigenvalues: n.eigen.values, shares: n.eigen.shares, vectors: floats(n.eigen.vectors),
      directionsDenoised: n.eigen.denoised,
    };
  });
}

function labels(b = state.b) { // the feature that each place of an image or a series belongs to
  return remember(`labels ${b}`, () => {
    const example = P.examples[b], runs = new Uint32Array(bytes(example.labels));
    const ids = new Uint32Array(P.kind === "image" ? example.size[0] * example.size[1] : example.times.length);
    for (let k = 0, at = 0; k < runs.length; at += runs[k], k += 2) ids.fill(runs[k + 1], at, at + runs[k]);
    return ids;
  });
}

// Triangles are packed row by row: row i begins after the d, d − 1, … numbers of the rows above it.
const place = (i, j) => (i <= j ? i * D - (i * (i - 1)) / 2 + j - i : place(j, i));

function pair(i, j, s = state.s) {
  const n = numbers(s), k = place(i, j), moves = n.move[i] * n.move[j], size = state.unit === "effect" ? moves : 1;
  const value = n.value[k] * size, stderr = n.stderr[k] * size, half = stderr > 0 ? n.width * stderr : 0;
  return {
    i, j, value, stderr, half, low: value - half, high: value + half, q: n.q[k],
    perUnit: n.value[k], reach: n.stderr[k] > 0 ? n.width * n.stderr[k] : 0, effect: n.value[k] * moves,
    rank: Math.abs(n.value[k] * moves), // as top_pairs ranks
    significant: n.q[k] <= P.q, faint: value === 0 || !(Math.abs(value) >= Math.max(NOISE * stderr, half)), moves: moves > 0,
  };
}

const shownNumbers = () => [state.s, state.b, state.unit].join(" ");
const visible = (p) => !state.only || p.significant;
const stronger = (a, b) => b.rank - a.rank;

let latest = { key: "", list: [] };
function others(i) { // the pairs of feature i, strongest first
  const key = `${i} ${shownNumbers()}`;
  if (latest.key === key) return latest.list;
  const list = [];
  for (let j = 0; j < D; j++) if (j !== i) list.push(pair(i, j));
  latest = { key, list: list.filter((p) => p.moves).sort(stronger) };
  return latest.list;
}

function everyPair() {
  return remember(`pairs ${shownNumbers()}`, () => {
    const list = [];
    for (let i = 0; i < D; i++) for (let j = i + 1; j < D; j++) list.push(pair(i, j));
    return list.filter((p) => p.moves).sort(stronger);
  });
}

function slope(k) { // what feature k does by itself
  const n = numbers(), size = state.unit === "effect" ? n.move[k] : 1;
  const value = n.slope[k] * size, stderr = n.slopeError[k] * size;
  return { value, half: stderr > 0 ? n.slopeWidth * stderr : 0, faint: !(Math.abs(value) >= NOISE * stderr) };
}

const unknown = () => !P.exact && numbers().width === Infinity; // so few draws that there are no intervals
const partner = () => state.j ?? others(state.i)[0]?.j ?? state.i;
const sized = (x) => (state.mode === "magnitude" ? Math.abs(x) : x);

function largest(list) {
  return list.reduce((most, x) => (Number.isFinite(x) ? Math.max(most, Math.abs(x)) : most), 0) || 1;
}
