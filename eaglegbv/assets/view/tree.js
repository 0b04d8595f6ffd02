// One draft tree, root on the left, a column a depth.
const COLUMN = 138, ROW = 30, BOX = 112, HEIGHT = 22, MARGIN = 12, LETTERS = 14;
const MEANING = {
  b: "b, chance to be selected", w: "w, weight of the prefix", h: "h, chance of its test",
  M: "M, modified target", rho: "rho, weight of the prefix",
};

// What a node is: all that the picture and the tooltip say about it.
function nodesOf(tree) {
  const text = i => tree.texts ? tree.texts[i] : `#${tree.token_ids[i]}`;
  const accepted = new Set(tree.accepted);
  const nodes = tree.token_ids.map((id, i) => ({
    id, text: text(i), parent: i ? tree.parents[i] : null, children: [], depth: 0,
    state: i === 0 ? "root" : accepted.has(i) ? "accepted" : "rejected",
    // Only independent paths can draw a token twice; others share the nodes above a branch.
    duplicate: i > 0 && tree.draft_sampling === "iid" && tree.multiplicity[i] > 1,
    paths: tree.multiplicity[i], p: tree.p[i], q: tree.q[i],
    figures: Object.entries(tree.figures).map(([name, values]) => [name, values[i]])
      .filter(([, value]) => value !== null),
  }));
  const stop = tree.accepted.length ? tree.accepted[tree.accepted.length - 1] : 0;
  nodes.push({
    id: tree.next_token, text: tree.texts ? tree.next_text : `#${tree.next_token}`, parent: stop,
    children: [], depth: 0, state: "next", duplicate: false, paths: 0, p: tree.next_p, q: null,
    figures: [],
  });
  nodes.forEach((node, i) => {
    if (node.parent === null) return;
    nodes[node.parent].children.push(i);
    node.depth = nodes[node.parent].depth + 1;
  });
  return nodes;
}
// A node of a tree whose stop has no drafted child follows a whole path: its distribution is p itself.
function nameOfNext(tree, nodes) {
  const stop = nodes[nodes.length - 1].parent;
  if (tree.prompt_tokens) return "first token";
  return nodes[stop].children.length > 1 ? "correction" : nodes.length === 2 ? "sampled" : "bonus";
}
function place(nodes) {
  let leaves = 0;
  const visit = i => {
    const node = nodes[i];
    node.children.forEach(visit);
    const ends = [node.children[0], node.children[node.children.length - 1]].map(c => nodes[c]);
    node.y = node.children.length ? (ends[0].y + ends[1].y) / 2 : ROW * leaves++;
    node.x = COLUMN * node.depth;
  };
  visit(0);
  return { width: COLUMN * Math.max(...nodes.map(n => n.depth)) + BOX, height: ROW * leaves };
}
function describe(node, tree, last) {
  const title = `${JSON.stringify(node.text)} #${node.id}`;
  if (node.state === "root") return [title, [["state", "the last token before the step"]]];
  const pairs = [["state", node.state === "next" ? last : node.state]];
  pairs.push(["p, target", digits(node.p)]);
  if (node.state === "next") return [title, pairs];
  pairs.push(["q, draft", node.q === null ? "none: not drawn" : digits(node.q)]);
  if (node.q) pairs.push(["p / q", digits(node.p / node.q)]);
  for (const [name, value] of node.figures) pairs.push([MEANING[name] ?? name, digits(value)]);
  const drawn = node.duplicate ? "drawn by" : "on";
  pairs.push(["depth", String(node.depth)], ["draft sampling", tree.draft_sampling],
             ["paths", `${drawn} ${node.paths} of ${tree.paths}`]);
  return [title, pairs];
}
function drawTree(parent, tree) {
  const nodes = nodesOf(tree), last = nameOfNext(tree, nodes), size = place(nodes);
  const box = element(parent, "div", { class: "tree" });
  const width = size.width + 2 * MARGIN, height = size.height + 2 * MARGIN;
  const svg = shape(box, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group",
    "aria-label": `draft tree of ${tree.token_ids.length - 1} drafted tokens` });
  const inner = shape(svg, "g", { transform: `translate(${MARGIN},${MARGIN})` });
  for (const node of nodes) {
    if (node.parent === null) continue;
    const from = nodes[node.parent], x = from.x + BOX, middle = (x + node.x) / 2;
    const chosen = node.figures.some(([name]) => name === "h") ? " chosen" : "";
    shape(inner, "path", { class: `edge ${node.state}${chosen}`, d: `M${x},${from.y + HEIGHT / 2} ` +
      `C${middle},${from.y + HEIGHT / 2} ${middle},${node.y + HEIGHT / 2} ` +
      `${node.x},${node.y + HEIGHT / 2}` });
  }
  nodes.forEach((node, i) => {
    const [title, pairs] = describe(node, tree, last);
    const group = shape(inner, "g", {
      class: `node ${node.state}${node.duplicate ? " duplicate" : ""}`, tabindex: 0, role: "img",
      id: `node${i}`, transform: `translate(${node.x},${node.y})`,
      "aria-label": [title, ...pairs.map(pair => pair.join(" "))].join(", "),
    });
    shape(group, "rect", { width: BOX, height: HEIGHT, rx: 5 });
    const room = node.duplicate ? LETTERS - 3 : LETTERS;
    shape(group, "text", { x: 7, y: 15 }, clipped(visible(node.text), room));
    if (node.duplicate)
      shape(group, "text", { x: BOX - 6, y: 15, "text-anchor": "end", class: "badge" },
            `×${node.paths}`);
    explain(group, title, pairs);
  });
  // Of a tree higher than its box the middle is seen first, where the root stands.
  box.scrollTop = nodes[0].y + MARGIN - box.clientHeight / 2;
  treeLegend(parent, nodes, last, tree);
}
function treeLegend(parent, nodes, last, tree) {
  const line = element(parent, "p", { class: "legend" });
  const states = { accepted: "accepted", rejected: "rejected", next: last };
  for (const [state, name] of Object.entries(states)) {
    const count = nodes.filter(n => n.state === state).length;
    if (count) key(line, state, state === "next" ? name : `${name} (${count})`);
  }
  const twice = nodes.filter(n => n.duplicate).length;
  if (twice) key(line, "duplicate", `drawn by several paths (${twice})`);
  if (tree.figures.h) element(line, "span", {}, "thick: the path judged as a block");
}
function key(line, state, name) {
  const entry = element(line, "span");
  element(entry, "i", { class: `key ${state}` });
  entry.append(name);
}
