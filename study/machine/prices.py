"""The GPU-hours of a study's steps, by kind, before anything starts.

Training is priced by the roofline of a step (train/planning/speed.py), quantization by
quant_eval/cost.py, Hessian products by curvature/cost. Of measuring, GPTQ and one product were
timed (docs/guides/one-gpu.md); the rest is arithmetic at the same shares of the peak. Take it as
right within a factor of two. Exports, averages and texts need no GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from base.grouping import grouped
from curvature.critical.line import PASSES
from curvature.settings import LineSettings, PlaneSettings, checked_length
from quant_eval.cost import Shape, forward_seconds, quantizing_seconds
from quant_eval.settings import DrawSettings, SequenceSettings
from quant_eval.specs import parse_spec
from study.definition import KINDS, Study
from study.machine.needs import Needs, hessian_cost, model_config
from study.step import Step
from train.planning.flops import GPUS, GPUS_PER_NODE
from train.planning.speed import GpuHours, gpu_hours
from train.run.config import RunConfig

HOUR = 3600
MEASURED = frozenset(kind.name for kind, _ in KINDS)
START_SECONDS = 15  # of a process, until it computes
READ_BYTES = 1e9  # a second of weights
CACHED_BYTES = 4e9  # a second of weights that were read before, to a GPU; a guess
LOOKS = 24  # how often outlier statistics move an entry through the memory, in fp32; a guess
# A product of OLMo2-1B took 0.447 s on an H200 and 0.543 s on an H100, the estimates are 0.29 and
# 0.34.
PRODUCT_OVER_ESTIMATE = 1.6
DOCUMENT_TOKENS = 430  # of C4 in the mean: 156e9 in 365e6 documents (arXiv 2104.08758, table 1)
# The twelve tasks have some 150,000 choices to score, of 450 tokens with five examples.
TASK_TOKENS, TASKS_IN_ALL, TASK_ITEMS, SHOTS = 66e6, 12, 37_000, 5


class Price(NamedTuple):
    """The cost of all steps of one kind.

    Attributes:
        steps: how many there are.
        gpus: that each occupies, the fewest and the most; zeros without any.
        hours: of a GPU, of all steps together; None where the size of a model is not known yet.
    """

    kind: str
    steps: int
    gpus: tuple[int, int]
    hours: GpuHours | None


@dataclass(frozen=True)
class PricedModel:
    """A model as a study measures it on GPUs of a kind; times are seconds of one of them."""

    study: Study
    config: str  # its config.json
    gpu: str

    @cached_property
    def shape(self) -> Shape:
        """The sizes of the model."""
        return Shape.of(model_config(self.config))

    def length(self, settings: SequenceSettings | PlaneSettings | LineSettings) -> int:
        """Return the tokens that a model sees at once."""
        context: int = model_config(self.config).max_position_embeddings
        if isinstance(settings, SequenceSettings):
            return settings.block_length(context)
        return checked_length(context, settings.sequence_length)

    def start(self, dtype: str) -> float:
        """Return the seconds until a process has read the model."""
        weights = self.shape.layers * self.shape.weights + 2 * self.shape.head
        return START_SECONDS + weights * (2 if dtype == "bf16" else 4) / READ_BYTES

    def forward(
        self, tokens: float, settings: SequenceSettings | PlaneSettings | LineSettings, dtype: str
    ) -> float:
        """Return the seconds of a pass over so many tokens."""
        length = self.length(settings)
        return forward_seconds(self.shape, round(tokens), length, GPUS[self.gpu], dtype)

    def quantizing(self, spec: str, settings: DrawSettings) -> float:
        """Return the seconds of quantizing once."""
        sequences, length = settings.calibration_sequences, self.length(settings)
        if settings.calibration_documents == "separate":
            length = min(length, DOCUMENT_TOKENS)
        of, gpu = parse_spec(spec), GPUS[self.gpu]
        return quantizing_seconds(self.shape, of, sequences, length, gpu, settings.dtype)

    def losses(self, spec: str) -> float:
        """Return the seconds of one spec: every draw is quantized and evaluated."""
        settings = self.study.quantization
        draws = settings.calibration_seeds if parse_spec(spec).needs_calibration else 1
        evaluating = self.forward(settings.eval_tokens, settings, settings.dtype)
        return draws * (self.quantizing(spec, settings) + evaluating) + evaluating

    def blocks(self, _: Step) -> float:
        """Return the seconds of the losses with each block quantized alone, and all but it."""
        settings = self.study.quantization
        evaluating = self.forward(settings.block_tokens, settings, settings.dtype)
        losses = 2 * self.shape.layers + 2
        return sum(
            self.quantizing(spec, settings) + losses * evaluating for spec in settings.by_block
        )

    def tasks(self, step: Step) -> float:
        """Return the seconds of the questions to the full and to the quantized model."""
        settings = self.study.tasks
        assert settings
        share = len(settings.names) / TASKS_IN_ALL
        if settings.limit:
            share *= min(1.0, settings.limit * TASKS_IN_ALL / TASK_ITEMS)
        tokens = TASK_TOKENS * share * (1 + settings.shots) / (1 + SHOTS)
        asking = 2 * self.forward(tokens, settings, settings.dtype)
        return asking + self.quantizing(_spec(step), settings)

    def curvature(self, _: Step) -> float:
        """Return the seconds of traces, and of the top eigenvalue."""
        settings = self.study.curvature
        assert settings
        cost = hessian_cost(self.config, settings, 1, self.gpu, along=False)
        return PRODUCT_OVER_ESTIMATE * cost.seconds

    def step(self, _: Step) -> float:
        """Return the seconds of the products along the quantization steps."""
        settings, specs = self.study.step, len(self.study.quantization.by_block)
        product = hessian_cost(self.config, settings, 1, self.gpu, along=True).product_seconds
        # The whole step, its random signs, a probe, and each block's part.
        products = specs * settings.microbatches * (3 + self.shape.layers)
        return PRODUCT_OVER_ESTIMATE * products * product

    def slice(self, _: Step) -> float:
        """Return the seconds of the losses on the points of a plane."""
        return self._losses_on_plane(self.study.slice, 0)

    def plane(self, step: Step) -> float:
        """Return the seconds of the losses on a named plane, or of quantizing one of its points."""
        if not step.specs:
            return self.slice(step)
        settings = self.study.quantization
        evaluating = self.forward(settings.block_tokens, settings, settings.dtype)
        return self.quantizing(_spec(step), settings) + 2 * evaluating

    def pca(self, step: Step) -> float:
        """Return the seconds of the losses on a trajectory's plane, and of two per checkpoint."""
        assert self.study.pca
        # It comes after what makes the checkpoints, and a text or none.
        return self._losses_on_plane(self.study.pca, 2 * len(step.after))

    def _losses_on_plane(self, settings: PlaneSettings, others: int) -> float:
        tokens = settings.sequences * self.length(settings)
        return (settings.grid**2 + others) * self.forward(tokens, settings, "fp32")

    def critical(self, step: Step) -> float:
        """Return the seconds of the losses along directions, at most.

        Each pass reads the model and where it moves to.
        """
        settings = self.study.critical
        assert settings
        directions = 1 + step.command.count("--quantized")
        weights = 2 * (self.shape.layers * self.shape.weights + 2 * self.shape.head)
        reading = weights * 2 / CACHED_BYTES
        forward = self.forward(settings.sequences * self.length(settings), settings, settings.dtype)
        return (2 + PASSES * directions) * (reading + forward)

    def outliers(self, _: Step) -> float:
        """Return the seconds of a forward pass in which everything linears read is looked at."""
        settings = self.study.outliers
        assert settings
        inputs = sum(self.shape.inputs) * settings.eval_tokens
        entries = self.shape.layers * (inputs + self.shape.weights)
        looking = LOOKS * 4 * entries / GPUS[self.gpu].bandwidth
        return self.forward(settings.eval_tokens, settings, settings.dtype) + looking


def _spec(step: Step) -> str:
    return step.specs[-1]


PRICES: Mapping[str, Callable[[PricedModel, Step], float]] = {  # of every kind of measurement
    "quantize": lambda measured, step: measured.losses(_spec(step)),
    "methods": lambda measured, step: measured.losses(_spec(step)),
    "blocks": PricedModel.blocks,
    "tasks": PricedModel.tasks,
    "curvature": PricedModel.curvature,
    "step": PricedModel.step,
    "slice": PricedModel.slice,
    "plane": PricedModel.plane,
    "pca": PricedModel.pca,
    "critical": PricedModel.critical,
    "outliers": PricedModel.outliers,
}


class Prices:
    """The prices of a study's steps on GPUs of a kind, with the layout that each takes there."""

    def __init__(self, needs: Needs, steps: Iterable[Step], gpu: str) -> None:
        self.needs, self.steps, self.gpu = needs, list(steps), gpu
        self._measured = lru_cache(None)(lambda config: PricedModel(needs.study, config, gpu))

    @cached_property
    def trainings(self) -> Mapping[str, tuple[RunConfig, int]]:
        """Every run with its ranks: those planned for the GPUs, or else one replica of its own."""
        if self.needs.hardware.gpus:
            return self.needs.trainings
        return {
            run.name: (run, run.parallel.tensor * run.parallel.pipeline)
            for run in self.needs.study.trained
        }

    def gpus(self, step: Step) -> int:
        """Return the GPUs that a step occupies."""
        if step.kind == "train":
            return self.trainings[step.run][1]
        if step.kind not in MEASURED:
            return 0
        return max(1, self.needs.gpus(step))

    @cached_property
    def hours(self) -> dict[str, float | None]:
        """GPU-hours of every step by name, None where unknown; steps without a GPU have 0."""
        priced: dict[str, float | None] = {}
        # What one process does, it starts for once; it reads each model once.
        processes = grouped(self.steps, lambda step: (step.process, step.models))
        for steps in processes.values():
            for index, step in enumerate(steps):
                priced[step.name] = self._hours(step, starts=index == 0)
        return priced

    def _hours(self, step: Step, *, starts: bool) -> float | None:
        if step.kind == "train":
            return self._training([step.run]).expected
        if step.kind not in MEASURED:
            return 0.0
        config = self.needs.config(step)
        if config is None:
            return None
        measured = self._measured(config)
        start = measured.start(self.needs.study.quantization.dtype) if starts else 0.0
        return (PRICES[step.kind](measured, step) + start) / HOUR

    def _training(self, runs: Iterable[str]) -> GpuHours:
        node = min(len(self.needs.hardware.gpus) or GPUS_PER_NODE, GPUS_PER_NODE)
        layouts = [self.trainings[run] for run in runs]
        return gpu_hours(layouts, gpus_per_node=node, gpu=GPUS[self.gpu])

    def by_kind(self) -> Iterator[Price]:
        """Yield the price of each kind, in the order of the steps."""
        for kind, steps in grouped(self.steps, lambda step: step.kind).items():
            counts = [self.gpus(step) for step in steps]
            yield Price(kind, len(steps), (min(counts), max(counts)), self._of_kind(kind, steps))

    def _of_kind(self, kind: str, steps: list[Step]) -> GpuHours | None:
        if kind == "train":
            return self._training([step.run for step in steps])
        hours = [self.hours[step.name] for step in steps]
        known = [each for each in hours if each is not None]
        if len(known) < len(hours):
            return None
        # Within a factor of two, as the head of this file says.
        return GpuHours(sum(known), sum(known) / 2, sum(known) * 2)

    def longest_chain(self) -> tuple[float, tuple[Step, ...]]:
        """Return the steps that wait for each other longest, and their hours on their GPUs."""
        ends: dict[str, tuple[float, tuple[Step, ...]]] = {}
        for step in self.steps:
            own = (self.hours[step.name] or 0.0) / max(1, self.gpus(step))
            before = [ends[name] for name in step.after if name in ends]
            hours, chain = max(before, key=lambda end: end[0], default=(0.0, ()))
            ends[step.name] = (hours + own, (*chain, step))
        return max(ends.values(), key=lambda end: end[0])
