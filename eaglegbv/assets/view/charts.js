// Charts as plain SVG, in the page's own pixels, so that text is as large on a telephone.
const PHASES = ["prefill", "draft", "forward", "verify", "commit", "other"];
const colourOf = number => `var(--c${number % 10})`;
const MOST_POINTS = 300;
const WIDEST = 900, LETTER = 6.4; // pixels of a chart, and of a letter in it
const DASHES = ["none", "8 4", "2 4", "10 3 2 3"];
const dashOf = number => DASHES[number % DASHES.length];
const chartWidth = () => Math.min(WIDEST, byId("charts").clientWidth || WIDEST);

function chart(title, note, height) {
  const section = element(byId("charts"), "section", { class: "chart" });
  element(section, "h2", {}, title);
  if (note) element(section, "p", { class: "note" }, note);
  const attributes = { width: chartWidth(), height, role: "img", "aria-label": title };
  return { section, svg: shape(section, "svg", attributes) };
}
function legend(section, entries) {
  const line = element(section, "p", { class: "legend" });
  for (const [name, colour, dash] of entries) {
    const entry = element(line, "span");
    if (dash === undefined) element(entry, "i", { style: `background:${colour}` });
    else {
      const sample = shape(entry, "svg", { width: 30, height: 8, "aria-hidden": "true" });
      shape(sample, "line", { x1: 0, x2: 26, y1: 4, y2: 4,
                              style: `stroke:${colour};stroke-width:3;stroke-dasharray:${dash}` });
    }
    entry.append(name);
  }
}
// The distance of about four ticks up to the highest value: 1, 2, 2.5 or 5 times a power of ten.
function roundStep(highest, whole) {
  const power = 10 ** Math.floor(Math.log10(highest / 4));
  const steps = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map(factor => factor * power);
  const step = steps.find(candidate => candidate >= highest / 4 * (1 - 1e-9));
  return whole ? Math.max(1, step) : step;
}
// One row a setting: parts end to end, and a whisker where there is an interval. Names stand above
// their bars where there is no room beside them.
function rows(title, note, entries) {
  const width = chartWidth();
  const longest = texts => Math.ceil(LETTER * Math.max(0, ...texts.map(text => text.length)));
  const named = longest(entries.map(entry => entry.name)) + 16;
  const above = named > width / 3;
  const left = above ? 2 : named, right = width - longest(entries.map(entry => entry.label)) - 10;
  const lift = above ? 16 : 0, step = 24 + lift, height = 10 + step * entries.length;
  const { section, svg } = chart(title, note, height);
  const ends = entries.map(e => e.high ?? e.parts.reduce((sum, p) => sum + p.value, 0));
  const scale = (right - left) / Math.max(1e-12, ...ends);
  entries.forEach((entry, row) => {
    const y = 5 + row * step + lift;
    let x = left;
    const where = above ? { x: left, y: y - 3 } : { x: left - 8, y: y + 13, "text-anchor": "end" };
    shape(svg, "text", where, clipped(entry.name, Math.floor(width / LETTER)), entry.name);
    for (const part of entry.parts) {
      const width = scale * Math.max(0, part.value);
      shape(svg, "rect", { x, y: y + 2, width, height: 16, style: `fill:${part.colour}` }, null,
            `${part.name}: ${format(part.value)}`);
      x += width;
    }
    if (entry.low !== undefined) {
      const middle = y + 10;
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
  const left = 50, right = chartWidth() - 24, top = 10, bottom = 220;
  const { section, svg } = chart(title, note, 255);
  const values = series.flatMap(s => s.values);
  const longest = series.reduce((most, s) => Math.max(most, s.values.length), 1);
  const highest = values.reduce((most, v) => Math.max(most, v), 0) || 1;
  const step = roundStep(highest, values.every(Number.isInteger));
  const ticks = Math.ceil(highest / step - 1e-9);
  const x = i => longest === 1 ? (left + right) / 2 : left + (right - left) * i / (longest - 1);
  const y = value => bottom - (bottom - top) * value / (step * ticks);
  for (let tick = 0; tick <= ticks; tick++) {
    const value = step * tick;
    shape(svg, "line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" });
    shape(svg, "text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" },
          String(Number(value.toPrecision(6))));
  }
  const apart = Math.ceil(longest / ((right - left) / 52));
  for (let i = 0; i < longest; i += apart)
    shape(svg, "text", { x: x(i), y: bottom + 16, "text-anchor": "middle" }, String(i + 1));
  shape(svg, "text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, xlabel);
  // Lines that coincide are told apart: later ones are broken, thinner, and have smaller points.
  series.forEach((one, number) => {
    const points = one.values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
    const later = Math.min(3, series.length - 1 - number), dash = dashOf(number);
    const thickness = longest > MOST_POINTS ? 1 : 2 + later;
    const style = `stroke:${one.colour};fill:none;stroke-width:${thickness};stroke-dasharray:${dash}`;
    shape(svg, "polyline", { points, style });
    const radius = (longest > 60 ? 2 : 3) + later;
    if (longest <= MOST_POINTS)
      one.values.forEach((value, i) => shape(svg, "circle",
        { cx: x(i), cy: y(value), r: radius, style: `fill:${one.colour}` }, null,
        `${one.name}, ${i + 1}: ${value.toFixed(3)}`));
  });
  legend(section, series.map((s, i) => [s.name, s.colour, dashOf(i)]));
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
