"""Several studies side by side: their table, their scaling figure and their fitted power laws."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from base.errors import UserError
from base.files import replaced_file
from base.statistics import INTERVAL_LEVEL
from dynamics.across.ends import End, ends_of, write_ends
from dynamics.across.figure import scaling
from dynamics.across.fit import Point, PowerLaw, fit
from dynamics.claims.verdict import FIGURES
from study.definition import Study
from study.figures.drawing import pictures_of, write_rows
from study.measurements.titles import spec_title


def write_comparison(studies: Mapping[Path, Study], out: Path) -> Iterator[str]:
    """Write ends.parquet and ends.csv, and scaling.csv, .png and .pdf; yield what they say.

    Args:
        studies: by their directories.
        out: directory of the files.

    Raises:
        UserError: no study holds an end of training, or one has no table.
    """
    ends = [end for directory, study in studies.items() for end in ends_of(directory, study)]
    if not ends:
        raise UserError("no run of these studies is at its end yet; compare them when one is")
    out.mkdir(parents=True, exist_ok=True)
    write_ends(out / "ends.parquet", ends, list(studies.values()))
    write_rows(ends, out / "ends.csv")
    yield f"{out / 'ends.csv'}: {len(ends)} ends of training of {len(studies)} studies"

    specs = _common(list(studies.values()))
    laws: dict[str, PowerLaw] = {}
    for spec in specs:
        for figure, name in FIGURES.items():
            column = f"quant/{spec}/{figure}"
            try:
                laws[column] = fit_column(ends, column)
                words = law_text(laws[column])
            except UserError as reason:
                words = f"not fitted: {reason}"
            yield f"{name} ({spec_title(spec)}): {words}"

    drawn = scaling(ends, laws, specs)
    if drawn:
        write_rows(drawn.rows, out / "scaling.csv")
        for kind, content in pictures_of(drawn.chart).items():
            with replaced_file(out / f"scaling.{kind}") as aside:
                aside.write_bytes(content)
        yield str(out / "scaling.png")


def _common(studies: Sequence[Study]) -> list[str]:
    """Return the specs that every study quantizes every checkpoint with."""
    first, *others = (study.quantization.specs for study in studies)
    return [spec for spec in first if all(spec in own for own in others)]


def fit_column(ends: Sequence[End], column: str) -> PowerLaw:
    """Return the power law of a column; UserError as `fit`, or for ends of different texts."""
    measured_ends = [end for end in ends if None not in (end.get("parameters"), end.get(column))]
    texts = {end.get("evaluation_sha256") for end in measured_ends}
    if len(texts) > 1:
        raise UserError(f"the ends are measured on {len(texts)} different texts; measure on one")
    return fit([Point(end["parameters"], end["tokens"], end[column]) for end in measured_ends])


def law_text(law: PowerLaw) -> str:
    """Return 'N^-0.31 [-0.4, -0.22], (D/N)^+0.2 [0.1, 0.3], over 6 sizes and budgets'."""
    parts = []
    for name, exponent in law.exponents.items():
        low, high = exponent.interval(INTERVAL_LEVEL)
        base = f"({name})" if "/" in name else name
        parts.append(f"{base}^{exponent.value:+.3g} [{low:+.3g}, {high:+.3g}]")
    return f"{', '.join(parts)}, by least squares over {law.points} sizes and budgets"
