// A benchmark run: its settings side by side, and what was said.
function showResults(data) {
  const known = data.settings.filter(s => s.acceptance_length !== null);
  const best = known.reduce((most, s) =>
    !most || s.acceptance_length.value > most.acceptance_length.value ? s : most, null);
  if (best) byId("headline").textContent =
    `${best.name} commits ${format(best.acceptance_length.value)} tokens a forward, the most of ` +
    counted(known.length, "setting");
  byId("browser").before(byId("charts"));
  keepDrawn(() => drawResults(data));
  showConversations(data);
}
function drawResults(data) {
  const colour = new Map(data.settings.map((s, i) => [s.name, colourOf(i)]));
  const estimated = key => data.settings.filter(s => s[key] !== null).map(s => {
    const { value, low, high } = s[key];
    const parts = [{ name: s.name, value, colour: colour.get(s.name) }];
    // A single question has no interval.
    if (low === high) return { name: s.name, parts, label: format(value) };
    const label = `${format(value)} [${format(low)}, ${format(high)}]`;
    return { name: s.name, low, high, parts, label };
  });
  rows("Acceptance length", data.definitions["acceptance length"], estimated("acceptance_length"));
  rows("Tokens per second", data.definitions["tokens/s"], estimated("tokens_per_second"));
  const speedups = estimated("speedup");
  if (speedups.length) rows("Speed-up over plain decoding", "prefill is not counted", speedups);
  const drafted = data.settings.filter(s => s.acceptance_by_position.length);
  if (drafted.length)
    lines("Acceptance by position", "share of the trees so deep that accept a token there",
      drafted.map(s => ({ name: s.name, colour: colour.get(s.name),
                          values: s.acceptance_by_position })), "position");
  const section = rows("Milliseconds per token of the answers, by phase", "prefill is counted",
    data.settings.map(s => {
      const parts = phaseParts(s.milliseconds_by_phase);
      return { name: s.name, parts, label: format(parts.reduce((t, p) => t + p.value, 0)) };
    }));
  phaseLegend(section, new Set(data.settings.flatMap(s => Object.keys(s.milliseconds_by_phase))));
}
function showConversations(data) {
  const browser = byId("browser");
  element(browser, "h2", {}, "Conversations");
  const choice = element(browser, "select", { id: "question", "aria-label": "question" });
  const questions = new Map(data.conversations.map(c => [c.question, c.category]));
  for (const [id, category] of questions)
    element(choice, "option", { value: id }, `${id} (${category})`);
  const answers = element(browser, "div", { id: "answers" });
  const show = () => {
    answers.replaceChildren();
    (data.questions[choice.value] ?? []).forEach((turn, number) => {
      const box = element(answers, "div", { class: "text" });
      element(box, "b", {}, `question, turn ${number + 1}: `);
      box.append(turn);
    });
    for (const one of data.conversations.filter(c => c.question === choice.value)) {
      one.turns.forEach((turn, number) => {
        const box = element(answers, "div", { class: "answer" });
        const turns = `turn ${number + 1} of ${one.turns.length}`;
        element(box, "b", {}, `${one.setting}, repeat ${one.repeat + 1}, ${turns}` + (number ? "" :
          `: ${one.tokens} tokens in all, ${one.acceptance_length.toFixed(2)} a forward`));
        box.append(turn);
      });
      if (one.error) element(answers, "p", { class: "note" }, `${one.setting}: ${one.error}`);
    }
  };
  choice.addEventListener("change", show);
  show();
}
