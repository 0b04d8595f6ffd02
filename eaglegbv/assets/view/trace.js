// A trace: a generation step by step, and the run as a whole.
function showTrace(data) {
  byId("headline").textContent =
    `${counted(data.steps.reduce((sum, s) => sum + s.committed, 0), "token")} in ` +
    `${counted(data.steps.length, "step")}` +
    (data.by_depth.length ? `: a step commits ${accepted(data.steps)} tokens on average` : "");
  if (data.requests.length) showGenerations(data);
  else showSteps(data);
  keepDrawn(() => drawTrace(data));
}
function accepted(steps) {
  const writing = steps.filter(s => s.args["drafted nodes"] > 0);
  return (writing.reduce((sum, s) => sum + s.committed, 0) / (writing.length || 1)).toFixed(2);
}
function drawTrace(data) {
  if (data.by_depth.length)
    lines("Acceptance by depth", "share of the trees so deep that have an accepted node there",
      data.by_depth.map((s, i) => ({ name: s.plan, colour: colourOf(i), values: s.shares })),
      "depth");
  const steps = data.steps;
  lines("Tokens of each step", data.counted, [
    { name: "committed", colour: "var(--c0)", values: steps.map(s => s.committed) },
    { name: "accepted", colour: "var(--c2)", values: steps.map(s => s.args.accepted) },
  ], "step");
  lines("Milliseconds of each step", "", [
    { name: "step", colour: "var(--c6)", values: steps.map(s => s.milliseconds) },
  ], "step");
  const entries = Object.entries(data.phases);
  rows("Where the time went", "milliseconds of all steps", entries.map(([name, value]) =>
    ({ name, label: format(value), parts: phaseParts({ [name]: value }) })));
}
const STEP_MILLISECONDS = 700;
// Buttons, a slider and keys for whole numbers; `show` is called with each new one.
function stepper(parent, show) {
  const bar = element(parent, "div", { class: "steps" });
  const button = (id, label, name) =>
    element(bar, "button", { id, type: "button", "aria-label": name, title: name }, label);
  const first = button("first", "|‹", "first step (Home)");
  const back = button("back", "‹", "step back (left arrow)");
  const slider = element(bar, "input", { type: "range", id: "step", min: 0, max: 0, value: 0,
                                         "aria-label": "step" });
  const on = button("on", "›", "step forward (right arrow)");
  const last = button("last", "›|", "last step (End)");
  const play = button("play", "▶", "play (space)");
  const output = element(bar, "output", { id: "where", for: "step", "aria-live": "polite" });
  let most = 0;
  const go = to => {
    const number = Math.max(0, Math.min(most, to));
    slider.value = number;
    first.disabled = back.disabled = number === 0;
    on.disabled = last.disabled = number === most;
    output.textContent = `step ${number + 1} of ${most + 1}`;
    show(number);
  };
  const at = () => Number(slider.value);
  let playing = 0;
  const stop = () => {
    clearInterval(playing);
    playing = 0;
    play.textContent = "▶";
  };
  play.addEventListener("click", () => {
    if (playing) return stop();
    if (at() === most) go(0);
    play.textContent = "❚❚";
    playing = setInterval(() => (at() === most ? stop() : go(at() + 1)), STEP_MILLISECONDS);
  });
  const moves = { ArrowLeft: () => at() - 1, ArrowRight: () => at() + 1,
                  Home: () => 0, End: () => most };
  first.addEventListener("click", () => go(0));
  back.addEventListener("click", () => go(at() - 1));
  on.addEventListener("click", () => go(at() + 1));
  last.addEventListener("click", () => go(most));
  slider.addEventListener("input", () => go(at()));
  document.addEventListener("keydown", event => {
    const busy = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
    if (!(event.key in moves) || busy || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    go(moves[event.key]());
  });
  return (count, at) => {
    stop();
    most = Math.max(0, count - 1);
    slider.setAttribute("max", most);
    go(at);
  };
}
function phasesOf(step) {
  const parts = Object.entries(step.phases).map(([name, value]) => `${name} ${format(value)}`);
  return `${format(step.milliseconds)} ms${parts.length ? ` (${parts.join(", ")})` : ""}`;
}

function showGenerations(data) {
  const browser = byId("browser");
  element(browser, "h2", {}, "Step by step");
  const choice = element(browser, "select", { id: "request", "aria-label": "request" });
  data.requests.forEach((request, i) => element(choice, "option", { value: i },
    `request ${request.number}: ${counted(request.trees.length, "step")}, ${request.plan}`));
  choice.hidden = data.requests.length === 1;
  const request = () => data.requests[Number(choice.value)];
  const restart = stepper(browser, number => {
    drawText(text, request(), number);
    picture.replaceChildren();
    drawTree(picture, request().trees[number]);
    detail.replaceChildren();
    facts(detail, factsOf(request().trees[number], data));
    byId("tip").hidden = true;
  });
  const text = element(browser, "div", { class: "text", id: "text", tabindex: 0,
                                         "aria-label": "text so far" });
  const picture = element(browser, "div", { id: "tree" });
  element(browser, "p", { class: "note hint" },
    "The tree can be swiped sideways; a tap on a node shows its figures.");
  const detail = element(browser, "dl", { id: "detail" });
  // The first step that drafted says more than the prompt's own.
  const begin = () => {
    const trees = request().trees;
    restart(trees.length, Math.max(0, trees.findIndex(tree => tree.token_ids.length > 1)));
  };
  choice.addEventListener("change", begin);
  begin();
}
// The end of the text up to a step, the step's own tokens marked.
const MOST_TEXT = 20000;
function drawText(parent, request, number) {
  parent.replaceChildren();
  const textsOf = tree => tree.committed_texts ?? tree.committed.map(id => `#${id} `);
  const before = request.trees.slice(0, number).flatMap(textsOf).join("");
  if (before.length > MOST_TEXT) element(parent, "span", {}, "…" + before.slice(-MOST_TEXT));
  else {
    element(parent, "span", { class: "prompt" }, request.prompt);
    element(parent, "span", {}, before);
  }
  const tree = request.trees[number];
  textsOf(tree).forEach((text, place) => {
    const state = place < tree.accepted.length ? "accepted" : "next";
    // A character of several tokens is shown with the last of them.
    const shown = text === "" ? `⟨#${tree.committed[place]}⟩` : text.replace(/\n/g, "⏎\n");
    element(parent, "mark", { class: state, title: `#${tree.committed[place]}, ${state}` }, shown);
  });
  parent.scrollTop = parent.scrollHeight;
}
function factsOf(tree, data) {
  const step = data.steps[tree.step];
  const lost = tree.accepted.length + 1 - tree.committed.length;
  const pairs = [
    ["drafted", `${counted(tree.token_ids.length - 1, "node")}, ${counted(tree.paths, "path")}, ` +
                `draft sampling ${tree.draft_sampling}, plan ${tree.plan}`],
    ["judged by", tree.verifier],
    ["committed", `${counted(tree.committed.length, "token")}, ${tree.accepted.length} accepted` +
                  (lost ? `; ${lost} more came after the end of the text` : "")],
  ];
  if (step) pairs.push(["step of the run", `${tree.step + 1}: ${phasesOf(step)}, ` +
                                           counted(step.args.requests, "request")]);
  if (tree.finish_reason) pairs.push(["ended by", tree.finish_reason]);
  return pairs;
}

// Without trees there are the steps' own figures to read.
function showSteps(data) {
  const browser = byId("browser");
  element(browser, "h2", {}, "Step by step");
  const restart = stepper(browser, number => {
    detail.replaceChildren();
    const step = data.steps[number];
    const shown = ([name, value]) =>
      [name, typeof value === "object" ? JSON.stringify(value) : String(value)];
    facts(detail, [["start", `${step.start.toFixed(2)} ms`], ["took", phasesOf(step)],
                   ...Object.entries(step.args).map(shown)]);
  });
  const detail = element(browser, "dl", { id: "detail" });
  restart(data.steps.length, 0);
}
