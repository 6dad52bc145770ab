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
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import vl_convert
from PIL import Image

from base.files import replaced_file
from base.quantities import typeset
from study.claims.page import Line, close_in_words
from study.figures.charts import Chart
from study.figures.figure import DIRECTORY, FILES, DrawnFigure
from study.figures.looks import Runs
from study.report.cells import Table

SMALL, SMALL_COLOURS = (300, 240), 24  # pixels at most, twice those on the page; and colours
NARROW = 640  # pixels of a page on which panels are below each other
SCRIPT = """
"use strict";
const page = JSON.parse(document.getElementById("charts").textContent);
const views = new Map();
const options = {ast: true, renderer: "svg", tooltip: {theme: "light"},
  actions: {export: true, source: false, compiled: false, editor: false}};
async function draw() {
  let drawn = 0;
  for (const [name, whole] of Object.entries(page)) {
    const chart = innerWidth < NARROW ? narrowed(whole) : whole;
    const figure = document.getElementById("figure-" + name), box = figure.querySelector(".chart");
    const section = figure.closest("section");
    box.hidden = false;
    views.get(section).push((await vegaEmbed(box, chart, options)).view);
    figure.querySelector("img").hidden = true;
    box.addEventListener("click", event => clicked(event, section));
    drawn += 1;
  }
  document.body.dataset.drawn = drawn;
}
function narrowed(chart) {  // panels below each other, as are entries of legends
  const most = innerWidth - 190;
  return JSON.parse(JSON.stringify(chart), (key, value) => key === "columns" ? 1 :
    key === "width" && typeof value === "number" ? Math.min(value, most) : value);
}
function clicked(event, section) {  // an entry of a legend is the button of its runs
  const item = event.target.__data__, entry = item && item.datum && item.datum.value;
  if (!event.target.closest(".role-legend")) return;
  for (const button of section.querySelectorAll(".runs button"))
    if (JSON.parse(button.dataset.runs).includes(entry)) button.click();
}
function toggle(button, hidden, section) {
  const shown = button.getAttribute("aria-pressed") === "false";
  for (const run of JSON.parse(button.dataset.runs)) shown ? hidden.delete(run) : hidden.add(run);
  button.setAttribute("aria-pressed", shown);
  for (const view of views.get(section)) view.signal("hidden", [...hidden]).runAsync();
  for (const mark of section.querySelectorAll(".role-legend path, .role-legend text")) {
    const item = mark.__data__;
    if (item && item.datum) mark.style.opacity = hidden.has(item.datum.value) ? 0.3 : 1;
  }
}
function beside(details) {  // the picture of the claim, once its verdict is opened
  const box = details.querySelector(".picture"), of = document.getElementById(box.dataset.figure);
  if (!of || box.firstChild) return;
  box.append(of.querySelector("img").cloneNode());
  box.firstChild.hidden = false;
}
for (const details of document.querySelectorAll("details.claim"))
  details.addEventListener("toggle", () => beside(details));
for (const section of document.querySelectorAll("section")) {
  const bar = section.querySelector(".runs"), hidden = new Set();
  views.set(section, []);
  bar.hidden = false;
  for (const button of bar.querySelectorAll("button"))
    button.addEventListener("click", () => toggle(button, hidden, section));
}
draw();
""".replace("NARROW", str(NARROW))


class Section(NamedTuple):
    """A study, or one of its experiments, as a page shows it.

    Attributes:
        name: of the experiment; empty for the whole study. Its figures and tables are in folders of
            this name.
        title: its heading.
        answer: what it found, in one or two lines.
        facts: its size in a sentence.
        quantized: what all its quantizations have in common, in words.
        short: by the title of a quantization what distinguishes it.
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
    answer: str
    facts: str
    quantized: str
    short: dict[str, str]
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

    def figure_of(self, line: Line) -> DrawnFigure | None:
        """Return the figure that shows a claim, or else the first one; None where none is drawn."""
        by_name = {figure.name: figure for figure in self.figures}
        return by_name.get(line.claim.figure) or next(iter(self.figures), None)

    def shortened(self, text: str) -> str:
        """Return a title less what all quantizations have in common."""
        for title, short in self.short.items():
            text = text.replace(title, short)
        return text.removeprefix(", ").removeprefix(": ")

    def chart(self, figure: DrawnFigure) -> Chart | None:
        """Return the chart of a figure, the titles of its panels shortened."""
        if figure.chart is None:
            return None
        panels = [
            panel | {"title": list(map(self.shortened, panel["title"]))}
            for panel in figure.chart["concat"]
        ]
        return figure.chart | {"concat": panels}

    @property
    def printed(self) -> set[str]:
        """The names of figures that a page on paper has: headlines, and those of tested claims."""
        names = {figure.name for figure in self.figures if figure.headline}
        return names | {of.name for line in self.tested if (of := self.figure_of(line))}

    @property
    def tested(self) -> list[Line]:
        """The claims for which it has data."""
        return [line for line in self.claims if line.outcome != "not tested"]

    @property
    def close(self) -> str:
        """The claims that a second study may decide otherwise, in a sentence; '' without any."""
        return close_in_words(self.tested)

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


def _encoded(png: bytes) -> str:
    return base64.b64encode(png).decode()


def _small(png: bytes) -> bytes:
    """Return a picture at the size that it has beside a claim."""
    image, out = Image.open(BytesIO(png)).convert("RGB"), BytesIO()
    image.thumbnail(SMALL)
    image.quantize(SMALL_COLOURS, dither=Image.Dither.NONE).save(out, "png")
    return out.getvalue()


def write_page(path: Path, sections: Sequence[Section], **content: Any) -> None:
    """Render the template aside with these sections, then rename the file."""
    figures = {
        section.prefix + figure.name: (section, figure)
        for section in sections
        for figure in section.figures
    }
    pictures = {key: _encoded(figure.png) for key, (_, figure) in figures.items()}
    charts = {
        key: chart for key, (section, figure) in figures.items() if (chart := section.chart(figure))
    }
    small = {key: _encoded(_small(figure.png)) for key, (_, figure) in figures.items()}
    text = typeset(json.dumps(charts, allow_nan=False, separators=(",", ":")))
    text = text.replace("<", "\\u003c")  # no text can end the element that it is in
    scripts = (library(), SCRIPT) if charts else ()
    content |= {
        "sections": sections,
        "pictures": pictures,
        "small": small,
        "folder": DIRECTORY,
        "charts": text,
    }
    content |= {"kinds": FILES, "scripts": scripts, "policy": policy(scripts)}
    templates = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    # Everything that a template inserts is escaped; an undefined name is an error, not "".
    pages = jinja2.Environment(
        loader=templates,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Of text alone: scripts are markup, and their hashes are in the policy.
        finalize=lambda value: typeset(value) if type(value) is str else value,
    )
    with replaced_file(path) as aside:
        aside.write_text(pages.get_template("report.html").render(content), encoding="utf-8")
