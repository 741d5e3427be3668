"""CSS and JavaScript of the report, inlined so that the page loads no external resource."""

from .svg import NUM_COLORS

CHART_STYLE = """
:root { --paper:#ffffff; --card:#f7f8fa; --ink:#1c2430; --soft:#667085; --edge:#e2e6ec; --accent:#0072b2;
  --good:#0a7f4f; --bad:#b42318;
  --c0:#0072b2; --c1:#d55e00; --c2:#009e73; --c3:#cc79a7; --c4:#e69f00; --c5:#56b4e9; --c6:#7f7f7f; --c7:#a08a00;
  --c8:#332288; --c9:#882255; --c10:#44aa99; --c11:#999933; }
@media (prefers-color-scheme: dark) { :root { --paper:#12161c; --card:#1a2028; --ink:#e6eaf0; --soft:#98a2b3;
  --edge:#2c3440; --accent:#56b4e9; --good:#4cc38a; --bad:#f97066; --c0:#4aa8e0; --c1:#f08a4b; --c2:#3cc79f;
  --c3:#dd98bf; --c4:#f0b84a; --c5:#8fd0f5; --c6:#a6a6a6; --c7:#c9b440; --c8:#8f86d9; --c9:#c76b98;
  --c10:#6fc7b8; --c11:#c5c56a; } }
.grid { stroke:var(--edge); stroke-width:1; }
.tick { fill:var(--soft); font-size:10.5px; } .line { fill:none; stroke-width:1.7; stroke-linejoin:round; }
.line.raw { stroke-width:1; opacity:.4; }
.dot { opacity:0; } .dot.few { opacity:1; r:2.4; } .dot:hover { opacity:1; r:4; } .bar:hover { opacity:.75; }
"""
"""Colors, light and dark, and the parts of a chart: also for an SVG file of its own."""
CHART_STYLE += "".join(
    f".line.c{i} {{ stroke:var(--c{i}) }} .dot.c{i}, .bar.c{i} {{ fill:var(--c{i}) }} "
    f".legend i.c{i} {{ background:var(--c{i}) }}\n"
    for i in range(NUM_COLORS)
)

_PAGE_STYLE = """
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.5 system-ui, sans-serif; }
main { max-width:1180px; margin:0 auto; padding:0 20px 60px; }
nav { position:sticky; top:0; z-index:2; background:var(--paper); border-bottom:1px solid var(--edge); }
nav div { max-width:1180px; margin:0 auto; padding:9px 20px; display:flex; gap:18px; flex-wrap:wrap;
  align-items:baseline; }
nav b { margin-right:auto; } nav a { color:var(--soft); text-decoration:none; } nav a:hover { color:var(--accent); }
h1 { font-size:24px; margin:26px 0 4px; overflow-wrap:anywhere; }
h2 { font-size:18px; margin:38px 0 12px; scroll-margin-top:52px; }
.soft { color:var(--soft); } .num { font-variant-numeric:tabular-nums; text-align:right; white-space:nowrap; }
.tiles { display:grid; grid-template-columns:repeat(auto-fill,minmax(215px,1fr)); gap:12px; margin-top:16px; }
.tile { background:var(--card); border:1px solid var(--edge); border-radius:8px; padding:10px 14px; }
.tile b { display:block; font-size:18px; font-variant-numeric:tabular-nums; } .tile small { white-space:nowrap; }
.tile span { color:var(--soft); font-size:13px; } .up { color:var(--good); } .down { color:var(--bad); }
.grid3 { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr)); gap:14px; }
.sides { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr)); }
figure { margin:0; background:var(--card); border:1px solid var(--edge); border-radius:8px; padding:10px 12px 4px; }
figcaption { font-weight:600; font-size:14px; } figcaption .soft { font-weight:400; font-size:12px; margin-left:6px; }
.legend { font-size:12px; color:var(--soft); min-height:18px; }
.legend span { display:inline-block; margin-right:10px; }
.legend i { display:inline-block; width:10px; height:10px; border-radius:2px; margin-right:4px; }
svg { width:100%; height:auto; display:block; }
table { border-collapse:collapse; width:100%; font-size:14px; }
th { text-align:left; color:var(--soft); font-weight:500; } th.num { text-align:right; }
th, td { padding:4px 10px; border-bottom:1px solid var(--edge); } td.share { width:32%; }
.wide { overflow-x:auto; } .wide td:first-child { white-space:nowrap; }
.wide th { white-space:normal; }
.track { background:var(--edge); border-radius:3px; height:10px; } .fill { background:var(--accent); border-radius:3px;
  height:10px; }
.bar-row { display:flex; gap:10px; flex-wrap:wrap; align-items:center; margin:8px 0 12px; }
input, select { font:inherit; color:inherit; background:var(--paper); border:1px solid var(--edge); border-radius:6px;
  padding:5px 9px; } input[type=search] { flex:1 1 260px; } input[type=number] { width:92px; }
button { font:inherit; color:var(--accent); background:none; border:1px solid var(--edge); border-radius:6px;
  padding:5px 14px; cursor:pointer; }
.sample { border:1px solid var(--edge); border-radius:8px; margin:10px 0; background:var(--card); }
.sample header { display:flex; gap:2px 14px; flex-wrap:wrap; padding:7px 14px; border-bottom:1px solid var(--edge);
  font-size:13px; color:var(--soft); } .sample header b { color:var(--ink); }
.sample .text { padding:8px 14px; white-space:pre-wrap; overflow-wrap:anywhere;
  font:13.5px/1.5 ui-monospace, monospace; }
.sample .prompt { color:var(--soft); } .sample .response { border-top:1px dashed var(--edge); }
mark { background:#ffd84d; color:#1c2430; }
details { margin-top:12px; } summary { cursor:pointer; font-weight:600; }
pre { background:var(--card); border:1px solid var(--edge); border-radius:8px; padding:12px 14px; overflow:auto;
  font:13px/1.5 ui-monospace, monospace; max-height:520px; }
.chart { overflow-x:auto; }
@media (max-width:640px) { main { padding:0 14px 40px; } h1 { font-size:20px; }
  nav div { flex-wrap:nowrap; overflow-x:auto; scrollbar-width:none; white-space:nowrap; padding:9px 14px; }
  .tiles { grid-template-columns:repeat(auto-fill,minmax(150px,1fr)); gap:8px; } .tile b { font-size:16px; }
  .stack svg { width:760px; max-width:none; } .share { display:none; }
  table { font-size:13px; } th, td { padding:4px 6px; } .wide th { min-width:70px; }
  .wide td:first-child { white-space:normal; min-width:150px; } }
@media print { nav, .bar-row, button { display:none; } }
"""
STYLE = CHART_STYLE + _PAGE_STYLE

SCRIPT = """
"use strict";
const $ = (id) => document.getElementById(id);
const records = JSON.parse($("records").textContent);
const known = new Set(["step", "prompt", "response", "reward"]);
for (const r of records)
  r._text = [r.prompt, r.response, r.ground_truth ?? "", r.run ?? ""].join(" ").toLowerCase();
let shown = 25;

function add(parent, tag, text, cls) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  parent.append(node);
  return node;
}
function addMarked(parent, text, words) {
  const lower = text.toLowerCase();
  let at = 0;
  // Where lower-casing changes the length, positions would not fit: then nothing is marked.
  while (lower.length === text.length && words.length && at < text.length) {
    let best = -1, length = 0;
    for (const w of words) {
      const i = lower.indexOf(w, at);
      if (i >= 0 && (best < 0 || i < best)) { best = i; length = w.length; }
    }
    if (best < 0) break;
    parent.append(text.slice(at, best));
    add(parent, "mark", text.slice(best, best + length));
    at = best + length;
  }
  parent.append(text.slice(at));
}
function card(r, words) {
  const box = document.createElement("article");
  box.className = "sample";
  const head = add(box, "header");
  add(head, "span", "step " + r.step);
  const reward = add(head, "span", "reward ");
  add(reward, "b", r.reward === null ? "not a number" : String(Math.round(r.reward * 1e4) / 1e4));
  for (const [key, value] of Object.entries(r)) {
    if (known.has(key) || key.startsWith("_") || value === null) continue;
    add(head, "span", key.replaceAll("_", " ") + " " + (typeof value === "object" ? JSON.stringify(value) : value));
  }
  addMarked(add(box, "div", undefined, "text prompt"), r.prompt, words);
  addMarked(add(box, "div", undefined, "text response"), r.response, words);
  return box;
}
function matching(words) {
  const low = parseFloat($("low").value), high = parseFloat($("high").value), step = $("step").value;
  const found = records.filter((r) => words.every((w) => r._text.includes(w))
    && !(r.reward < low) && !(r.reward > high) && (step === "" || String(r.step) === step));
  const order = { new: (a, b) => b.step - a.step, old: (a, b) => a.step - b.step,
    best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward }[$("order").value];
  return found.sort(order);
}
function draw() {
  const words = $("query").value.toLowerCase().split(/\\s+/).filter(Boolean);
  const found = matching(words);
  $("samples").replaceChildren(...found.slice(0, shown).map((r) => card(r, words)));
  const mean = found.length ? found.reduce((s, r) => s + r.reward, 0) / found.length : 0;
  $("count").textContent = found.length + " of " + records.length + " samples"
    + (found.length ? ", mean reward " + mean.toFixed(3) : "");
  $("more").hidden = found.length <= shown;
}
if (records.length) {
  for (const step of [...new Set(records.map((r) => r.step))]) add($("step"), "option", step).value = step;
  for (const id of ["query", "low", "high", "step", "order"])
    $(id).addEventListener("input", () => { shown = 25; draw(); });
  $("more").addEventListener("click", () => { shown += 50; draw(); });
  draw();
}
$("metric-query")?.addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of document.querySelectorAll("#metric-rows tr"))
    row.hidden = !words.every((w) => row.dataset.name.includes(w));
});
"""
