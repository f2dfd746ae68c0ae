/* The table of all pairs: sorted, filtered, chosen from. */

const MORE = 50; // rows, each time
const ASIDE = ["value", "q", "significant"]; // columns that a narrow screen has no room for

function columns() { // heading, and the number that sorts
  const perUnit = P.derivative && !P.directed && state.unit === "effect";
  return {
    name: ["Pair", (p) => `${names()[p.i]} × ${names()[p.j]}`],
    amount: [P.derivative ? "Extra change" : "Interaction", (p) => p.value],
    ...(perUnit ? { value: [`H, per unit${P.gates ? " of each gate" : ""}`, (p) => p.perUnit] } : {}),
    ...(P.exact ? {} : { q: ["q-value", (p) => p.q], significant: ["Significant", (p) => Number(p.significant)] }),
  };
}

function renderPairs(panel) {
  if (!$("pairs")) makePairs(panel);
  if (state.sort && !columns()[state.sort]) state.sort = null;
  const list = sortedPairs(), shown = list.slice(0, state.rows);
  const ofAmount = listed(largest(shown.flatMap((p) => [p.value, p.low, p.high])));
  // features in different units: a small H of one pair is not small beside another
  const ofValue = P.sweep[state.s].same ? listed(largest(shown.map((p) => p.perUnit))) : null;
  pairsHead({ amount: ofAmount.e, value: ofValue?.e ?? 0 });
  const focused = focusedIn("panel")?.pair, rows = shown.map((p) => pairRow(p, ofAmount, ofValue));
  $("pairs").tBodies[0].replaceChildren(...rows);
  if (focused) rows.find((row) => row.dataset.pair === focused)?.focus({ preventScroll: true });
  const unit = P.derivative ? `${cap(unitWords())}.` : "Attributions, not derivatives.";
  const count = `${counted(list.length)} pair${list.length === 1 ? "" : "s"}`;
  const sure = P.exact ? "" : `, ${counted(list.filter((p) => p.significant).length)} significant`;
  const order = state.sort ? "" : ", strongest first";
  $("pairs-hint").replaceChildren(`${count}${sure}${order}. ${unit}`, help("the table", pairsHelp()));
  $("more-pairs").hidden = list.length <= state.rows;
  $("more-pairs").textContent = `Show ${Math.min(MORE, list.length - state.rows)} more`;
}

const pairsHelp = () => [
  ...(P.derivative && !P.directed ? ["H is the second derivative of the smoothed output: the extra change per unit of each. "
    + "The extra change is H times how far each moves."] : []),
  ...(P.exact ? [] : [
    `± is half of the ${percent} interval.`,
    `Pairs with a q-value of at most ${P.q} are significant: about ${100 * P.q}\u00a0% of them at most are expected to be zero.`,
  ]),
  "Click a heading to sort, a row to read its sentence. ↓ CSV saves all pairs.",
];

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
  const letters = state.filter.toLowerCase(), way = state.down ? -1 : 1, { name, ...rest } = columns();
  const named = (p) => !letters || name[1](p).toLowerCase().includes(letters);
  const list = everyPair().filter((p) => visible(p) && named(p));
  if (!state.sort) return list;
  const [, key] = { name, ...rest }[state.sort];
  return list.sort((a, b) => way * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
}

function pairsHead(tens) {
  const focused = focusedIn("panel")?.column;
  $("pairs").tHead.rows[0].replaceChildren(...Object.entries(columns()).map(([name, [words]]) => {
    const on = name === state.sort, arrow = on ? (state.down ? " ↓" : " ↑") : "";
    const sort = () => update(on ? { down: !state.down } : { sort: name, down: name !== "name" && name !== "q" });
    const button = h("button", { type: "button", "data-column": name, onclick: sort },
      `${words}${tens[name] ? `, ${ten(tens[name])}` : ""}${arrow}`);
    const order = on ? (state.down ? "descending" : "ascending") : null;
    return h("th", { scope: "col", "aria-sort": order, class: ASIDE.includes(name) && "aside" }, button);
  }));
  if (focused) $("pairs").querySelector(`[data-column="${focused}"]`)?.focus({ preventScroll: true });
}

function pairRow(p, ofAmount, ofValue) {
  const at = partner(), on = (p.i === state.i && p.j === at) || (p.j === state.i && p.i === at);
  const choose = () => update({ i: p.i, j: p.j, held: true });
  const press = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    choose();
  };
  const cells = {
    name: columns().name[1](p), amount: plusMinus(p.value, p.half, true, ofAmount), value: text(p.perUnit, true, ofValue),
    q: qText(p.q), significant: p.significant ? "yes" : "no",
  };
  const colour = p.value > 0 ? "more" : p.value < 0 ? "less" : null;
  const look = (name) => (name === "amount" ? colour : ASIDE.includes(name) && "aside");
  return h("tr", {
    tabindex: 0, "aria-selected": String(on), onclick: choose, onkeydown: press, class: p.faint && "faint",
    "data-pair": `${p.i},${p.j}`, "data-value": p.perUnit, "data-effect": p.effect, "data-q": p.q,
  }, ...Object.keys(columns()).map((name) => h("td", { class: look(name) }, cells[name])));
}
