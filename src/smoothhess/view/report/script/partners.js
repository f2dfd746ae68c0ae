/* The partners of the chosen feature, strongest first. */

const NO_INTERVALS = "there are too few draws for intervals";

function renderPartners() {
  const list = others(state.i).filter(visible), shown = state.all ? list : list.slice(0, FEW), at = partner();
  const limit = largest(shown.flatMap((p) => [p.low, p.high, p.value])), common = listed(limit);
  const focused = focusedIn("partners")?.partner;
  const rows = shown.map((p) => {
    const name = names()[p.j], sure = p.significant ? "significant" : "not significant";
    const choose = () => (p.j !== partner() || !state.held) && update({ j: p.j, held: true });
    return h("button", {
      type: "button", class: `row${p.faint ? " faint" : ""}`, title: name, "aria-pressed": String(p.j === at),
      "aria-label": `${name}: ${plusMinus(p.value, p.half)}${P.exact ? "" : `, ${sure}`}`,
      "data-partner": p.j, "data-value": p.value, "data-low": p.low, "data-high": p.high, "data-q": p.q,
      onclick: choose, onfocus: choose,
    }, label(p.j), track(sized(p.value), p.half, limit, p.faint),
    h("span", { class: "figure" }, plusMinus(sized(p.value), p.half, state.mode === "signed", common)));
  });
  $("partners").replaceChildren(...rows);
  $("partners").dataset.source = state.i;
  $("partners").classList.toggle("tall", state.all);
  if (focused !== undefined) rows.find((row) => row.dataset.partner === focused)?.focus({ preventScroll: true });
  $("partners-title").replaceChildren(`What ${quoted(state.i)} acts together with`, help("the list", partnersHelp()));
  $("partners-hint").textContent = partnersHint(list.length, common.e);
  $("all-partners").hidden = list.length <= FEW;
  $("all-partners").textContent = state.all ? `Show the strongest ${FEW}` : `Show all ${list.length}`;
}

const partnersHelp = () => [
  `The ${P.words} that act together with ${quoted(state.i)}, strongest first. Choose one to read its sentence.`,
  ...(P.exact || unknown() ? [] : [
    `Lines: ${percent} intervals, the same numbers as after ±. Pale: within noise, not distinguishable from zero.`,
  ]),
  ...(P.derivative ? [`Unit: ${unitWords()}; in units of the output.`] : []),
];

function partnersHint(count, e) {
  if (D < 2) return `There is only one ${P.word}.`;
  if (numbers().still.has(state.i)) return "It has no noise, so there is no estimate for it.";
  if (!count && !state.only) return "It has no partner that moves.";
  if (!count) return "No partner is significant. Switch “Significant only” off to see the others.";
  const what = P.derivative ? "Extra change of the output" : "Attributions, not derivatives";
  return `${what}${e ? `, in units of ${ten(e)}` : ""}${unknown() ? `; ${NO_INTERVALS}` : ""}.`;
}
