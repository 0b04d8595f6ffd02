// Charts as plain SVG, 900 units wide.
const PHASES = ["prefill", "draft", "forward", "verify", "commit", "other"];
const colourOf = number => `var(--c${number % 10})`;
const MOST_POINTS = 300;

function chart(title, note, height) {
  const section = element(byId("charts"), "section", { class: "chart" });
  element(section, "h2", {}, title);
  if (note) element(section, "p", { class: "note" }, note);
  const attributes = { viewBox: `0 0 900 ${height}`, role: "img", "aria-label": title };
  return { section, svg: shape(section, "svg", attributes) };
}
function legend(section, entries) {
  const line = element(section, "p", { class: "legend" });
  for (const [name, colour] of entries) {
    const entry = element(line, "span");
    element(entry, "i", { style: `background:${colour}` });
    entry.append(name);
  }
}
// One row a setting: parts end to end, and a whisker where there is an interval.
function rows(title, note, entries) {
  const left = 210, right = 790, step = 24, height = 10 + step * entries.length;
  const { section, svg } = chart(title, note, height);
  const ends = entries.map(e => e.high ?? e.parts.reduce((sum, p) => sum + p.value, 0));
  const scale = (right - left) / Math.max(1e-12, ...ends);
  entries.forEach((entry, row) => {
    const y = 5 + row * step;
    let x = left;
    shape(svg, "text", { x: left - 8, y: y + 13, "text-anchor": "end" }, clipped(entry.name, 32),
          entry.name);
    for (const part of entry.parts) {
      const width = scale * Math.max(0, part.value);
      shape(svg, "rect", { x, y: y + 2, width, height: step - 8, style: `fill:${part.colour}` },
            null, `${part.name}: ${format(part.value)}`);
      x += width;
    }
    if (entry.low !== undefined) {
      const middle = y + step / 2 - 2;
      shape(svg, "line", { x1: left + scale * entry.low, x2: left + scale * entry.high,
                           y1: middle, y2: middle, class: "whisker" });
      x = Math.max(x, left + scale * entry.high);
    }
    shape(svg, "text", { x: x + 6, y: y + 13 }, entry.label);
  });
  return section;
}
// Lines over whole numbers from 1, from 0 up.
function lines(title, note, series, xlabel) {
  const left = 50, right = 880, top = 10, bottom = 220;
  const { section, svg } = chart(title, note, 255);
  const longest = series.reduce((most, s) => Math.max(most, s.values.length), 1);
  const highest = series.flatMap(s => s.values).reduce((most, v) => Math.max(most, v), 1e-12);
  const x = i => longest === 1 ? (left + right) / 2 : left + (right - left) * i / (longest - 1);
  const y = value => bottom - (bottom - top) * value / highest;
  for (let tick = 0; tick <= 4; tick++) {
    const value = highest * tick / 4;
    shape(svg, "line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" });
    shape(svg, "text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value));
  }
  const apart = Math.ceil(longest / 16);
  for (let i = 0; i < longest; i += apart)
    shape(svg, "text", { x: x(i), y: bottom + 16, "text-anchor": "middle" }, String(i + 1));
  shape(svg, "text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, xlabel);
  for (const one of series) {
    const points = one.values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
    const style = `stroke:${one.colour};fill:none;stroke-width:${longest > MOST_POINTS ? 1 : 2}`;
    shape(svg, "polyline", { points, style });
    if (longest <= MOST_POINTS)
      one.values.forEach((value, i) => shape(svg, "circle",
        { cx: x(i), cy: y(value), r: longest > 60 ? 2 : 3, style: `fill:${one.colour}` }, null,
        `${one.name}, ${i + 1}: ${value.toFixed(3)}`));
  }
  legend(section, series.map(s => [s.name, s.colour]));
}
function phaseColour(name) {
  return `var(--${PHASES.includes(name) ? name : "other"})`;
}
function phaseParts(phases) {
  return Object.entries(phases).map(([name, value]) =>
    ({ name: `${name}, ms`, value, colour: phaseColour(name) }));
}
function phaseLegend(section, phases) {
  legend(section, PHASES.filter(name => phases.has(name)).map(name => [name, phaseColour(name)]));
}
