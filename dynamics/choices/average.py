"""The average of a run's weights by its quantized loss, chosen on one text, measured on another.

The held-out text is split by document into halves that share none. The search sees the first alone;
the pick and the last weights are then measured on the second. Tried are every export, every LAWA
window that ends at the last one (arXiv 2306.03241), every average kept in training, and a greedy
soup (arXiv 2203.05482, algorithm 1).
"""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from base.errors import UserError
from base.statistics import INTERVAL_LEVEL, verdict_of
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import Result, read_result
from quant_eval.compare import ModelComparison, compare
from quant_eval.settings import RunSettings
from quant_eval.specs import parse_spec
from study.axes import amount_name
from study.definition import Study
from study.machine.disk import GB
from study.machine.hardware import Hardware
from study.measurements.quantization import QUANTIZED_LOSS, quantizing_options
from study.paths import hf_directory, model_record
from study.step import Machine, python, resolve
from study.text_kinds import places_of
from train.data.corpus import open_corpus
from train.data.manifest import PLACES, Share
from train.planning.memory import bytes_of_weight, parameter_count
from train.run.config import RunConfig

Members = tuple[str, ...]  # models of an average, oldest first
Loss = Callable[[Members], float]


def most_tried(exports: int, kept: int) -> tuple[int, int]:
    """Return how many models `search` measures at most, and how many of them it has to average.

    Example: 4 exports and 1 kept average; 3 windows and 3 additions to a soup.
        >>> most_tried(exports=4, kept=1)
        (11, 6)
    """
    # Windows of 2 to n exports are n - 1; the soup tries each of the n - 1 others once.
    averages = 2 * max(0, exports - 1)  # windows, and additions to the soup
    return exports + kept + averages, averages


def search(exports: Sequence[str], kept: Sequence[str], loss: Loss) -> dict[Members, float]:
    """Return the loss of every model that is tried; each is measured once.

    Args:
        exports: names of the weights, oldest first.
        kept: names of averages, no ingredients of others.
        loss: of the uniform mean of some members.

    Example: 2 for the mean of 1 and 3 is right, which neither b nor c alone is.
        >>> weight = {"a": 9.0, "b": 1.0, "c": 3.0}
        >>> loss = lambda members: abs(2 - sum(map(weight.get, members)) / len(members))
        >>> losses = search(["a", "b", "c"], [], loss)
        >>> min(losses, key=losses.get), len(losses)
        (('b', 'c'), 5)
    """
    losses: dict[Members, float] = {}

    def measured(members: Members) -> float:
        if members not in losses:
            losses[members] = loss(members)
        return losses[members]

    for name in (*exports, *kept):
        measured((name,))
    for window in range(2, len(exports) + 1):
        measured(tuple(exports[-window:]))
    _greedy_soup(exports, measured)
    return losses


def _greedy_soup(exports: Sequence[str], loss: Loss) -> Members:
    """Return the soup of exports, best first, less those that would raise its loss."""
    # The order of the algorithm: from the best export on its own to the worst.
    best, *others = sorted(exports, key=lambda name: loss((name,)))
    soup: Members = (best,)
    for name in others:
        # In the order of the exports, so that a soup that equals a window is measured once.
        wider = tuple(export for export in exports if export in (*soup, name))
        # Equal counts as better, as in algorithm 1.
        if loss(wider) <= loss(soup):
            soup = wider
    return soup


FIGURE = QUANTIZED_LOSS.figure
SELECTION, EVALUATION = "selection", "evaluation"
# Documents have one of PLACES places each; the halves of the places share no document.
SHARES = {
    SELECTION: Share(first=0, stop=PLACES // 2),
    EVALUATION: Share(first=PLACES // 2, stop=PLACES),
}


class Pick(NamedTuple):
    """The average that was chosen.

    Attributes:
        members: of the average; one name for a model as it is.
        losses: on the text of the search, of every model tried.
        comparison: of the pick with the last weights, on the other text; None where they are it.
    """

    members: Members
    losses: dict[Members, float]
    comparison: ModelComparison | None


class Bench:
    """The averages of a run's exports and their quantized losses, made by this project's commands.

    All files are below STUDY/choices/RUN; those that exist are kept.
    """

    def __init__(self, directory: Path, study: Study, run: RunConfig, spec: str, last: int) -> None:
        """Take the run's last exports; UserError for fewer than two, or for an unknown spec."""
        self.directory, self.study, self.run = directory, study, run
        self.spec, self.directory_name = parse_spec(spec), f"{{study}}/choices/{run.name}"
        models = [
            model
            for model in study.models_of(run)
            if (directory / model_record(run.name, model)).exists() and not model.members
        ]
        weights = [model for model in models if not model.average]
        if len(weights) < 2:
            raise UserError(
                f"{run.name} has {len(weights)} exported checkpoints, an average takes 2; run the"
                " study first"
            )
        # Only averages at the step of the last weights, which the pick is compared with.
        kept = [model for model in models if model.average and model.step == weights[-1].step]
        self.exports = [hf_directory(run.name, model).name for model in weights[-last:]]
        self.kept = [hf_directory(run.name, model).name for model in kept]
        self.machine = Machine(device=Hardware.recorded(directory).device)

    def cost(self) -> str:
        """Return what the search takes at most, in words."""
        models, averages = most_tried(len(self.exports), len(self.kept))
        size = parameter_count(self.run) * bytes_of_weight(self.run)
        # A method without calibration has nothing to draw, so it is run once.
        draws = self.study.quantization.calibration_seeds if self.spec.needs_calibration else 1
        tokens = open_corpus(Path(self._resolved(self._held_out())[0])).manifest.tokens
        return (
            f"{draws * (models + 2)} quantizations with {self.spec.name} at most, each measured on"
            f" {amount_name(tokens / 2).upper()} tokens, and {averages} averages of"
            f" {averages * size / GB:.3g} GB, from the last {len(self.exports)} exports of"
            f" {self.run.name}, on {self.machine.device}"
        )

    def pick(self) -> Pick:
        """Search on the one text, and compare the pick with the last weights on the other."""
        # Tokenized apart by document, so the search never sees what the pick is measured on.
        for text, share in SHARES.items():
            self._start(
                *("train", "prepare", self._held_out(), "--share", str(share)),
                *("--tokenizer", places_of(self.study.text)["tokenizer"]),
                *("--out", f"{self.directory_name}/{text}"),
            )
        losses = search(self.exports, self.kept, self._selection_loss)
        # The minimum of many noisy losses is biased low: only the other text gives its value.
        members = min(losses, key=lambda candidate: losses[candidate])
        last = (self.exports[-1],)
        # Nothing to compare: the pick is what it would be compared with.
        if members == last:
            return Pick(members, losses, None)
        results = [self._measured(candidate, EVALUATION) for candidate in (last, members)]
        (comparison,) = compare(results, [(0, 1)], FIGURE)
        return Pick(members, losses, comparison)

    def _selection_loss(self, members: Members) -> float:
        loss = getattr(self._measured(members, SELECTION).measured, FIGURE)
        assert loss is not None
        return float(loss)

    def _measured(self, members: Members, text: str) -> Result[Quantization]:
        """Return the losses of the mean of some members on one of the texts."""
        hf = f"{{study}}/{self.run.name}/hf"
        model = f"{hf}/{members[0]}"
        # An export or a kept average is there already; only means of several are made.
        if len(members) > 1:
            model = f"{self.directory_name}/{name_of(members)}"
            self._start("ckpt_tools", "average", model, *(f"{hf}/{member}" for member in members))
        out = f"{self.directory_name}/{text}-{name_of(members)}/{self.spec.name}"
        options = quantizing_options(
            RunSettings,
            self.study.quantization,
            [self.spec.name],
            places_of(self.study.text)["calibration"],
            eval=f"{self.directory_name}/{text}",
            eval_tokens=None,  # all of it
        )
        self._start(*("quant_eval", "run", model, "--spec", self.spec.name, "--out", out, *options))
        return read_result(Path(self._resolved(out)[0]), Quantization)

    def _held_out(self) -> str:
        return places_of(self.study.text)["held_out"]

    def _resolved(self, *words: str) -> list[str]:
        return resolve(words, self.directory, self.machine)

    def _start(self, *words: str) -> None:
        """Run a command of this project; UserError where it fails, after its own line."""
        process = subprocess.run(
            self._resolved(*python(*words)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        if process.returncode:
            raise UserError(
                f"'python -m {words[0]} {words[1]}' ended with {process.returncode}; see its own"
                " line above and run this command again, which keeps what is there"
            )


def name_of(members: Members) -> str:
    """Return 'step00000640', or 'mean-512-576-640' of several."""
    if len(members) == 1:
        return members[0]
    return "-".join(["mean", *(member.removeprefix("step").lstrip("0") for member in members)])


def pick_lines(pick: Pick) -> Iterator[str]:
    """Yield every model that was tried by its loss, and the comparison on the other text."""
    yield f"quantized loss on the {SELECTION} text, nats per token:"
    for members, loss in sorted(pick.losses.items(), key=lambda item: item[1]):
        yield f"  {loss:.5f}  {name_of(members)}"
    if pick.comparison is None:
        yield f"{name_of(pick.members)}, the last weights themselves, has the lowest"
        return
    compared, difference = pick.comparison, pick.comparison.difference
    verdict = verdict_of(difference.value, difference.p_value, INTERVAL_LEVEL)
    yield (
        f"{name_of(pick.members)} on the {EVALUATION} text: {compared.second_value:.5f}, the last"
        f" weights {compared.first_value:.5f}; {difference.value:+.5f}"
        f" [{difference.low:+.5f}, {difference.high:+.5f}], p {difference.p_value:.2g}: {verdict}"
    )
