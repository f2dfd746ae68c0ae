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
const plain = (name) => name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); // Plotly reads tags
const noise = () => (P.exact ? "" : " Faint: within noise, |z|\u2060\u00a0<\u00a02.");

function unitWords() {
  if (P.gates) {
    const gate = P.word === "group" ? "every gate of each group" : "each gate";
    return state.unit === "unit" ? `per unit of ${gate}` : `${gate} moved by its σ`;
  }
  if (P.directed) return "both moved along the given direction";
  const inner = { segment: "pixel", window: "sample", group: "feature" }[P.word];
  const every = inner ? ` in every ${inner}` : "";
  if (state.unit === "unit") return `for one unit of each${every}`;
  const moves = numbers().move.filter((m) => m > 0), same = moves.every((m) => Math.abs(m - moves[0]) <= 1e-6 * m);
  return `each moved by its σ${same && moves.length ? ` of ${text(moves[0], false)}` : ""}${every}`;
}

function saying(p, clear) { // the sentence on a pair, as nodes
  const name = (k) => h("b", { class: names()[k].length < 24 ? "whole" : null }, names()[k]);
  const amount = h("b", { class: p.value > 0 ? "more" : "less" }, plusMinus(Math.abs(p.value), p.half, false));
  const unsure = h("b", {}, plusMinus(p.value, p.half)), up = p.value > 0;
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
  return [both, name(p.i), " and ", name(p.j), " together ", up ? "raises " : "lowers ",
    output(), up ? " beyond" : " below", " their separate effects by ", amount, "."];
}

function sentence(p) {
  const two = p.i !== p.j, clear = P.exact || p.significant || (!two && !p.faint);
  const facts = [P.derivative ? cap(unitWords()) : "An attribution, not a derivative"];
  if (!P.exact) facts.push(`${percent} interval ${interval(p.low, p.high)}`);
  if (!P.exact && two) {
    facts.push(`q ${p.q < 1e-4 ? "" : "= "}${qText(p.q)}, ${p.significant ? "significant" : "not significant"}`);
    if (!p.significant && p.low * p.high > 0) {
      facts.push(`its interval excludes zero, but among ${everyPair().length} pairs some do so by chance`);
    }
  }
  if (P.derivative) {
    const { value, half } = slope(p.i);
    facts.push(`by itself ${quoted(p.i)} changes it by ${plusMinus(value, half)}`);
  }
  const still = [p.i, p.j].some((k) => numbers().still.has(k));
  const sign = !clear || p.value === 0 ? "none" : p.value > 0 ? "more" : "less";
  Object.assign($("sentence").dataset, { sign, i: p.i, j: p.j, value: p.value, low: p.low, high: p.high });
  $("sentence").replaceChildren(
    h("p", {}, ...saying(p, clear)), h("p", { class: "small" }, still ? "" : `${facts.join(" · ")}.`));
}
