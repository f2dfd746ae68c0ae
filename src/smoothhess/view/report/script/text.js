/* A text: its tokens in lines, coloured by what acts together with one of them; arcs between the strongest pairs. */

const ARCS = 10, OWN = 6, LEAST = 0.05; // arcs of the whole text, of the chosen token, and their least relative size
const SPREAD = 3; // height that an arc gains over the width of a text of one line, in units of the least room

function renderText() {
  if ($("text")?.dataset.example !== String(state.b)) makeText();
  const { still } = numbers(), at = partner(), alone = state.paint === "alone", list = others(state.i).filter(visible);
  const byItself = (k) => ({ j: k, ...slope(k) });
  const found = alone ? [...names().keys()].filter((k) => !still.has(k)).map(byItself) : list;
  const limit = largest((alone ? found : others(state.i)).map((p) => p.value)), looks = [];
  for (const p of found) looks[p.j] = { tint: tint(p.value / limit, p.faint), words: plusMinus(p.value, p.half) };
  tokens().forEach((token, k) => {
    const { tint: colour, words } = looks[k] ?? { tint: [0, 0, 0, 0], words: still.has(k) ? "not moved" : "" };
    token.style.setProperty("--tint", `rgb(${colour.slice(0, 3).join(" ")} / ${colour[3].toFixed(3)})`);
    token.classList.toggle("strong", readsBetter(colour, css("--card"), css("--ink")));
    token.classList.toggle("partner", k === at && k !== state.i);
    token.setAttribute("aria-pressed", String(k === state.i));
    token.setAttribute("aria-label", words ? `${names()[k]}: ${words}` : names()[k]);
    token.tabIndex = k === state.i ? 0 : -1;
  });
  reveal($("text").parentElement, tokens()[state.i]);
  Object.assign($("text").dataset, { source: state.i, partner: at, held: state.held, paint: state.paint, limit });
  drawArcs();
  const ends = alone ? ["lowers it", "raises it"] : ["less together", "more together"];
  $("text-scale").replaceChildren(ramp(limit, ends, "Gold: chosen; outlined: its partner."));
}

const tokens = () => [...$("text").querySelectorAll(".token")];

function luminance(colour) { // relative, as WCAG defines it
  const [r, g, b] = colour.map((v) => (v <= 10 ? v / 3294 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function readsBetter([r, g, b, opacity], card, ink) { // letters in the colour of the card, on a tint over the card, than in ink
  const below = rgb(card), on = luminance([r, g, b].map((v, k) => opacity * v + (1 - opacity) * below[k]));
  const contrast = (letters) => {
    const other = luminance(rgb(letters));
    return (Math.max(on, other) + 0.05) / (Math.min(on, other) + 0.05);
  };
  return contrast(card) > contrast(ink);
}

function makeText() {
  const box = h("div", { id: "text", role: "group", "aria-label": `Text of ${D} ${P.words}`, "data-example": state.b, "data-short": D <= 40 });
  const at = (event) => Number(event.target.closest(".token")?.dataset.token ?? -1);
  let word = null;
  P.examples[state.b].tokens.forEach(([letters, gap], k) => {
    if (gap || !word) {
      if (gap === "\n") box.append(h("br"));
      word = h("span", { class: "word" });
      box.append(" ", word);
    }
    word.append(h("button", { type: "button", class: "token", "data-token": k }, letters));
  });
  box.addEventListener("pointerover", (e) => e.pointerType === "mouse" && at(e) >= 0 && look(at(e)));
  box.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && state.held && update({ j: null }));
  box.addEventListener("click", (e) => at(e) >= 0 && hold(at(e)));
  box.addEventListener("keydown", stepInText);
  box.prepend(svg("svg", { id: "arcs", "aria-hidden": "true" }));
  $("view").replaceChildren(h("div", { class: "pages" }, box), h("div", { id: "text-scale" }));
}

function stepInText(event) { // to the token before or after, or to the nearest one in the line above or below
  if (event.key === "Escape") update({ held: false, j: null });
  const all = tokens(), now = middles(all), { x, y } = now[state.i];
  const lines = { ArrowUp: now.filter((m) => m.y < y - 4).at(-1)?.y, ArrowDown: now.find((m) => m.y > y + 4)?.y };
  let to = { ArrowLeft: state.i - 1, ArrowRight: state.i + 1, Home: 0, End: D - 1 }[event.key];
  if (event.key in lines) {
    const far = (m) => (m.y === lines[event.key] ? Math.abs(m.x - x) : Infinity);
    to = now.reduce((best, m, k) => (far(m) < far(now[best]) ? k : best), state.i);
  }
  if (to === undefined) return;
  event.preventDefault();
  to = Math.max(0, Math.min(D - 1, to));
  all[to].focus();
  update({ i: to, j: null, held: true });
}

function middles(all) { // of the tokens, in pixels from the corner of the text
  const corner = $("text").getBoundingClientRect();
  return all.map((token) => {
    const { left, top, width, height } = token.getBoundingClientRect();
    return { x: left - corner.left + width / 2, y: Math.round(top - corner.top + height / 2), half: height / 2 };
  });
}

function arcPairs() { // the strongest significant pairs of the whole text, and over them those of the chosen token
  const clear = (p) => p.significant && p.value !== 0;
  const all = remember(`arcs ${shownNumbers()}`, () => everyPair().filter(clear).slice(0, ARCS));
  const first = others(state.i).find(clear), large = (p) => Math.abs(p.value) >= LEAST * Math.abs(first.value);
  const own = others(state.i).filter((p) => clear(p) && large(p)).slice(0, OWN).reverse();
  return [...all.filter((p) => !isOwn(p)), ...own];
}

const isOwn = (p) => p.i === state.i || p.j === state.i;

function arcWords() {
  const pairs = arcPairs();
  if (!pairs.length) return "No pair is significant, so there are no arcs.";
  return `Arcs: the strongest significant pairs${pairs.some(isOwn) ? `; bold: those of ${quoted(state.i)}` : ""}.`;
}

function drawArcs() {
  const pairs = arcPairs(), most = largest(pairs.map((p) => p.value)), all = tokens(), high = middles(all);
  const single = pairs.length > 0 && high.every(({ y }) => y === high[0].y); // the room above the line is for arcs
  $("text").toggleAttribute("data-single", single);
  const where = middles(all), wide = single ? where.at(-1).x - where[0].x : 0;
  const lift = 0.8 * parseFloat(getComputedStyle($("text")).fontSize), lines = $("arcs");
  const place = ({ i, j }) => (i < j ? [where[i], where[j]] : [where[j], where[i]]);
  lines.replaceChildren(...pairs.map((p) => {
    const [a, b] = place(p), thick = 1 + (2 * Math.abs(p.value)) / most;
    return svg("path", {
      d: a.y === b.y ? over(a, b, lift, wide) : across(a, b, lift), class: isOwn(p) ? "own" : "",
      style: `stroke:var(${colourOf(p.value)});stroke-width:${thick}`,
      "data-pair": `${Math.min(p.i, p.j)},${Math.max(p.i, p.j)}`,
    });
  }));
}

function over(a, b, lift, wide) { // within one line; longer arcs are higher, in a text of one line (`wide`) even more
  const long = b.x - a.x, part = wide ? 0.5 + (SPREAD * long) / wide : Math.min(1, 0.5 + long / 400);
  const top = a.y - a.half, high = top - 1.3 * lift * part;
  return `M${a.x} ${top}C${a.x} ${high} ${b.x} ${high} ${b.x} ${b.y - b.half}`;
}

function across(a, b, lift) { // from below a token to above one of a later line
  const from = a.y + a.half, to = b.y - b.half, bend = lift + 0.25 * Math.max(0, to - from - 2 * lift);
  return `M${a.x} ${from}C${a.x} ${from + bend} ${b.x} ${to - bend} ${b.x} ${to}`;
}
