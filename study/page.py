"""The figures of the report's page: pictures that plotly's JavaScript, inlined, replaces by interactive ones.

The page asks for nothing from anywhere. Its policy forbids every request, and every script but the two whose hashes it
names: text that somebody wrote into a study cannot become a script of the page.
"""

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from study.figures import DIRECTORY, Figures
from study.interactive import interactive
from study.plots import Plot

WIDE = 2  # panels side by side from which a figure is wider than the text
CONFIG: Any = {
    "responsive": True,
    "displaylogo": False,
    "scrollZoom": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]],  # none that sends data away
    "plotlyServerURL": "",
}
STYLE = """
figure.wide { width: min(94vw, 88rem); margin-left: 50%; transform: translateX(-50%); }
figure.wide figcaption { margin: 0 auto; } figure.narrow img { max-width: 42rem; } figure .plot { width: 100%; }
#runs { position: sticky; top: 0; z-index: 5; background: #fffffff2; padding: .5rem 0;
  border-bottom: 1px solid #e4e4e4; }
#runs span { color: #555; margin-right: .6rem; } #runs i { display: inline-block; width: .8em; height: .8em;
  border-radius: 50%; margin-right: .35em; vertical-align: -.05em; }
#runs button { font: inherit; font-size: .87rem; background: none; border: 1px solid #ddd; border-radius: 1em;
  padding: .1rem .7rem; margin: .1rem .2rem; cursor: pointer; }
#runs button[aria-pressed="false"] { opacity: .35; text-decoration: line-through; }
[hidden] { display: none !important; }
"""
SCRIPT = """
"use strict";
const page = JSON.parse(document.getElementById("plots").textContent);
const hidden = new Set();
async function draw() {
  for (const [name, plot] of Object.entries(page.plots)) {
    const figure = document.getElementById("figure-" + name);
    const box = figure.querySelector(".plot");
    box.hidden = false;
    await Plotly.newPlot(box, plot.data, plot.layout, page.config);
    figure.querySelector("img").hidden = true;
  }
  document.body.dataset.drawn = Object.keys(page.plots).length;
}
function toggle(button) {
  const run = button.dataset.run, shown = hidden.delete(run);
  if (!shown) hidden.add(run);
  button.setAttribute("aria-pressed", shown);
  for (const box of document.querySelectorAll(".plot")) {
    const traces = box.data.flatMap((trace, place) => trace.meta === run ? [place] : []);
    if (traces.length) Plotly.restyle(box, {visible: shown}, traces);
  }
}
document.getElementById("runs").hidden = false;
for (const button of document.querySelectorAll("#runs button")) button.addEventListener("click", () => toggle(button));
draw();
"""


def policy() -> str:
    """Content-Security-Policy of the page, for its head."""
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in (get_plotlyjs(), SCRIPT))
    rules = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
    return f"{rules}; base-uri 'none'; form-action 'none'"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def figures_section(figures: Figures, captions: dict[str, str], directory: Path) -> str:
    """Every figure, the buttons that hide and show runs in all of them, and a line on what holds no data yet."""
    empty = ", ".join(name.replace("_", " ") for name in figures.empty)
    note = f'<p class="note">Not drawn, as nothing of it is measured yet: {escape(empty)}.</p>' if empty else ""
    drawn = "".join(_figure(name, plot, captions[name], directory) for name, plot in figures.plots.items())
    return f"<h2>Figures</h2>{_buttons(figures)}{drawn}{note}"


def _buttons(figures: Figures) -> str:
    plot = next(iter(figures.plots.values()), None)
    buttons = "".join(
        f'<button type="button" data-run="{escape(label)}" aria-pressed="true">'
        f'<i style="background:{mark.colour}"></i>{escape(label)}</button>'
        for label, mark in (plot.looks.items() if plot else ())
    )
    heading = escape(plot.heading if plot else "")
    return f'<div id="runs" hidden><span>{heading}</span>{buttons}</div>'


def _figure(name: str, plot: Plot, caption: str, directory: Path) -> str:
    data = base64.b64encode((directory / DIRECTORY / f"{name}.png").read_bytes()).decode()
    links = ", ".join(f'<a href="{DIRECTORY}/{name}.{kind}">{kind.upper()}</a>' for kind in ("csv", "pdf", "png"))
    kind = "wide" if plot.columns >= WIDE else "narrow"
    return (
        f'<figure id="figure-{name}" class="{kind}"><div class="plot" hidden></div>'
        f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)} Beside this page: {links}.</figcaption></figure>"
    )


def scripts(figures: Figures) -> str:
    """What makes the figures interactive, for the end of the body."""
    plots = {name: interactive(plot) for name, plot in figures.plots.items()}
    content = json.dumps({"plots": plots, "config": CONFIG}, allow_nan=False, separators=(",", ":"))
    inert = content.replace("<", "\\u003c")  # no text can end the element that it lies in
    return (
        f'<script type="application/json" id="plots">{inert}</script>'
        f"<script>{get_plotlyjs()}</script><script>{SCRIPT}</script>"
    )
