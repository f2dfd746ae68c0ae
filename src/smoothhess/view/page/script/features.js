/* A table: the features one under the other, with their values and what each does by itself. */

function renderFeatures() {
  const n = numbers(), values = P.examples[state.b].values, size = (k) => (state.unit === "effect" ? n.move[k] : 1);
  const slopes = P.names.map((_, k) => ({ value: n.slope[k] * size(k), half: NOISE * n.slopeError[k] * size(k) }));
  const limit = largest(slopes.map((slope) => Math.abs(slope.value) + slope.half)), list = listed(limit);
  const focused = focusedIn("view")?.feature, top = $("features")?.scrollTop ?? 0;
  const figure = (...words) => h("span", { class: "figure" }, ...words);
  const head = h("div", { class: "row feature head", "aria-hidden": "true" },
    h("span", {}, cap(P.word)), figure(values ? "value" : ""), h("span", { style: "text-align:center" }, "by itself"),
    figure(`slope${list.e ? `, ${ten(list.e)}` : ""}`));
  const rows = P.names.map((name, k) => {
    const choose = () => k !== state.i && update({ i: k, j: null, held: true }), { value, half } = slopes[k];
    const unit = h("span", { class: "unit" }, P.units?.[k] ? ` ${P.units[k]}` : "");
    return h("button", {
      type: "button", class: "row feature", title: name, "data-feature": k, "aria-pressed": String(k === state.i),
      tabindex: k === state.i ? 0 : -1, onclick: choose, onfocus: choose,
    }, h("span", { class: "name" }, name), figure(values ? text(values[k], false) : "", unit),
    track(value, half, limit, Math.abs(value) < half), figure(text(value, true, list)));
  });
  const box = h("div", {
    id: "features", class: "rows tall", "data-source": state.i, onkeydown: (e) => walk(e, box, "button"),
  }, head, ...rows);
  $("view").replaceChildren(box);
  box.scrollTop = top;
  if (focused !== undefined) rows[state.i].focus({ preventScroll: true });
  const row = rows[state.i], above = row.offsetTop - box.offsetTop;
  if (above < box.scrollTop || above + row.offsetHeight > box.scrollTop + box.clientHeight) {
    box.scrollTop = above - box.clientHeight / 2;
  }
}
