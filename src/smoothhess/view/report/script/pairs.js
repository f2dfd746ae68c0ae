/* The table of all pairs: sorted, filtered, chosen from. */

const MORE = 50; // rows, each time
const ASIDE = ["interval", "effect", "significant"]; // columns that a narrow screen has no room for
const COLUMNS = {
  name: ["Pair", (p) => `${names()[p.i]} × ${names()[p.j]}`],
  value: [P.derivative ? "Value H" : "Interaction", (p) => p.perUnit],
  interval: [`${percent} interval${P.derivative ? " of H" : ""}`, (p) => p.reach],
  ...(P.derivative && !P.directed ? { effect: ["Effect", (p) => Math.abs(p.effect)] } : {}),
  q: ["q-value", (p) => p.q],
  significant: ["Significant", (p) => Number(p.significant)],
};

function renderPairs(panel) {
  if (!$("pairs")) makePairs(panel);
  const list = sortedPairs(), shown = list.slice(0, state.rows);
  const ofValue = listed(largest(shown.map((p) => p.perUnit))), ofEffect = listed(largest(shown.map((p) => p.effect)));
  pairsHead({ value: ofValue.e, interval: ofValue.e, effect: ofEffect.e });
  const focused = focusedIn("panel")?.pair, rows = shown.map((p) => pairRow(p, ofValue, ofEffect));
  $("pairs").tBodies[0].replaceChildren(...rows);
  if (focused) rows.find((row) => row.dataset.pair === focused)?.focus({ preventScroll: true });
  const unit = !P.derivative ? "Attributions, not derivatives." : P.directed ? `H: ${unitWords()}.`
    : `H: per unit of each${P.gates ? " gate" : ""}; effect: each moved by its σ, in units of the output.`;
  const count = `${list.length} pair${list.length === 1 ? "" : "s"}`;
  const order = state.sort ? "" : `, strongest first${byRank()}`;
  $("pairs-hint").textContent = `${count}${order}. ${unit}`;
  $("more-pairs").hidden = list.length <= state.rows;
  $("more-pairs").textContent = `Show ${Math.min(MORE, list.length - state.rows)} more`;
}

function makePairs(panel) {
  const search = h("input", {
    type: "search", placeholder: "Only names with …", "aria-label": "Only pairs with these letters in a name",
    value: state.filter, oninput: (e) => update({ filter: e.target.value, rows: 10 }),
  });
  const body = h("tbody", { onkeydown: (e) => walk(e, body, "tr") });
  const more = () => update({ rows: state.rows + MORE });
  panel.replaceChildren(
    h("div", { class: "tools" }, search, h("span", { class: "hint", id: "pairs-hint" })),
    h("div", { class: "scroll" }, h("table", { id: "pairs" }, h("thead", {}, h("tr", {})), body)),
    h("button", { type: "button", class: "quiet", id: "more-pairs", onclick: more }));
}

function sortedPairs() {
  const letters = state.filter.toLowerCase(), way = state.down ? -1 : 1;
  const named = (p) => !letters || COLUMNS.name[1](p).toLowerCase().includes(letters);
  const list = everyPair().filter((p) => visible(p) && named(p));
  if (!state.sort) return list;
  const [, key] = COLUMNS[state.sort];
  return list.sort((a, b) => way * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
}

function pairsHead(tens) {
  const focused = focusedIn("panel")?.column;
  $("pairs").tHead.rows[0].replaceChildren(...Object.entries(COLUMNS).map(([name, [words]]) => {
    const on = name === state.sort, arrow = on ? (state.down ? " ↓" : " ↑") : "";
    const sort = () => update(on ? { down: !state.down } : { sort: name, down: name !== "name" && name !== "q" });
    const button = h("button", { type: "button", "data-column": name, onclick: sort },
      `${words}${tens[name] ? `, ${ten(tens[name])}` : ""}${arrow}`);
    const order = on ? (state.down ? "descending" : "ascending") : null;
    return h("th", { scope: "col", "aria-sort": order, class: ASIDE.includes(name) && "aside" }, button);
  }));
  if (focused) $("pairs").querySelector(`[data-column="${focused}"]`).focus({ preventScroll: true });
}

function pairRow(p, ofValue, ofEffect) {
  const at = partner(), on = (p.i === state.i && p.j === at) || (p.j === state.i && p.i === at);
  const choose = () => update({ i: p.i, j: p.j, held: true });
  const press = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    choose();
  };
  const sampled = (words) => (P.exact ? "–" : words), cells = {
    name: COLUMNS.name[1](p), value: text(p.perUnit, true, ofValue), effect: text(p.effect, true, ofEffect),
    interval: sampled(interval(p.perUnit - p.reach, p.perUnit + p.reach, ofValue)),
    q: sampled(qText(p.q)), significant: sampled(p.significant ? "yes" : "no"),
  };
  const colour = p.value > 0 ? "more" : p.value < 0 ? "less" : null;
  const look = (name) => (name === "value" ? colour : ASIDE.includes(name) && "aside");
  return h("tr", {
    tabindex: 0, "aria-selected": String(on), onclick: choose, onkeydown: press,
    "data-pair": `${p.i},${p.j}`, "data-value": p.perUnit, "data-effect": p.effect, "data-q": p.q,
  }, ...Object.keys(COLUMNS).map((name) => h("td", { class: look(name) }, cells[name])));
}
