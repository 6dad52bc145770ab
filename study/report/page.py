"""A page in one file: its template, pictures, and the JavaScript of its figures, inlined.

A page asks for nothing from anywhere. Its policy forbids every request, and every script but the
two whose hashes it names: text that somebody wrote into a study cannot become a script of the page.
Vega's expressions are interpreted (`ast`), so no text is compiled either.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import vl_convert

from base.files import replaced_file
from study.claims.page import Line
from study.figures.figure import DIRECTORY, DrawnFigure
from study.figures.looks import Runs
from study.report.cells import Table

SCRIPT = """
"use strict";
const page = JSON.parse(document.getElementById("charts").textContent);
const views = new Map();
const options = {ast: true, renderer: "svg", tooltip: {theme: "light"},
  actions: {export: true, source: false, compiled: false, editor: false}};
async function draw() {
  let drawn = 0;
  for (const [name, chart] of Object.entries(page)) {
    const figure = document.getElementById("figure-" + name), box = figure.querySelector(".chart");
    const section = figure.closest("section");
    box.hidden = false;
    views.get(section).push((await vegaEmbed(box, chart, options)).view);
    figure.querySelector("img").hidden = true;
    drawn += 1;
  }
  document.body.dataset.drawn = drawn;
}
function toggle(button, hidden, section) {
  const shown = button.getAttribute("aria-pressed") === "false";
  for (const run of JSON.parse(button.dataset.runs)) shown ? hidden.delete(run) : hidden.add(run);
  button.setAttribute("aria-pressed", shown);
  for (const view of views.get(section)) view.signal("hidden", [...hidden]).runAsync();
}
for (const section of document.querySelectorAll("section")) {
  const bar = section.querySelector(".runs"), hidden = new Set();
  views.set(section, []);
  bar.hidden = false;
  for (const button of bar.querySelectorAll("button"))
    button.addEventListener("click", () => toggle(button, hidden, section));
}
draw();
"""


class Section(NamedTuple):
    """A study, or one of its experiments, as a page shows it.

    Attributes:
        name: of the experiment; empty for the whole study. Its figures and tables are in folders of
            this name.
        title: its heading.
        facts: its size in a sentence.
        runs: their looks.
        figures: in order.
        empty: names of those of which nothing is measured.
        claims: a line each.
        against: what speaks against all of them; empty for nothing.
        choice: sentences after the claims.
        effects: a table per factor.
        tables: the others.
        intervals: what the intervals of tables hold.
    """

    name: str
    title: str
    facts: str
    runs: Runs
    figures: list[DrawnFigure]
    empty: list[str]
    claims: list[Line]
    against: str
    choice: str
    effects: list[Table]
    tables: list[Table]
    intervals: str

    @property
    def prefix(self) -> str:
        """The beginning of the names of its elements."""
        return f"{self.name}-" if self.name else ""

    @property
    def folder(self) -> str:
        """The folder of its figures in theirs, and of its tables in theirs."""
        return f"{self.name}/" if self.name else ""

    @property
    def tested(self) -> list[Line]:
        """The claims for which it has data."""
        return [line for line in self.claims if line.outcome != "not tested"]

    @property
    def untested(self) -> list[Line]:
        """The others."""
        return [line for line in self.claims if line.outcome == "not tested"]


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


def write_page(path: Path, sections: Sequence[Section], **content: Any) -> None:
    """Render the template aside with these sections, then rename the file."""
    figures = {
        section.prefix + figure.name: figure for section in sections for figure in section.figures
    }
    pictures = {key: base64.b64encode(figure.png).decode() for key, figure in figures.items()}
    charts = {key: figure.chart for key, figure in figures.items() if figure.chart}
    text = json.dumps(charts, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no text can end the element that it is in
    scripts = (library(), SCRIPT) if charts else ()
    content |= {"sections": sections, "pictures": pictures, "folder": DIRECTORY, "charts": text}
    content |= {"scripts": scripts, "policy": policy(scripts)}
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
