"""Named planes of a study: the three models that each goes through."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from base.errors import UserError
from base.frozen import NAME_PATTERN, Frozen
from base.names import take_one_of
from quant_eval.specs import parse_spec
from study.paths import MeasuredModel


class NamedPlane(Frozen):
    """A plane through three models of the study, on which the loss is measured."""

    name: str = Field(pattern=NAME_PATTERN)
    points: Annotated[dict[str, str], Field(min_length=3, max_length=3)] = Field(
        description=(
            "three models by the names that figures show: RUN@STEP, or RUN@REVISION of a released"
            " model; /AVERAGE after it for an average or a soup of that step; /SPEC at the end for"
            " its weights as a spec quantizes them. The first is the origin"
        )
    )


class StudyPoint(NamedTuple):
    """A measured model of a run, or its weights as `spec` quantizes them."""

    run: str
    model: MeasuredModel
    spec: str | None


def point_of(text: str, models: Mapping[str, Sequence[MeasuredModel]]) -> StudyPoint:
    """Return the point that a text means, among the measured models of the runs by name.

    Raises:
        ValueError: there is no such run, checkpoint or average, or no such spec of weights.

    >>> models = {"lr1": [MeasuredModel(8), MeasuredModel(8, "lawa5x2")]}
    >>> point_of("lr1@8/lawa5x2/rtn-b4-g32", models)[1:]
    (MeasuredModel(step=8, average='lawa5x2', members=(), decay=None, revision=None), 'rtn-b4-g32')
    """
    run, separator, rest = text.partition("@")
    if not separator:
        raise ValueError(f"'{text}' names no checkpoint; write RUN@STEP, such as {run}@1000")
    if run not in models:
        raise ValueError(f"'{text}': no run '{run}'; {take_one_of(run, models)}")

    step, *more = rest.split("/")
    weights = {_checkpoint(model): model for model in models[run] if model.average is None}
    if step not in weights:
        raise ValueError(
            f"'{text}': {run} has no checkpoint '{step}' that is measured;"
            f" {take_one_of(step, weights)}"
        )
    model = weights[step]

    averages = {
        each.average: each for each in models[run] if each.average and each.step == model.step
    }
    if more and more[0] in averages:
        model = averages[more.pop(0)]
    if not more:
        return StudyPoint(run, model, None)
    _check_spec(text, "/".join(more), averages)
    return StudyPoint(run, model, more[0])


def _checkpoint(model: MeasuredModel) -> str:
    return model.revision or str(model.step)


def _check_spec(text: str, spec: str, averages: Iterable[str]) -> None:
    """Raise ValueError for what is neither an average of the step nor a spec of weights."""
    try:
        parsed = parse_spec(spec)
    except UserError as error:
        names = ", ".join(averages) or "none"
        raise ValueError(
            f"'{text}': '{spec}' is no average of that checkpoint (it has {names}), and no spec:"
            f" {error}"
        ) from None
    if parsed.name != spec:
        raise ValueError(f"'{text}': write {parsed.name} instead of {spec}")
    if parsed.casts:
        raise ValueError(
            f"'{text}': {spec} rounds activations too, it is no point of a plane; take one of"
            " weights alone"
        )
