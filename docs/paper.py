"""The figures of arXiv 2510.06213 with their commands, prices and pictures, for docs/reproduce.md.

python -m docs.paper runs/tiny-paper

takes the pictures from that study; `docs.generate` writes the table, and names the pictures.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from docs.models import table
from study.experiments import Experiment
from study.figures.figure import DIRECTORY
from study.machine.disk import gigabytes, needed_bytes
from study.machine.hardware import Hardware
from study.machine.needs import Needs
from study.machine.prices import Prices
from study.recipes.resolve import resolve
from study.steps import steps_of

STUDY = "tiny-paper"
PICTURES = Path(__file__).parent / "pictures" / "paper"
WIDTH, MOST_BYTES, COLOURS = 760, 60_000, (256, 128, 64, 32)  # of a picture
GPU = "h100"


class PaperFigure(NamedTuple):
    """A figure of the paper.

    Attributes:
        number: of the figure, or where the paper has it.
        shows: in words.
        recipe: the study at full size.
        settings: of a released model.
        small: the experiment of `tiny-paper` with the same in small, or `tiny`; empty for none.
    """

    number: str
    shows: str
    recipe: str
    settings: tuple[str, ...] = ()
    small: str = ""

    @property
    def command(self) -> str:
        """The command after `python -m study run`."""
        return " ".join([self.recipe, *(f"--set {setting}" for setting in self.settings)])


def _released(number: str, shows: str, *settings: str) -> PaperFigure:
    return PaperFigure(number, shows, "trajectory", settings)


SMOLLM3 = "source=HuggingFaceTB/SmolLM3-3B-checkpoints,HuggingFaceTB/SmolLM3-3B"
OLMO2 = "allenai/OLMo-2-0425-1B,allenai/OLMo-2-1124-7B,allenai/OLMo-2-1124-13B"
FIGURES = (
    _released("1", "SmolLM3-3B: losses, and the error at 3 and 4 bits", "every=10", SMOLLM3),
    _released(
        "2",
        "OLMo 2 of four sizes, soups as stars",
        "every=20",
        f"source={OLMO2},allenai/OLMo-2-0325-32B",
    ),
    _released(
        "of section 3.2 and appendix A",
        "accuracy, AWQ and LLM.int8() along training",
        "every=10",
        SMOLLM3,
        "settings=paper",
    ),
    _released(
        "of the authors' repository",
        "averages along OLMo2-7B",
        "source=allenai/OLMo-2-1124-7B",
        "averages=lawa5",
    ),
    PaperFigure("section 4.1", "token budgets", "pythia-160m-budgets", small="budgets"),
    PaperFigure("section 4.2", "cosine and WSD", "pythia-160m-schedules", small="schedules"),
    PaperFigure("3", "learning rates", "pythia-160m-lr", small="learning-rates"),
    PaperFigure("4", "averages of weights, and cooldowns", "pythia-160m-lawa", small="averages"),
    PaperFigure("5", "more data under cosine and WSD", "pythia-70m-kumar", small="data"),
    PaperFigure("6", "curvature along training", "pythia-160m-lr", small="curvature"),
    PaperFigure("8", "slices of the loss", "pythia-160m-lr", small="curvature"),
    _released("12", "Amber-7B", "source=LLM360/Amber"),
    _released("13", "Apertus-8B", "source=swiss-ai/Apertus-8B-2509"),
    PaperFigure("19", "weight decay", "pythia-160m-weight-decay", small="weight-decay"),
    PaperFigure("20", "AdamW and AdamC", "pythia-160m-decay", small="adamc"),
    PaperFigure("23", "OLMo2-7B at four peaks", "olmo2-7b-lr", small="tiny"),
    PaperFigure(
        "of the workshop version",
        "the same, cosine to 300B",
        "olmo2-7b-lr-cosine300b",
        small="tiny",
    ),
    _released("number not known", "OLMo-1B, the 7B likewise", "source=allenai/OLMo-1B-hf"),
    _released(
        "number not known",
        "open-sci-ref",
        "source=open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096",
    ),
    _released("of the talk", "Pythia", "source=EleutherAI/pythia-160m"),
)
# Of each experiment the figure that is shown, and what it is in words.
SHOWN = {
    "budgets": ("quantization_error", "The error along training, a cooldown to every budget."),
    "schedules": ("quantization_error", "The error along training under cosine and WSD."),
    "learning-rates": ("quantization_error", "The error along training at four peaks."),
    "averages": ("averages", "Averages along the constant rate, and cooldowns from it."),
    "data": ("ends", "The error at the end of every budget, under cosine and WSD."),
    "curvature": ("curvature", "Trace and largest eigenvalue along training at four peaks."),
    "weight-decay": ("quantization_error", "The error along training at four weight decays."),
    "adamc": ("quantization_error", "The error along training, decayed by AdamW and AdamC."),
}


@cache
def _costs(recipe: str) -> tuple[str, str, str]:
    """Return H100-hours of training and of measuring, and GB on disk, of a recipe in words."""
    study = resolve(recipe)
    needs = Needs(study, Hardware(1))
    hours = {"train": 0.0, "measure": 0.0}
    for price in Prices(needs, steps_of(study), GPU).by_kind():
        assert price.hours
        hours["train" if price.kind == "train" else "measure"] += price.hours.expected
    disk = gigabytes(sum(needed_bytes(study).values()))
    return (_rounded(hours["train"]), _rounded(hours["measure"]), disk)


def _rounded(hours: float) -> str:
    """Return hours with two digits, as estimates have: 45,000."""
    return f"{float(f'{hours:.2g}'):,g}"


def _experiments() -> dict[str, Experiment]:
    return {experiment.name: experiment for experiment in resolve(STUDY).experiments}


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return f"#{kept.replace(' ', '-')}"


def figure_table() -> str:
    """Return a line per figure of the paper: command, cost, and the same in small."""
    titles = {name: experiment.title for name, experiment in _experiments().items()}
    heads = ["figure", "shows", "`python -m study run ...`", "training", "measuring", "GB", "small"]
    lines = [
        [
            each.number,
            each.shows,
            f"`{each.command}`",
            # What a released model holds is known where its revisions are: `show` asks for them.
            *(("none", "by `show`", "by `show`") if each.settings else _costs(each.recipe)),
            _in_small(each.small, titles),
        ]
        for each in FIGURES
    ]
    return table(heads, lines)


def _in_small(study: str, titles: Mapping[str, str]) -> str:
    """Return the link to the picture of an experiment, or to the page of the demo."""
    if study == "tiny":
        return "[`tiny`](tutorial.md)"
    return f"[picture]({_anchor(titles[study])})" if _picture(study).is_file() else ""


def _picture(experiment: str) -> Path:
    return PICTURES / f"{experiment}.png"


def pictures() -> str:
    """Return a section per experiment of `tiny-paper` whose picture is there."""
    return "\n".join(_pictured())


PARTS = {"figures": figure_table, "pictures": pictures}


def page(text: str) -> str:
    """Return the page with the generated parts as they are now, each between its two comments."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: by `python -m docs.generate` -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        assert all((found, closed)), f"{begin} and {end} are to be in the page"
        text = f"{before}{begin}\n\n{part()}\n{end}{after}"
    return text


def _pictured() -> Iterator[str]:
    for name, experiment in _experiments().items():
        _, words = SHOWN[name]
        if _picture(name).is_file():
            yield f"### {experiment.title}\n\n![{words}](pictures/paper/{name}.png)\n\n*{words}*\n"


def take_pictures(directory: Path) -> None:
    """Write docs/pictures/paper/EXPERIMENT.png from the figures of the study in a directory."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, (figure, _) in SHOWN.items():
        path = _picture(name)
        path.write_bytes(small_picture(directory / DIRECTORY / name / f"{figure}.png"))
        print(path, path.stat().st_size)


def small_picture(path: Path) -> bytes:
    """Return a picture as PNG of WIDTH pixels at most, and of MOST_BYTES, by fewer colours."""
    with Image.open(path) as image:
        picture = image.convert("RGB")
    if picture.width > WIDTH:
        height = round(picture.height * WIDTH / picture.width)
        picture = picture.resize((WIDTH, height), Image.Resampling.LANCZOS)
    # The default takes the colours of the most pixels, which are the greys of axes and bands.
    spread = Image.Quantize.MAXCOVERAGE
    for colours in COLOURS:
        out = BytesIO()
        picture.quantize(colours, spread, dither=Image.Dither.NONE).save(out, "png", optimize=True)
        if out.tell() <= MOST_BYTES:
            return out.getvalue()
    raise AssertionError(f"{path} takes {out.tell()} bytes with {colours} colours")


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]))
