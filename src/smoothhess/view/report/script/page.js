/* The frame around the views, and the one way to change anything: `update`. */

const SIGNS = { good: "●", fair: "▲", poor: "■", plain: "○" };
const VIEWS = {
  image: {
    render: renderImage,
    title: () => `Colours: what acts together with ${names()[state.i]}`,
    hint: () => `Hover or use the arrow keys to choose a ${P.word}; click or press Enter to hold it, Esc to release it.`,
  },
  table: {
    render: () => renderFeatures($("view")),
    title: () => `The input, ${P.word} by ${P.word}`,
    hint: () => "Choose one with a click or the arrow keys.",
  },
  series: {
    render: renderSeries,
    title: () => `Bars: what acts together with ${names()[state.i]}`,
    hint: () => `Hover, click, drag over the curve, or use the arrow keys to choose a ${P.word}; Esc to release it. `
      + "Gold: chosen; grey: its partner; pale bars: within noise."
      + (denoised() ? " The denoised bars have no intervals." : unknown() ? ` ${cap(NO_INTERVALS)}.` : ""),
  },
};
VIEWS.text = {
  render: renderText,
  title: () => (state.paint === "alone" ? `Colours: what each ${P.word} does by itself`
    : `Colours: what acts together with ${quoted(state.i)}`),
  hint: () => `Point at a ${P.word}, tap it, or use the arrow keys; a click holds it, Esc releases it. ${arcWords()}`,
};
const TABS = {
  pairs: ["All pairs", renderPairs],
  matrix: ["Matrix", renderMatrix],
  ...(P.kind === "text" ? { alone: ["Each by itself", renderFeatures] } : {}),
  directions: ["Directions", renderDirections],
  ...(P.sweep.length > 1 ? { sigma: ["Across σ", renderSigma] } : {}),
};

function makeControls() {
  const control = (id, words, element) => h("div", { class: "control" },
    h("label", { class: "label", for: id, id: `${id}-label` }, words), element);
  if (P.examples.length > 1) {
    const change = (e) => update({ b: Number(e.target.value), i: null, j: null, held: false });
    const options = P.examples.map((each, b) => h("option", { value: b }, each.heading));
    $("controls").append(control("example", "Input", h("select", { id: "example", onchange: change }, ...options)));
  }
  if (P.sweep.length > 1) {
    const range = { type: "range", min: 0, max: P.sweep.length - 1, step: 1, value: state.s };
    const change = (e) => update({ s: Number(e.target.value) });
    $("controls").append(control("sigma", "", h("input", { id: "sigma", ...range, oninput: change })));
  }
  if (P.kind === "text") {
    $("controls").append(choice("Colour by", "paint", [["pairs", "Interactions"], ["alone", "By itself"]]));
  }
  $("controls").append(choice("Colour", "mode", [["signed", "Signed"], ["magnitude", "Magnitude"]]));
  if (P.derivative && !P.directed) {
    const unit = P.gates ? "One gate each" : "One unit each";
    $("controls").append(choice("Size of a move", "unit", [["effect", "One σ each"], ["unit", unit]]));
  }
  if (numbers().denoised) {
    $("controls").append(choice("Colours from", "estimate", [["unbiased", "Unbiased"], ["denoised", "Denoised"]]));
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
  const which = P.examples.length > 1 ? `${example.heading}. ` : "";
  const mean = P.sweep[state.s].same ? "" : " in root mean square";
  const smoothed = `${text(n.smoothed, false)} on average over the noise around it, σ\u00a0=\u00a0${sigma}${mean}`;
  $("lead").textContent = `${which}The explained quantity is ${example.output}: ${text(example.f, false)} at this input`
    + `${P.exact ? "" : ` and ${smoothed}`}. ${P.noise[state.s]}`.trimEnd();
  if ($("sigma")) {
    $("sigma-label").textContent = `Scale of the noise: σ = ${sigma}`;
    $("sigma").setAttribute("aria-valuetext", sigma);
  }
  $("badges").replaceChildren(...n.quality.map((r) => h("li", { "data-level": r.level, title: r.meaning },
    h("span", { class: "sign" }, SIGNS[r.level]), ` ${r.name} ${r.figure}: `, h("b", {}, r.verdict))));
  const tile = (r) => h("div", { class: "tile", "data-level": r.level, "data-name": r.name },
    h("div", { class: "name" }, r.name), h("div", { class: "figure" }, r.figure),
    h("div", { class: "verdict" }, `${SIGNS[r.level]} ${r.verdict}`), h("div", { class: "meaning" }, r.meaning));
  $("quality").replaceChildren(...n.quality.map(tile));
  const made = P.made[state.s][state.b];
  $("made").replaceChildren(...made.flatMap(([term, words]) => [h("dt", {}, term), h("dd", {}, words)]));
}

function render() {
  const view = VIEWS[P.kind];
  renderFrame();
  $("where-title").textContent = view.title();
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
  $("theme").textContent = name === "dark" ? "☀ Light" : "☾ Dark";
}

function onPrinting(change) { // on white paper, whose lines of text are as wide as the arcs need them
  let before = "light";
  const print = (name, width) => {
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

function start() {
  const prefers = matchMedia("(prefers-color-scheme: dark)"), change = (name) => { theme(name); update({}); };
  theme(prefers.matches ? "dark" : "light");
  prefers.addEventListener("change", (e) => change(e.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => change(dark() ? "light" : "dark"));
  $("all-partners").addEventListener("click", () => update({ all: !state.all }));
  $("partners").addEventListener("keydown", (e) => walk(e, $("partners"), "button"));
  addEventListener("resize", () => update({}));
  onPrinting(change);
  $("title").textContent = P.title;
  $("limits").textContent = P.limits;
  $("note").textContent = P.note;
  $("explore").dataset.kind = document.body.dataset.kind = P.kind;
  makeControls();
  makeTabs();
  update({ i: null });
}

start();
