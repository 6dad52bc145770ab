"""A page in one file: its template, pictures, and the JavaScript of its figures, inlined.

A page asks for nothing from anywhere. Its policy forbids every request, and every script but the
two whose hashes it names: text that somebody wrote into a study cannot become a script of the page.
Vega's expressions are interpreted (`ast`), so no text is compiled either.
"""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from base.files import replaced_file
from study.figures.figure import DIRECTORY, DrawnFigure
from study.figures.looks import Runs

SCRIPT = """
"use strict";
const page = JSON.parse(document.getElementById("charts").textContent);
const hidden = new Set(), views = [];
const options = {ast: true, renderer: "svg", tooltip: {theme: "light"},
  actions: {export: true, source: false, compiled: false, editor: false}};
async function draw() {
  for (const [name, chart] of Object.entries(page)) {
    const figure = document.getElementById("figure-" + name), box = figure.querySelector(".chart");
    box.hidden = false;
    views.push((await vegaEmbed(box, chart, options)).view);
    figure.querySelector("img").hidden = true;
  }
  document.body.dataset.drawn = views.length;
}
function toggle(button) {
  const shown = button.getAttribute("aria-pressed") === "false";
  for (const run of JSON.parse(button.dataset.runs)) shown ? hidden.delete(run) : hidden.add(run);
  button.setAttribute("aria-pressed", shown);
  for (const view of views) view.signal("hidden", [...hidden]).runAsync();
}
const bar = document.getElementById("runs");
bar.hidden = false;
for (const button of bar.querySelectorAll("button"))
  button.addEventListener("click", () => toggle(button));
draw();
"""


@cache
def library() -> str:
    """Return the JavaScript of Vega, Vega-Lite and Vega-Embed."""
    bundle: Any = vl_convert.javascript_bundle  # its stub asks for a snippet, which is optional
    text: str = bundle()
    assert "</script" not in text
    return text


def policy(scripts: tuple[str, ...]) -> str:
    """Return the Content-Security-Policy of a page with these scripts."""
    # Browsers compare each inline script with these hashes, and run no other.
    digests = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    )
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    rules = ("default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'")
    return "; ".join((*rules, "img-src data: blob:", "base-uri 'none'", "form-action 'none'"))


def write_page(path: Path, shown: list[DrawnFigure], runs: Runs, **content: Any) -> None:
    """Render the template aside with these figures, then rename the file."""
    pictures = {figure.name: base64.b64encode(figure.png).decode() for figure in shown}
    charts = {figure.name: figure.chart for figure in shown if figure.chart}
    text = json.dumps(charts, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no text can end the element that it is in
    scripts = (library(), SCRIPT) if charts else ()
    content |= {"figures": shown, "pictures": pictures, "folder": DIRECTORY, "charts": text}
    content |= {"runs": runs, "scripts": scripts, "policy": policy(scripts)}
    templates = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    # Everything that a template inserts is escaped; an undefined name is an error, not "".
    pages = jinja2.Environment(
        loader=templates,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with replaced_file(path) as aside:
        aside.write_text(pages.get_template("report.html").render(content), encoding="utf-8")
