"""A finished study as a page: claims, pictures, a small table, commands, machine and hours.

python -m docs.results tiny-long --root runs --machine "two cores of an AMD EPYC, AVX2"

writes docs/results/tiny-long/ and lists it in docs/results/README.md. --out names another folder,
as on a machine that keeps nothing else.
"""

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from base.errors import UserError
from docs.models import table
from docs.paper import small_picture
from study.choosing import existing
from study.definition import Study
from study.figures.figure import DIRECTORY
from study.report.provenance import settings_of
from study.results.table import Row, read_table

RESULTS = Path(__file__).parent / "results"
# The first six of these that the study has; each is below 60 kB.
PICTURES = (
    *("anneal_against_control", "quantization_error", "kl_divergence", "losses", "averages"),
    *("curvature", "ends", "full_against_quantized"),
)
MOST_PICTURES = 6
MEASURED = re.compile(
    r"quant/[^/]+/(cross_entropy|cross_entropy_quantized|relative_error|kl_divergence)(/.*)?"
    r"|curvature/.*trace.*"
)
OF_ROW = ("run", "seed", "step", "tokens", "average", "phase", "learning_rate")
DIGITS = 6
LEAST_HOURS = 0.005  # of a kind that is named


def hours_by_kind(directory: Path) -> dict[str, float]:
    """Return the hours that the steps of a study took, by kind, each counted by its own clock."""
    seconds = defaultdict[str, float](float)
    for path in sorted((directory / "steps").glob("*.json")):
        kind = path.stem.partition("-")[0]
        seconds[kind] += json.loads(path.read_bytes())["seconds"]
    return {kind: value / 3600 for kind, value in seconds.items()}


def small_table(rows: list[Row]) -> list[list[str]]:
    """Return the rows' places and measured errors as text, with a heading, without empty columns.

    Example:
        >>> small_table([{"run": "a", "step": 2, "loss": 1.0}])
        [['run', 'step'], ['a', '2']]
    """
    keys = [key for key in rows[0] if key in OF_ROW or MEASURED.fullmatch(key)]
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    return [keys, *([_text(row.get(key)) for key in keys] for row in rows)]


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def write_results(directory: Path, study: Study, machine: str, out: Path) -> Path:
    """Write the folder of a study below `out`, and return its page.

    Raises:
        UserError: the study has no report yet.
    """
    figures = directory / DIRECTORY
    names = [name for name in PICTURES if (figures / f"{name}.png").is_file()][:MOST_PICTURES]
    if not names:
        raise UserError(f"{figures} has no figures yet; run 'python -m study run' to its end")
    folder = out / study.name
    folder.mkdir(parents=True, exist_ok=True)

    for name in names:
        (folder / f"{name}.png").write_bytes(small_picture(figures / f"{name}.png"))
        shutil.copyfile(figures / f"{name}.csv", folder / f"{name}.csv")
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(small_table(read_table(directory, study)))
    command = [sys.executable, "-m", "study", "report", study.name, "--claims"]
    claims = subprocess.run(
        [*command, "--root", str(directory.parent)], check=True, capture_output=True, text=True
    ).stdout
    (folder / "claims.txt").write_text(claims)

    page = folder / "README.md"
    page.write_text(_page(directory, study, machine, names, claims))
    return page


def _page(directory: Path, study: Study, machine: str, names: list[str], claims: str) -> str:
    hours = hours_by_kind(directory)
    named = (kind for kind in hours if hours[kind] >= LEAST_HOURS)
    longest = ", ".join(f"{kind} {hours[kind]:.2f}" for kind in named)
    recorded = settings_of(directory, study)
    trained = sum(run.total_tokens - _tokens_before(study, run.name) for run in study.trained)
    facts = {
        "command": f"`python -m study run {study.name}`",
        "machine": machine,
        "hours of steps": f"{sum(hours.values()):.2f} ({longest})",
        "trained": f"{len(study.trained)} runs, {trained / 1e6:.1f}M tokens",
        "seeds": str(len({run.seed for run in study.trained})),
    } | {
        key: recorded[key] for key in ("model", "schedule", "commit", "software") if key in recorded
    }
    pictures = [f"![{name}]({name}.png)\n\nData: [{name}.csv]({name}.csv).\n" for name in names]
    return "\n".join(
        [
            f"# {study.name}\n",
            f"{study.description}.\n",
            table(["", ""], [[key, value] for key, value in facts.items()]),
            "## Claims\n",
            f"```text\n{claims.rstrip()}\n```\n",
            "## Pictures\n",
            *pictures,
            "All measured models: [table.csv](table.csv).\n",
        ]
    )


def _tokens_before(study: Study, name: str) -> int:
    """Return the tokens that a run has from its parent."""
    run = next(run for run in study.trained if run.name == name)
    return run.tokens_at(run.branch_from.step) if run.branch_from else 0


def index(out: Path) -> str:
    """Return the page that lists the studies of a folder, with what their own pages say."""
    lines = []
    for page in sorted(out.glob("*/README.md")):
        text = page.read_text()
        facts = dict(re.findall(r"^\| ([^|]+?) \| (.+?) \|$", text, re.MULTILINE))
        hours = facts["hours of steps"].partition(" ")[0]
        name = page.parent.name
        said = [f"[{name}]({name}/README.md)", facts["machine"], hours, facts["command"]]
        verdicts = {
            outcome: len(re.findall(rf"  {outcome}\b", text))
            for outcome in ("supported", "contradicted", "not decided")
        }
        counted = ", ".join(f"{count} {outcome}" for outcome, count in verdicts.items() if count)
        lines.append([*said, f"[{counted or 'claims'}]({name}/claims.txt)"])
    heads = ["study", "machine", "hours of steps", "command", "claims"]
    return f"""# Results

Studies that ran to their end, as `python -m docs.results` writes them. Each page has the claims
with their intervals, pictures with their data, and a table of all measured models.

{table(heads, lines)}"""


def main() -> None:
    """Write the results of one study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the study")
    parser.add_argument("--root", type=Path, default=Path("runs"))
    parser.add_argument("--machine", required=True, help="in words, such as 'one H200'")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    try:
        directory, study = existing(options.name, options.root)
        page = write_results(directory, study, options.machine, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    (options.out / "README.md").write_text(index(options.out))
    print(page)


if __name__ == "__main__":
    main()
