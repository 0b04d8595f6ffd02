// Runs the script of a page against the few parts of a document that it uses, and prints what it
// made. After the page come what a reader does, in order:
//   node page_dom.js PAGE [ID=VALUE | ID!EVENT | key:KEY ...]
"use strict";
const fs = require("fs");
const vm = require("vm");
const html = fs.readFileSync(process.argv[2], "utf-8");

class Element {
  constructor(name) {
    this.name = name; this.attributes = {}; this.children = []; this.own = ""; this.listeners = {};
    this.style = {}; this.hidden = false; this.disabled = false;
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
  before() {}
  addEventListener(kind, listener) { (this.listeners[kind] ??= []).push(listener); }
  tell(kind, event = {}) { (this.listeners[kind] ?? []).forEach(listener => listener(event)); }
  getBoundingClientRect() { return { left: 0, top: 0, bottom: 0, width: 0, height: 0 }; }
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
const document = new Element("#document");
document.getElementById = id => known.get(id) ?? null;
document.createElement = name => new Element(name);
document.createElementNS = (_, name) => new Element(name);
vm.runInNewContext(html.match(/<script>([^]*)<\/script>/)[1],
                   { document, innerWidth: 1000, innerHeight: 800, addEventListener() {},
                     setInterval, clearInterval });
for (const action of process.argv.slice(3)) {
  if (action.startsWith("key:")) {
    const event = { key: action.slice(4), target: { tagName: "BODY" }, preventDefault() {} };
    document.tell("keydown", event);
  } else if (action.includes("!")) {
    const [id, kind] = action.split("!");
    known.get(id).tell(kind);
  } else {
    const [id, value] = action.split("=");
    known.get(id).value = value;
    ["input", "change"].forEach(kind => known.get(id).tell(kind));
  }
}
const flat = one => one instanceof Element ? {
  name: one.name, attributes: one.attributes, text: one.textContent, hidden: one.hidden,
  disabled: one.disabled, children: one.children.map(flat),
} : { name: "#text", attributes: {}, text: one, children: [] };
const shown = ["title", "headline", "facts", "notes", "charts", "browser", "tip"];
process.stdout.write(JSON.stringify(Object.fromEntries(shown.map(id => [id, flat(known.get(id))]))));
