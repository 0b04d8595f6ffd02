// Runs the script of a page against the few parts of a document that it uses, and prints what it
// made: node page_dom.js PAGE [ID=VALUE ...] sets controls and tells their listeners.
"use strict";
const fs = require("fs");
const vm = require("vm");
const html = fs.readFileSync(process.argv[2], "utf-8");

class Element {
  constructor(name) {
    this.name = name; this.attributes = {}; this.children = []; this.own = ""; this.listeners = {};
  }
  setAttribute(key, value) {
    this.attributes[key] = String(value);
    if (key === "id") known.set(String(value), this);
    if (key === "value") this.value = String(value);
  }
  append(...nodes) {
    this.children.push(...nodes);
    const first = this.children[0];
    if (this.name === "select" && first instanceof Element) this.value ??= first.value;
  }
  replaceChildren() { this.children = []; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  set textContent(text) { this.children = []; this.own = String(text); }
  get textContent() {
    return this.own + this.children.map(c => c instanceof Element ? c.textContent : c).join("");
  }
}
const known = new Map();
for (const [, name, id] of html.matchAll(/<(\w+)[^>]* id="(\w+)"/g)) {
  const element = new Element(name);
  element.setAttribute("id", id);
}
const json = html.match(/<script type="application\/json" id="data">([^<]*)<\/script>/)[1];
known.get("data").textContent = json;
const document = {
  getElementById: id => known.get(id) ?? null,
  createElement: name => new Element(name),
  createElementNS: (_, name) => new Element(name),
};
vm.runInNewContext(html.match(/<script>([^]*)<\/script>/)[1], { document });
for (const change of process.argv.slice(3)) {
  const [id, value] = change.split("=");
  known.get(id).value = value;
  Object.values(known.get(id).listeners).forEach(listener => listener());
}
const flat = one => one instanceof Element ? {
  name: one.name, attributes: one.attributes, text: one.textContent,
  children: one.children.map(flat),
} : { name: "#text", attributes: {}, text: one, children: [] };
const shown = ["title", "facts", "charts", "browser"];
process.stdout.write(JSON.stringify(Object.fromEntries(shown.map(id => [id, flat(known.get(id))]))));
