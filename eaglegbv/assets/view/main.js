// Draw charts now, and again where the page gets another width.
function keepDrawn(draw) {
  let width = chartWidth();
  draw();
  addEventListener("resize", () => {
    if (chartWidth() === width) return;
    width = chartWidth();
    byId("charts").replaceChildren();
    draw();
  });
}
const data = JSON.parse(byId("data").textContent);
byId("title").textContent = data.title;
facts(byId("facts"), data.facts);
for (const note of data.notes) element(byId("notes"), "p", { class: "note warning" }, note);
({ results: showResults, trace: showTrace })[data.kind](data);
