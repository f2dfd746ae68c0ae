/* What the views are made of. */

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const SVG = "http://www.w3.org/2000/svg";
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = () => document.documentElement.dataset.theme === "dark";
const bySign = (x) => (x > 0 ? "--pos" : "--neg");
const colourOf = (x) => (state.mode === "magnitude" ? "--size" : bySign(x));

function choice(legend, key, options, about) {
  const box = h("div", { class: "choice" });
  for (const [value, words] of options) {
    const change = () => update({ [key]: value });
    const radio = h("input", { type: "radio", name: key, value, checked: state[key] === value, onchange: change });
    box.append(h("label", {}, words, radio));
  }
  return h("fieldset", { class: "control" }, h("legend", {}, legend, help(legend, about)), box);
}

/* A button whose click shows an explanation beside it; Esc, another click on it or elsewhere closes it. */
function help(about, paragraphs) {
  return h("button", {
    type: "button", class: "help", "aria-label": `Help: ${about}`, "aria-expanded": "false",
    onclick: (event) => {
      event.stopPropagation();
      event.preventDefault();
      const open = event.currentTarget.getAttribute("aria-expanded") === "true";
      closeHelp();
      if (!open) openHelp(event.currentTarget, paragraphs);
    },
  }, "?");
}

function openHelp(button, paragraphs) {
  const box = $("help"), at = button.getBoundingClientRect();
  box.replaceChildren(...paragraphs.map((words) => h("p", {}, words)));
  box.style.maxHeight = "";
  box.showPopover();
  button.setAttribute("aria-expanded", "true");
  button.setAttribute("aria-describedby", "help");
  const below = innerHeight - at.bottom - 20, above = at.top - 20, upwards = below < box.offsetHeight && above > below;
  box.style.maxHeight = `${Math.max(80, upwards ? above : below)}px`; // beside the button, never over it
  box.style.left = `${Math.max(12, Math.min(at.left - 16, document.documentElement.clientWidth - box.offsetWidth - 12))}px`;
  box.style.top = `${upwards ? at.top - 8 - box.offsetHeight : at.bottom + 8}px`;
}

function closeHelp() {
  for (const button of document.querySelectorAll('.help[aria-expanded="true"]')) {
    button.setAttribute("aria-expanded", "false");
    button.removeAttribute("aria-describedby");
  }
  if ($("help").matches(":popover-open")) $("help").hidePopover();
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

/* Room for the most words that an element shows at this width (`longest` makes them): pointing at another pair must not
   move the picture below it. */
const rooms = new Map();

function keepRoom(element, longest) {
  element.style.minHeight = "";
  const key = `${element.id} ${element.clientWidth} ${shownNumbers()}`;
  if (!rooms.has(key)) {
    const probe = element.cloneNode(false);
    probe.removeAttribute("id");
    probe.setAttribute("aria-hidden", "true");
    probe.style.cssText = `position:absolute;visibility:hidden;width:${element.offsetWidth}px`;
    probe.append(...longest());
    element.after(probe);
    rooms.set(key, probe.offsetHeight);
    probe.remove();
  }
  rooms.set(key, Math.max(rooms.get(key), element.offsetHeight));
  element.style.minHeight = `${rooms.get(key)}px`;
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

function label(k) { // the number of a feature, where the picture shows one, and its name
  const tag = tagOf(k), name = names()[k];
  return h("span", { class: "name" }, tag && !name.endsWith(` ${tag}`) ? h("span", { class: "tag" }, tag) : "", name);
}
