/* Numbers and pairs in words. */

const SUPERSCRIPT = Object.fromEntries([..."0123456789−"].map((c, k) => [c, "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"[k]]));
const minus = (text) => text.replace(/-/g, "−");
const ten = (e) => `10${[...minus(String(e))].map((c) => SUPERSCRIPT[c]).join("")}`;
const power = (e) => (e ? `\u00a0×\u00a0${ten(e)}` : "");
const magnitude = (x) => (x ? Math.floor(Math.log10(Math.abs(x))) : 0);

function exponent(size) { // numbers too small or too large to write out share a power of ten
  const e = magnitude(size);
  return e < -3 || e > 5 ? e : 0;
}

/* In lists the power of ten `e` is written once, at their head; beside the largest number `most` of a list further
   digits of small ones say nothing. */
function listed(most) {
  const e = magnitude(most);
  return { e: e < -1 ? Math.min(e, -3) : e > 5 ? e : 0, most };
}
const places = ({ e, most }) => 3 - magnitude(most / 10 ** e);

function text(x, signed = true, list = null) { // to three digits
  if (x === null || Number.isNaN(x)) return "unknown";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const e = list ? list.e : exponent(x), y = x / 10 ** e;
  const digits = Math.max(0, Math.min(6, 2 - magnitude(y), list ? places(list) : 6));
  return (signed && x > 0 ? "+" : "") + minus(y === 0 ? "0" : y.toFixed(digits)) + (list ? "" : power(e));
}

function plusMinus(value, half, signed = true, list = null) { // half to two digits, value to four at most
  if (half === 0) return text(value, signed, list);
  if (!Number.isFinite(half)) return `${text(value, signed, list)} ± ?`;
  const e = list ? list.e : exponent(Math.max(Math.abs(value), half)), v = value / 10 ** e, h = half / 10 ** e;
  const digits = Math.max(0, Math.min(6, 1 - magnitude(h), v ? 3 - magnitude(v) : 6, list ? places(list) : 6));
  const rest = Number(h.toFixed(digits)) ? `\u00a0±\u00a0${h.toFixed(digits)}` : "";
  const body = `${signed && value > 0 ? "+" : ""}${minus(v.toFixed(digits))}${rest}`;
  if (list || !e) return body;
  return (rest ? `(${body})` : body) + power(e);
}

function interval(low, high, list = null) {
  return Number.isFinite(low + high) ? `${text(low, true, list)} to ${text(high, true, list)}` : "unknown";
}

function qText(q) {
  if (Number.isNaN(q)) return "–";
  return q < 1e-4 ? "< 0.0001" : q > 0.995 ? "1" : q.toPrecision(2);
}

const quoted = (k) => (P.kind === "text" ? `“${names()[k]}”` : names()[k]);
const percent = `${Math.round(P.level * 100)}\u00a0%`;
const output = () => P.examples[state.b].output;
const cap = (word) => word[0].toUpperCase() + word.slice(1);
const short = (name, most = 28) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);
const noise = () => (P.exact ? "" : " Faint: within noise.");
const counted = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f");

function unitWords() {
  if (P.gates) {
    const gate = P.word === "group" ? "every gate of each group" : "each gate";
    return state.unit === "unit" ? `per unit of ${gate}` : `${gate} moved by its σ`;
  }
  if (P.directed) return "both moved along the given direction";
  const every = P.part ? ` in every ${P.part}` : "";
  if (state.unit === "unit") return `for one unit of each${every}`;
  const moves = numbers().move.filter((m) => m > 0), same = moves.every((m) => Math.abs(m - moves[0]) <= 1e-6 * m);
  return `each moved by its σ${same && moves.length ? ` of ${text(moves[0], false)}` : ""}${every}`;
}

function saying(p, clear) { // the sentence on a pair, as nodes
  const name = (k) => h("b", { class: names()[k].length < 24 ? "whole" : null }, quoted(k));
  const amount = h("b", { class: `whole ${p.value > 0 ? "more" : "less"}` }, plusMinus(Math.abs(p.value), p.half, false));
  const unsure = h("b", { class: "whole" }, plusMinus(p.value, p.half)), up = p.value > 0;
  const still = [p.i, p.j].find((k) => numbers().still.has(k));
  if (still !== undefined) return [name(still), " has no noise, so there is no estimate for it."];
  if (!P.derivative) return ["The interaction of ", name(p.i), " and ", name(p.j), " is ", unsure, "."];
  const as = P.gates ? "As the gate of " : "As ", zero = p.value === 0 && p.half === 0;
  if (p.i === p.j) {
    if (zero && P.exact) return [as, name(p.i), " rises by itself, ", output(), " does not bend: exactly 0."];
    if (zero) return ["No draw shows ", output(), " bending as ", name(p.i), " rises by itself: 0."];
    if (!clear) return ["The sign of the curvature of ", output(), " along ", name(p.i), " is uncertain: ", unsure, "."];
    const bends = up ? " bends upwards by " : " bends downwards by ";
    return [as, name(p.i), " rises by itself, ", output(), bends, amount, "."];
  }
  if (zero && P.exact) return [name(p.i), " and ", name(p.j), " do not act together here: exactly 0."];
  if (zero) return ["No draw shows ", name(p.i), " and ", name(p.j), " acting together: 0."];
  if (!clear) {
    return ["The interaction of ", name(p.i), " and ", name(p.j), " is not significant: ", unsure, "."];
  }
  const both = P.gates ? "Raising the gates of " : P.directed ? "Moving " : "Raising ";
  return [both, name(p.i), " and ", name(p.j), " together puts ", output(), up ? " above" : " below",
    " the sum of their separate effects, by ", amount, "."];
}

const sentenceHelp = (p) => [
  P.derivative ? `The number is the extra change: the change when both move, less the changes when each moves by itself. ${
    p.i === p.j ? "" : `${alone(p.i)}; ${alone(p.j)}.`}`
    : "The number is an attribution, not a derivative: what a difference of one unit does is not known from it.",
  ...(P.exact ? ["It is exact: nothing was sampled."] : [
    `± is half of the ${percent} interval: the sampling error of this number, not the truth of the network.`,
    "Significant: among the pairs that are marked so, about "
      + `${100 * P.q}\u00a0% at most are expected to be zero (the q-value counts how many pairs were compared).`,
  ]),
  ...(P.gates ? [`The gate of a ${P.word} is 1 where the ${P.word} is present, and 0 at the baseline.`] : []),
  ...(P.noise[state.s] ? [P.noise[state.s]] : []),
];
function shareText(x) { // as smoothhess.result.effect_sizes.share_text
  if (x >= 1000) return "over 1000 times";
  if (x >= 2) return `${x < 10 ? Number(x.toPrecision(2)) : Math.round(x)} times`;
  if (x > 0 && x < 1e-4) return "under 0.01\u00a0%";
  return `${x < 0.1 ? Number((100 * x).toPrecision(2)) : Math.round(100 * x)}\u00a0%`;
}

function sizeWord(...shares) { // of the smaller share
  const share = Math.min(...shares.filter((x) => !Number.isNaN(x)));
  return share ? P.sizes.find(([limit]) => limit === null || share < limit)[1] : "none";
}

function sizeOf(p) { // the size of a pair in words, as smoothhess.result.effect_sizes.size_sentence
  const { separate, spread, move } = numbers();
  if (!separate || p.i === p.j) return null;
  const both = Math.sqrt(separate[p.i] + separate[p.j]), effect = Math.abs(p.effect);
  const most = effect + p.reach * move[p.i] * move[p.j], unsure = p.low <= 0 && p.high >= 0;
  const share = (x, whole) => (x === 0 ? 0 : whole === null ? NaN : x / whole);
  if (!Number.isFinite(most)) return null;
  const word = (x) => sizeWord(share(x, both), share(x, spread)), alone = share(effect, both), facts = [];
  if (Number.isFinite(alone)) {
    facts.push(`${shareText(alone)} ${alone < 2 ? "of " : ""}their separate effects`);
  }
  if (spread !== null) facts.push(`${shareText(share(effect, spread))} of the output’s change`);
  return `${facts.join(" and ")} (${unsure && most ? `at most ${word(most)}` : word(effect)})`;
}

function sentence(p) {
  const two = p.i !== p.j, clear = P.exact || p.significant || (!two && !p.faint);
  const sign = !clear || p.value === 0 ? "none" : p.value > 0 ? "more" : "less";
  Object.assign($("sentence").dataset, { sign, i: p.i, j: p.j, value: p.value, low: p.low, high: p.high });
  $("sentence").replaceChildren(...sentenceParts(p, clear));
  keepRoom($("sentence"), longestSentences);
}

function sentenceParts(p, clear) {
  const facts = factsOf(p), still = [p.i, p.j].some((k) => numbers().still.has(k));
  const small = still ? [] : [`${cap(facts.join(" · "))}.`, help("the sentence", sentenceHelp(p))];
  return [h("p", {}, ...saying(p, clear)), h("p", { class: "small" }, ...small)];
}

function factsOf(p) { // below the sentence: rank, units, size and significance
  const two = p.i !== p.j, all = two ? everyPair() : [], facts = [];
  if (two && all.length > 1 && all[0].i === Math.min(p.i, p.j) && all[0].j === Math.max(p.i, p.j)) {
    facts.push(`The strongest of ${counted(all.length)} pairs`);
  }
  facts.push(P.derivative ? unitWords() : "an attribution, not a derivative");
  const size = sizeOf(p);
  if (size) facts.push(size);
  if (!P.exact && two) {
    facts.push(`${p.significant ? "significant" : "not significant"} (q ${p.q < 1e-4 ? "" : "= "}${qText(p.q)})`);
    if (!p.significant && p.low * p.high > 0) {
      facts.push(`its interval excludes zero, but among ${counted(all.length)} pairs some do so by chance`);
    }
  }
  return facts;
}

const CANDIDATES = 100; // pairs whose sentences are compared to reserve room

function longestSentences() { // the sentence and the facts of the most words, of pairs from all over the list
  const all = everyPair(), step = Math.max(1, all.length / CANDIDATES), found = [];
  for (let k = 0; k < all.length; k += step) {
    const p = all[Math.floor(k)];
    found.push(sentenceParts(p, P.exact || p.significant));
  }
  const most = (k) => found.map((parts) => parts[k]).reduce((a, b) => (b.textContent.length > a.textContent.length ? b : a));
  return found.length ? [most(0), most(1)] : [];
}

function alone(k) {
  const { value, half } = slope(k);
  return `${quoted(k)} by itself changes ${output()} by ${plusMinus(value, half)}`;
}
