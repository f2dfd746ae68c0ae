/* A table: the features one under the other, with their values and what each does by itself. */

function renderFeatures(place) {
  const { still } = numbers(), values = P.examples[state.b].values, slopes = names().map((_, k) => slope(k));
  const limit = largest(slopes.flatMap((each) => [each.value, Math.abs(each.value) + each.half])), list = listed(limit);
  const focused = focusedIn(place.id)?.feature, top = $("features")?.scrollTop ?? 0;
  const figure = (...words) => h("span", { class: "figure" }, ...words);
  const head = h("div", { class: "row feature head", "aria-hidden": "true" },
    h("span", {}, cap(P.word)), figure(values ? "value" : ""), h("span", { style: "text-align:center" }, "by itself"),
    figure(`${P.derivative ? (state.unit === "effect" ? "change" : "slope") : "first order"}${list.e ? `, ${ten(list.e)}` : ""}`));
  const rows = names().map((name, k) => {
    const choose = () => k !== state.i && update({ i: k, j: null, held: true }), { value, half, faint } = slopes[k];
    const unit = h("span", { class: "unit" }, P.units?.[k] ? ` ${P.units[k]}` : "");
    return h("button", {
      type: "button", class: "row feature", title: name, "data-feature": k, "aria-pressed": String(k === state.i),
      tabindex: k === state.i ? 0 : -1, "data-value": value, "data-half": half, onclick: choose, onfocus: choose,
    }, h("span", { class: "name" }, name), figure(values ? text(values[k], false) : "", unit),
    still.has(k) ? h("span", { class: "track" }) : track(value, half, limit, faint),
    figure(still.has(k) ? "not moved" : P.kind === "text" ? plusMinus(value, half, true, list) : text(value, true, list)));
  });
  const box = h("div", {
    id: "features", class: "rows tall", "data-source": state.i, onkeydown: (e) => walk(e, box, "button"),
  }, head, ...rows);
  place.replaceChildren(box);
  box.scrollTop = top;
  if (focused !== undefined) rows[state.i].focus({ preventScroll: true });
  reveal(box, rows[state.i]);
}
