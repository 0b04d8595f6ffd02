// Making elements. Text is always set as text, never as markup: a model's answer may be anything.
const SVG = "http://www.w3.org/2000/svg";
const byId = id => document.getElementById(id);

function fill(made, parent, attributes, text) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}
function element(parent, name, attributes = {}, text = null) {
  return fill(document.createElement(name), parent, attributes, text);
}
function shape(parent, name, attributes, text = null, hover = null) {
  const made = fill(document.createElementNS(SVG, name), parent, attributes, text);
  if (hover !== null) fill(document.createElementNS(SVG, "title"), made, {}, hover);
  return made;
}
function facts(parent, pairs) {
  for (const [name, value] of pairs) {
    element(parent, "dt", {}, name);
    element(parent, "dd", {}, value);
  }
}
const counted = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
const format = value => value >= 100 ? value.toFixed(0) : value.toFixed(2);
const digits = value => value === 0 ? "0" : value < 1e-4 ? value.toExponential(2)
  : value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(4)));

// A token as one line of visible characters.
function visible(text) {
  if (text === "") return "(no text)";
  return text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
}
// As much of it as fits into so many columns; letters of East Asian scripts take two.
function clipped(text, columns) {
  let room = columns, kept = "";
  for (const letter of text) {
    room -= letter.codePointAt(0) >= 0x1100 ? 2 : 1;
    if (room < 0) return kept.slice(0, -1) + "…";
    kept += letter;
  }
  return kept;
}

// The one tooltip of the page, for an element that is pointed at or has the focus.
function explain(target, title, pairs) {
  const tip = byId("tip");
  const show = () => {
    tip.replaceChildren();
    element(tip, "b", {}, title);
    facts(element(tip, "dl"), pairs);
    tip.hidden = false;
    const at = target.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const right = Math.min(at.left, innerWidth - own.width - 8);
    const below = at.bottom + 6 + own.height <= innerHeight;
    tip.style.left = `${Math.max(8, right)}px`;
    tip.style.top = `${Math.max(8, below ? at.bottom + 6 : at.top - own.height - 6)}px`;
  };
  const hide = () => { tip.hidden = true; };
  target.addEventListener("pointerenter", show);
  target.addEventListener("focus", show);
  target.addEventListener("pointerleave", hide);
  target.addEventListener("blur", hide);
}
