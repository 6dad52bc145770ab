"""Recipes and studies in words, and the cost of training: `python -m study list` and `show`.

The cost is hours of one GPU by the roofline, expected and their range.
"""

import string
from collections.abc import Iterator, Mapping
from itertools import chain, count, product
from textwrap import shorten

from base.aligned import WIDTH, aligned, wrapped
from base.frozen import in_words
from base.quantities import significant
from study.axes import amount_name
from study.definition import Study
from study.recipes.parts import PROFILES
from study.recipes.resolve import named_recipe, recipe_names, resolve
from study.released import ReleasedRun
from study.text_kinds import PreparedText, Text
from train.planning import speed
from train.planning.flops import GPUS, GPUS_PER_NODE
from train.planning.speed import GpuHours
from train.run.config import RunConfig
from train.run.schedules import first_step, perturbed_in_words

RUNS_SHOWN, SCHEDULES_SHOWN = 6, 2  # on one screen
NUMBERS = {"to step", "tokens", "checkpoints", "revisions"}  # columns of them


def _tokens(run: RunConfig) -> int:
    """Return the tokens that a run is trained on; a branch counts from its start."""
    return run.total_tokens - run.tokens_at(first_step(run))


def trained_tokens(study: Study) -> int:
    """Return the tokens that all runs of a study are trained on."""
    return sum(map(_tokens, study.trained))


def gpu_hours(study: Study) -> GpuHours:
    """Return the hours of an H100 that training takes, on one replica of every run."""
    layouts = [(run, run.parallel.tensor * run.parallel.pipeline) for run in study.trained]
    return speed.gpu_hours(layouts, gpus_per_node=GPUS_PER_NODE, gpu=GPUS["h100"])


def recipe_lines(*, whole: bool = False) -> Iterator[str]:
    """Yield a line per recipe: the training it takes, and what it is, in the `whole` of it."""
    rows = [("recipe", "tokens", "H100-hours", "")]
    for name in recipe_names():
        recipe = named_recipe(name)
        if recipe.takes_settings:
            rows.append((name, "none", "none", recipe.description))
            continue
        study = resolve(name)
        hours = "on CPU" if study.sized_for == "cpu" else significant(gpu_hours(study).expected)
        tokens = amount_name(trained_tokens(study)).upper()
        rows.append((name, tokens, hours, study.description))
    if whole:
        for name, tokens, hours, description in rows[1:]:
            cost = f"{tokens} tokens, training {hours}" + " H100-hours" * hours[0].isdigit()
            yield from _wrapped(f"{name} ({', '.join(PROFILES)})", f"{description} [{cost}]")
        return
    head = aligned([row[:3] for row in rows], right={1, 2})
    width = WIDTH - max(map(len, head)) - 2
    for left, (*_, description) in zip(head, rows, strict=True):
        yield f"{left}  {shorten(description, width, placeholder=' ...')}".rstrip()
    yield f"Each has the profiles {' and '.join(PROFILES)}; --all has what each is, in full"


def heading(study: Study) -> list[str]:
    """Return the name of a study and what it is."""
    return _wrapped(study.name, study.description)


def summary(study: Study, *, whole: bool = False) -> Iterator[str]:
    """Yield what a study trains and measures; `whole` with all runs, settings and files of text."""
    yield from _run_table(study, whole)
    if not whole:
        yield _line("text", _text_words(study.text, whole))
        yield from _wrapped("measured", _measured_in_brief(study))
        return
    yield ""
    if study.experiments:
        titles = (experiment.title for experiment in study.experiments)
        yield from _wrapped("experiments", "; ".join(titles))
    yield from _wrapped("text", _text_words(study.text, whole))
    for part, settings in study.measured_by.items():
        words = in_words(settings, defaults=False)
        yield from _wrapped(part, words or "by default settings")
    averages = dict.fromkeys(average.name for run in study.trained for average in run.averages)
    if averages and study.averaged_steps:
        steps = ", ".join(map(str, study.averaged_steps))
        yield from _wrapped("averages", f"{', '.join(averages)} at {steps}, quantized")
    for soup in study.soups:
        yield from _wrapped(soup.name, f"{soup.describe()}, quantized")
    for run in study.runs:
        if isinstance(run, ReleasedRun) and run.averages_in_words:
            yield from _wrapped(f"averages of {run.name}", "; ".join(run.averages_in_words))
    for plane in study.planes:
        points = ", ".join(f"{name} ({point})" for name, point in plane.points.items())
        yield from _wrapped(f"plane {plane.name}", f"through {points}")


def _text_words(text: Text, whole: bool) -> str:
    """Return a text in words, of files of the hub their datasets alone unless it is the `whole`."""
    if whole or not isinstance(text, PreparedText):
        return f"{text.kind}; {in_words(text, defaults=False)}"
    files = {"train": text.train, "held-out": text.held_out, "calibration": text.calibration}
    words = [f"{use} {file.dataset or file.name}" for use, file in files.items() if file]
    return "; ".join((f"prepared with the tokenizer of {text.tokenizer}", *words))


def _measured_in_brief(study: Study) -> str:
    """Return what is measured by name, with how much there is of it."""
    quantization = study.quantization
    words = [f"{', '.join(quantization.specs)} of every checkpoint"]
    if quantization.methods:
        words.append(f"{len(quantization.methods)} more methods at the end")
    words += [part for part in study.measured_by if part != "quantization"]
    counts = {
        "kept average": len({each.name for run in study.trained for each in run.averages}),
        "soup": len(study.soups),
        "plane": len(study.planes),
        "experiment": len(study.experiments),
    }
    words += [f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count]
    return ", ".join(words)


def _line(name: str, text: str) -> str:
    """Return what of a paragraph fits into one line."""
    return shorten(f"{name}: {text}", WIDTH, placeholder=" ...")


def source_lines(study: Study) -> Iterator[str]:
    """Yield where a study's figures come from."""
    yield from _wrapped("sources", "; ".join(study.sources))


def _wrapped(name: str, text: str) -> list[str]:
    """Return a paragraph that begins with its name."""
    return wrapped(f"{name}: {text}")


def _run_table(study: Study, whole: bool) -> Iterator[str]:
    """Yield a line per run, of seeds the first and of many runs some; and what the lines say."""
    runs = study.runs if whole else [group.runs[0] for group in study.groups]
    schedules = dict.fromkeys(map(_schedule, study.trained))
    letters = dict(zip(schedules, _letters(), strict=False))
    rows = [
        _released(run) if isinstance(run, ReleasedRun) else _trained(run, letters) for run in runs
    ]
    # What all runs share is said once, below the table.
    columns = list(dict.fromkeys(chain.from_iterable(rows)))
    cells = {column: [row.get(column, "") for row in rows] for column in columns}
    shared = {
        column: values[0]
        for column, values in cells.items()
        if len(rows) > 1 and len(set(values)) == 1
    }
    varying = [column for column in columns if column not in shared]

    shown = rows if whole else rows[:RUNS_SHOWN]
    body = [[row.get(column, "") for column in varying] for row in shown]
    right = {index for index, column in enumerate(varying) if column in NUMBERS}
    yield from aligned([varying, *body], right)
    if len(shown) < len(rows):
        yield f"and {len(rows) - len(shown)} more"
    if len(runs) < len(study.runs):
        seeds = sorted({run.seed for run in study.trained})
        yield f"each with seeds {', '.join(map(str, seeds))}: {len(study.runs)} runs in all"
    said = [f"{column} {value}" for column, value in shared.items() if value]
    if said:
        yield from _wrapped("all runs", ", ".join(said))
    named = {row.get("schedule") for row in shown}
    of_runs = [(letter, words) for words, letter in letters.items() if letter in named]
    for letter, words in of_runs if whole else of_runs[:SCHEDULES_SHOWN]:
        yield from _wrapped(f"schedule {letter}", words)
    perturbed = list(dict.fromkeys(filter(None, map(perturbed_in_words, study.trained))))
    for words in perturbed if whole else perturbed[:1]:
        yield from _wrapped("perturbed", words)


def _letters() -> Iterator[str]:
    """Yield a, b, ..., z, aa, ab, ... without end."""
    for length in count(1):
        yield from map("".join, product(string.ascii_lowercase, repeat=length))


def _schedule(run: RunConfig) -> str:
    return run.schedule.describe(run.warmup_steps)


def _trained(run: RunConfig, letters: Mapping[str, str]) -> dict[str, str]:
    """Return the cells of a run by column."""
    branch = run.branch_from
    return {
        "run": run.name,
        "peak": f"{run.optimizer.peak_lr:g}{run.found_at}",
        "schedule": letters[_schedule(run)],
        "perturbation": run.perturbation.describe() if run.perturbation else "",
        "from": f"{branch.run.removeprefix('../')} at {branch.step:,}" if branch else "",
        "to step": f"{run.total_steps:,}",
        "tokens": amount_name(_tokens(run)).upper(),
        "checkpoints": str(len(run.save_steps)),
        "tokens a step": f"{run.tokens_per_step:,}",
        "engine": run.engine,
    }


def _released(run: ReleasedRun) -> dict[str, str]:
    last = run.revisions[-1]
    tokens = "" if last.tokens is None else amount_name(last.tokens).upper()
    return {
        "model": run.model,
        "stage": run.stage,
        "revisions": str(len(run.revisions)),
        "to revision": last.name,
        "tokens": tokens,
        "after": (run.parent or "").removeprefix(f"{run.model}-"),
    }
