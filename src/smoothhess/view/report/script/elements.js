/* What the views are made of. */

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = () => document.documentElement.dataset.theme === "dark";
const bySign = (x) => (x > 0 ? "--pos" : "--neg");
const colourOf = (x) => (state.mode === "magnitude" ? "--size" : bySign(x));

function choice(legend, key, options) {
  const box = h("div", { class: "choice" });
  for (const [value, words] of options) {
    const change = () => update({ [key]: value });
    const radio = h("input", { type: "radio", name: key, value, checked: state[key] === value, onchange: change });
    box.append(h("label", {}, words, radio));
  }
  return h("fieldset", { class: "control" }, h("legend", {}, legend), box);
}

function track(value, half, limit, faint, colour = colourOf) { // a bar from zero, with its interval
  const at = (x) => 50 + 50 * Math.max(-1, Math.min(1, x / limit)), span = (a, b) => `left:${a}%;width:${b - a}%`;
  const [from, to] = [at(0), at(value)].sort((a, b) => a - b);
  const bar = h("i", { class: "bar", style: `${span(from, to)};background:var(${colour(value)})` });
  const look = { class: `track${faint ? " faint" : ""}`, "aria-hidden": "true" };
  const box = h("span", look, bar, h("i", { class: "zero" }));
  if (half > 0) { // one that is not known goes from end to end, and has none itself
    const open = Number.isFinite(half) ? "" : " open";
    box.append(h("i", { class: `whisker${open}`, style: span(at(value - half), at(value + half)) }));
  }
  return box;
}

function reveal(box, inside) { // so that an element of a box that scrolls can be seen; the page stays where it is
  const above = inside.getBoundingClientRect().top - box.getBoundingClientRect().top;
  if (above < 0 || above + inside.offsetHeight > box.clientHeight) box.scrollTop += above - box.clientHeight / 2;
}

/* Lists are made anew at each drawing: who had the focus is asked before, and given it back after. */
const focusedIn = (id) => ($(id).contains(document.activeElement) ? document.activeElement.dataset : null);

function walk(event, container, selector) { // arrow keys, Home and End move among rows
  const rows = [...container.querySelectorAll(selector)], now = rows.indexOf(document.activeElement);
  const to = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: rows.length - 1 }[event.key];
  if (to === undefined || now < 0) return;
  event.preventDefault();
  rows[Math.max(0, Math.min(rows.length - 1, to))].focus();
}

function draw(element, traces, layout) { // by Plotly, in the colours of the page
  const soft = { color: css("--soft"), size: 12 }, line = css("--line"), clear = "rgba(0,0,0,0)";
  const base = {
    gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: soft, fixedrange: true, automargin: true,
    exponentformat: "power",
  };
  const axes = {};
  for (const key of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /axis\d*$/.test(name))])) {
    axes[key] = { ...base, ...layout[key] };
    if (axes[key].title) axes[key].title = { ...axes[key].title, font: soft };
  }
  const font = { family: css("--font"), color: css("--ink") };
  const whole = {
    paper_bgcolor: clear, plot_bgcolor: clear, font, showlegend: false, dragmode: false, hovermode: "closest",
    ...layout, ...axes,
  };
  return Plotly.react(element, traces, whole, { displayModeBar: false, responsive: true, doubleClick: false });
}

const bars = (halves) => halves.map((half) => (Number.isFinite(half) ? half : NaN)); // Plotly draws no bar there
