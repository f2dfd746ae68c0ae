/* The frame around the views, and the one way to change anything: `update`. */

const SIGNS = { good: "●", fair: "▲", poor: "■", plain: "○" };
const VIEWS = {
  image: {
    render: renderImage,
    title: () => `Interactions with ${names()[state.i]}`,
    hint: () => "",
    help: () => [
      `Choose a ${P.word} in either picture: point at it, tap it, or use the arrow keys. A click or Enter holds it, Esc `
        + "releases it; while one is held, pointing at another shows the pair.",
      `The map colours every ${P.word} by what it does together with the chosen one${
        P.derivative ? ": red above the sum of their separate effects, blue below" : ""}.${noise()}`,
    ],
  },
  table: {
    render: () => renderFeatures($("view")),
    title: () => `The input, ${P.word} by ${P.word}`,
    hint: () => "",
    help: () => [
      `Choose a ${P.word} with a click or the arrow keys; the list beside it has what acts together with it.`,
      `By itself: what the ${P.word} does when only it moves, with the ${percent} interval as a line.`,
    ],
  },
  series: {
    render: renderSeries,
    title: () => `The curve, and what acts together with ${names()[state.i]}`,
    hint: () => (unknown() ? `${cap(NO_INTERVALS)}.` : ""),
    help: () => [
      `Choose a ${P.word}: point at it, tap it, or use the arrow keys. A click or Enter holds it, Esc releases it.`,
      "Gold: chosen; grey: its partner. Bars: the interaction of each with the chosen one, with intervals; pale: within noise.",
    ],
  },
};
VIEWS.text = {
  render: renderText,
  title: () => (state.paint === "alone" ? `What each ${P.word} does by itself` : `What acts together with ${quoted(state.i)}`),
  hint: () => arcWords(),
  help: () => [
    `Choose a ${P.word}: point at it, tap it, or use the arrow keys. A click holds it, Esc releases it.`,
    state.paint === "alone" ? `Colours: the effect of each ${P.word} by itself.`
      : `Colours: the interaction of each ${P.word} with the chosen one. Arcs join the strongest significant pairs.`,
  ],
};
const TABS = {
  pairs: ["All pairs", renderPairs],
  matrix: ["Matrix", renderMatrix],
  ...(P.kind === "text" ? { alone: ["Each by itself", renderFeatures] } : {}),
  directions: ["Directions", renderDirections],
  ...(P.sweep.length > 1 ? { sigma: ["Across σ", renderSigma] } : {}),
};

function makeOverall() { // what the sentence depends on: the example and σ
  const control = (id, words, element) => h("div", { class: "control" },
    h("label", { class: "label", for: id, id: `${id}-label` }, words), element);
  if (P.examples.length > 1) {
    const change = (e) => update({ b: Number(e.target.value), i: null, j: null, held: false });
    const options = P.examples.map((each, b) => h("option", { value: b }, each.heading));
    $("overall").append(control("example", "Input", h("select", { id: "example", onchange: change }, ...options)));
  }
  if (P.sweep.length > 1) {
    const range = { type: "range", min: 0, max: P.sweep.length - 1, step: 1, value: state.s };
    const change = (e) => update({ s: Number(e.target.value) });
    $("overall").append(control("sigma", "", h("input", { id: "sigma", ...range, oninput: change })));
  }
}

function makeControls() {
  if (P.kind === "text") {
    $("controls").append(choice("Colour by", "paint", [["pairs", "Interactions"], ["alone", "By itself"]],
      [`Interactions with the chosen ${P.word}, or the effect of each ${P.word} by itself.`]));
  }
  $("controls").append(choice("Colour", "mode", [["signed", "Sign"], ["magnitude", "Size only"]],
    ["Red and blue for the sign, or one colour for the size."]));
  if (P.derivative && !P.directed) {
    const unit = P.gates ? "One gate each" : "One unit each";
    $("controls").append(choice("Size of a move", "unit", [["effect", "One σ each"], ["unit", unit]],
      ["How far each feature is moved in all numbers of this page: by its σ, the scale of the noise, or by one unit."]));
  }
  if (!P.exact) {
    const only = h("input", { type: "checkbox", id: "only", onchange: (e) => update({ only: e.target.checked }) });
    $("controls").append(h("label", { class: "check" }, "Significant only", only));
  }
}

function makeTabs() {
  $("tabs").append(...Object.entries(TABS).map(([key, [words]]) => h("button", {
    type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "panel", onclick: () => update({ tab: key }),
  }, words)));
  $("tabs").addEventListener("keydown", (event) => {
    const keys = Object.keys(TABS), step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    update({ tab: keys[(keys.indexOf(state.tab) + step + keys.length) % keys.length] });
    $(`tab-${state.tab}`).focus();
  });
}

function renderTabs() {
  for (const key of Object.keys(TABS)) {
    $(`tab-${key}`).setAttribute("aria-selected", String(key === state.tab));
    $(`tab-${key}`).tabIndex = key === state.tab ? 0 : -1;
  }
  const panel = $("panel");
  if (panel.dataset.tab !== state.tab) panel.replaceChildren();
  panel.dataset.tab = state.tab;
  panel.setAttribute("aria-labelledby", `tab-${state.tab}`);
  TABS[state.tab][1](panel);
}

function renderFrame() {
  const example = P.examples[state.b], n = numbers(), sigma = text(P.sweep[state.s].sigma, false);
  const moves = P.sweep[state.s].same ? `σ\u00a0=\u00a0${sigma}` : `each ${P.word} with its own σ`;
  const smoothed = `${text(n.smoothed, false)} on average over the noise around it (${moves})`;
  const which = P.examples.length > 1 ? `${example.heading}. ` : "";
  $("lead").replaceChildren(h("span", { class: "printed" }, which),
    `${cap(example.output)} is ${text(example.f, false)} at this input${P.exact ? "" : ` and ${smoothed}`}.`);
  if ($("sigma")) {
    $("sigma-label").textContent = `Scale of the noise: σ = ${sigma}`;
    $("sigma").setAttribute("aria-valuetext", sigma);
  }
  renderQuality(n);
  const made = P.made[state.s][state.b];
  const code = new Set(["Call", "Command"]), wrapped = (term, words) => (code.has(term) ? h("code", {}, words) : words);
  $("made").replaceChildren(...made.flatMap(([term, words]) => [h("dt", {}, term), h("dd", {}, wrapped(term, words))]));
}

function renderQuality(n) { // one verdict in the chip, the figures behind it in the panel
  $("chip").dataset.level = n.chip.level;
  $("chip").dataset.words = n.chip.words;
  $("chip").replaceChildren(h("span", { class: "sign" }, SIGNS[n.chip.level]), ` ${n.chip.words}`);
  const tile = (r) => h("div", { class: "tile", "data-level": r.level, "data-name": r.name },
    h("div", { class: "name" }, r.name), h("div", { class: "figure" }, r.figure),
    h("div", { class: "verdict" }, h("span", { class: "sign" }, SIGNS[r.level]), r.verdict),
    h("div", { class: "meaning" }, r.meaning));
  $("quality").replaceChildren(...n.quality.map(tile));
}

function render() {
  const view = VIEWS[P.kind];
  renderFrame();
  $("where-title").replaceChildren(view.title(), help("this view", view.help()));
  $("where-hint").textContent = view.hint();
  view.render();
  renderPartners();
  renderTabs();
  sentence(pair(state.i, partner()));
  document.body.dataset.ready = "yes";
}

let asked = false;
function update(change) {
  Object.assign(state, change);
  if (state.i === null) state.i = (everyPair().find((p) => p.significant) ?? everyPair()[0])?.i ?? 0;
  loadPicture(state.b);
  if (asked) return; // many events, one drawing
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    render();
  });
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "☀" : "☾";
}

function foldable(button, panel) {
  $(button).addEventListener("click", () => {
    $(panel).hidden = !$(panel).hidden;
    $(button).setAttribute("aria-expanded", String(!$(panel).hidden));
  });
}

function onPrinting(change) { // on white paper, whose lines of text are as wide as the arcs need them
  let before = "light";
  const made = document.querySelector(".made"), print = (name, width) => {
    made.open = width !== "";
    if ($("text")) $("text").style.width = width;
    change(name);
    render(); // now: the browser does not wait for the next frame
  };
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    print("light", "600px");
  });
  addEventListener("afterprint", () => print(before, ""));
}

function listen() {
  const prefers = matchMedia("(prefers-color-scheme: dark)"), change = (name) => { theme(name); update({}); };
  theme(prefers.matches ? "dark" : "light");
  prefers.addEventListener("change", (e) => change(e.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => change(dark() ? "light" : "dark"));
  $("all-partners").addEventListener("click", () => update({ all: !state.all }));
  $("partners").addEventListener("keydown", (e) => walk(e, $("partners"), "button"));
  $("csv").addEventListener("click", saveCsv);
  $("png").addEventListener("click", savePng);
  foldable("chip", "quality-panel");
  foldable("options", "controls");
  addEventListener("click", (event) => !$("help").contains(event.target) && closeHelp());
  addEventListener("keydown", (event) => event.key === "Escape" && closeHelp(), { capture: true });
  addEventListener("resize", () => update({}));
  onPrinting(change);
}

function start() {
  $("title").textContent = P.title;
  $("limits").textContent = P.limits;
  $("note").textContent = P.note;
  $("explore").dataset.kind = document.body.dataset.kind = P.kind;
  listen();
  makeOverall();
  makeControls();
  makeTabs();
  update({ i: null });
}

start();
