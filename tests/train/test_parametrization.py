"""CompleteP: engines against the paper's form of it, and sizes of activations over width and depth."""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from base.errors import UserError
from base.frozen import fingerprint
from study.recipes.resolve import resolve
from study.recipes.shown import summary
from tests.ckpt_tools.checkpoints import read_snapshot
from tests.conftest import widths
from tests.runs import make_run, on_ranks
from tests.train.plain import differentiate, model_of_family, named_as_in_files
from tests.train.test_deepspeed import batch_of, small_run
from tests.train.test_optimizers import BATCHES, direction_by_hand, train_all
from train.model.config import ModelConfig, hidden_matrices, parameter_shapes
from train.model.initialization import initial_parameter
from train.model.parametrization import Scaling
from train.optimizers.adamw import AdamW
from train.optimizers.lion import Lion
from train.optimizers.muon import Muon, orthogonalized
from train.optimizers.stepping import GroupStepOptimizer, Member
from train.run.config import RunConfig
from train.run.schedules import learning_rate

# An epsilon as large as gradients are, all weights decayed by much, and no clipping: the norm of
# the gradient is not the same in the paper's form.
SETTINGS: dict[str, Any] = {"weight_decay": 1.0, "undecayed": (), "clip_grad_norm": 1e9}
OPTIMIZERS: dict[str, Any] = {
    "adamw": AdamW(peak_lr=1e-2, eps=1e-4, **SETTINGS),
    "adamc": AdamW(peak_lr=1e-2, eps=1e-4, **SETTINGS, decay="adamc"),
    "independent": AdamW(
        peak_lr=1e-2, eps=1e-4, **SETTINGS | {"weight_decay": 0.02}, decay="independent"
    ),
    "muon": Muon(peak_lr=1e-2, eps=1e-4, **SETTINGS),
    "lion": Lion(peak_lr=1e-3, **SETTINGS),
}
N, L = 4, 2 / 3  # width 32 and 2 layers
TRANSFERRED: dict[str, Any] = {"parametrization": "completep", "base_width": 8, "base_depth": 3}

# The modules after which the paper's model multiplies, by 1 / N and by 1 / L.
FINAL_NORMS = ("model.norm", "gpt_neox.final_layer_norm")
BRANCH_ENDS = {
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "llama": ("o_proj", "down_proj"),
    "olmo": ("o_proj", "down_proj"),
    "gpt_neox": ("dense", "dense_4h_to_h"),
}


def model_of(family: str) -> ModelConfig:
    return ModelConfig(
        **widths(32, 64, 4, 4 if family == "gpt_neox" else 2, vocab_size=320, num_hidden_layers=2),
        family=family,
        norm_eps=1e-5 if family == "olmo" else 1e-6,
        rotary_fraction=0.5 if family == "gpt_neox" else 1.0,
    )


def multiplier_after(module: str, family: str) -> float:
    if module in FINAL_NORMS:
        return 1 / N
    return 1 / L if module.endswith(BRANCH_ENDS[family]) else 1.0


class PaperForm:
    """The model of table 1 of arXiv 2505.01618, in float64: it multiplies, and its weights do not."""

    def __init__(self, run: RunConfig, optimizer: str) -> None:
        self.run, self.settings, self.kind = run, OPTIMIZERS[optimizer], optimizer
        family = run.model.family
        self.model = model_of_family(run).double()
        self.named = named_as_in_files(self.model)
        for name, module in self.model.named_modules():
            if multiplier := multiplier_after(name, family):
                module.register_forward_hook(self._times(multiplier))
        self.states: dict[str, dict[str, Any]] = {}
        for name, weight in self.named.items():
            drawn = initial_parameter(name, run.model, run.seed)
            weight.data = drawn.double() * (N**-0.5 if self._is_hidden(name) else 1.0)
            self.states[name] = {"first": 0.0, "second": 0.0}

    @staticmethod
    def _times(multiplier: float) -> Any:
        return lambda _module, _inputs, output: output * multiplier if multiplier != 1 else None

    def _is_hidden(self, name: str) -> bool:
        return ".layers." in name and self.named[name].dim() == 2

    def step(self, step: int) -> None:
        differentiate(self.model, BATCHES[step - 1], clip=math.inf)
        rate = learning_rate(self.run, step)
        for name, weight in self.named.items():
            weight.data = self._updated(name, weight.data, weight.grad, rate, step)

    def _updated(self, name: str, w: Tensor, g: Any, rate: float, step: int) -> Tensor:
        """A step by the table: rates of hidden matrices, epsilon of blocks; decay by the base's."""
        state, hidden, share = (
            self.states[name],
            self._is_hidden(name),
            rate / self.settings.peak_lr,
        )
        decayed = {
            "independent": w * (1 - self.settings.weight_decay * share),
            "adamc": w * (1 - rate * self.settings.weight_decay * (share if hidden else 1)),
        }.get(self.kind, w * (1 - rate * self.settings.weight_decay))

        if self.kind == "lion":
            c = 0.9 * state["first"] + 0.1 * g
            state["first"] = 0.99 * state["first"] + 0.01 * g
            return decayed - rate * (1 / N if hidden else 1) * c.sign()
        if self.kind == "muon" and hidden:
            state["first"] = 0.95 * state["first"] + 0.05 * g
            direction = direction_by_hand(0.95 * state["first"] + 0.05 * g)
            return decayed - rate * N**-0.5 * direction
        epsilon = 1e-4 / N / (L if ".layers." in name else 1)
        state["first"] = 0.9 * state["first"] + 0.1 * g
        state["second"] = 0.95 * state["second"] + 0.05 * g**2
        first, second = state["first"] / (1 - 0.9**step), state["second"] / (1 - 0.95**step)
        return decayed - rate * (1 / N if hidden else 1) * first / (second.sqrt() + epsilon)

    def absorbed(self) -> dict[str, Tensor]:
        """The weights of a model without multipliers that computes the same."""
        family = self.run.model.family
        weights = {
            name: weight.detach() * multiplier_after(name.rpartition(".")[0], family)
            for name, weight in self.named.items()
        }
        if family == "olmo":  # the norm before the head has no weights
            weights["lm_head.weight"] = weights["lm_head.weight"] / N
        return weights


CASES = {
    "megatron": [
        *(("olmo2", optimizer) for optimizer in ("adamw", "adamc", "muon", "lion")),
        ("llama", "muon"),
    ],
    "deepspeed": [
        *((family, "adamw") for family in BRANCH_ENDS),
        ("gpt_neox", "muon"),
        ("gpt_neox", "independent"),
    ],
}
# Lion's sign turns where momentum and gradient are near zero: seen up to 2.5e-5. Muon raises small
# singular values, and what rounding left in them: seen up to 1.5e-5.
LEAST_EXACT = {("olmo2", "lion"): 1e-3, ("llama", "muon"): 1e-4}


@pytest.mark.parametrize("engine", CASES)
def test_engines_train_the_papers_form_with_its_multipliers_in_the_weights(
    tmp_path, inputs, engine
):
    """On two ranks. After three of six updates megatron hands over from tensor ranks to pipeline
    ranks with AdamW, to data ranks with others.

    The stock model of transformers has the logits of the model that multiplies.
    """
    out, runs, pairs = tmp_path / "out", {}, []
    for family, optimizer in CASES[engine]:
        settings: dict[str, Any] = {
            "model": model_of(family),
            "optimizer": OPTIMIZERS[optimizer],
            "engine": engine,
            **TRANSFERRED,
        }
        first, second = (tmp_path / f"{family}-{optimizer}-{half}" for half in (1, 2))
        megatron = engine == "megatron"
        make_run(first, **inputs, **settings, tensor=2 if megatron else 1)
        stages = 2 if megatron and optimizer == "adamw" else 1
        runs[family, optimizer] = make_run(second, **inputs, **settings, pipeline=stages)
        pairs.append(f"{first},{second}")
    on_ranks(2, train_all, out, *pairs)

    for (family, optimizer), run in runs.items():
        paper = PaperForm(run, optimizer)
        initial = paper.absorbed()
        for step in range(1, len(BATCHES) + 1):
            paper.step(step)
        weights = read_snapshot(out / f"{family}-{optimizer}-2", run)
        most = LEAST_EXACT.get((family, optimizer), 1e-5)
        check_weights(weights, initial, paper.absorbed(), most)

        stock = model_of_family(run).double()
        for name, weight in named_as_in_files(stock).items():
            weight.data = weights[name].double()
        logits = stock(BATCHES[0]).logits
        expected = paper.model(BATCHES[0]).logits
        assert (logits - expected).norm() < 1e-5 * expected.norm(), (family, optimizer)


def check_weights(
    weights: dict[str, Tensor],
    initial: dict[str, Tensor],
    expected: dict[str, Tensor],
    most: float,
) -> None:
    """Equal to the rounding of fp32, seen up to 3.1e-6 of what six updates changed."""
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        moved, error = expected[name] - initial[name], weight - expected[name]
        assert error.norm() < most * moved.norm(), name


def test_at_the_base_itself_nothing_changes():
    for family in BRANCH_ENDS:
        for optimizer in OPTIMIZERS.values():
            run = run_of(family, 64, 3, optimizer, base=(64, 3))
            assert {run.scaling_of(name) for name in parameter_shapes(run.model)} == {Scaling()}


VOCABULARY, STEPS = 64, 10
ADAMW = AdamW(peak_lr=3e-3)


def run_of(
    family: str, width: int, depth: int, optimizer: Any, base: tuple[int, int] | None
) -> RunConfig:
    """A run with heads of 16; without a base it has the standard parametrization."""
    heads, settings = width // 16, dict[str, Any]()
    if base:
        settings = {"parametrization": "completep", "base_width": base[0], "base_depth": base[1]}
    model = ModelConfig(
        **widths(width, 2 * width, heads, heads, vocab_size=VOCABULARY, num_hidden_layers=depth),
        family=family,
        norm_eps=1e-5 if family == "olmo" else 1e-6,
        rotary_fraction=0.5 if family == "gpt_neox" else 1.0,
    )
    return small_run("coordinates", model=model, optimizer=optimizer, **settings)


class Coordinates:
    """Transformers' model of a run with the weights, rates and updates that engines take of it."""

    def __init__(self, run: RunConfig) -> None:
        self.run, self.optimizer_of_run = run, run.optimizer
        self.model = model_of_family(run)
        self.named, hidden = named_as_in_files(self.model), hidden_matrices(run.model)
        self.optimizer = GroupStepOptimizer(
            run.optimizer,
            [
                Member(weight, name in hidden, run.optimizer.decays(name), run.scaling_of(name))
                for name, weight in self.named.items()
            ],
        )
        self.optimizer.start_states()
        self.optimizer.set_rate(run.optimizer.peak_lr)

    def step(self, tokens_BS: Tensor) -> None:
        differentiate(self.model, tokens_BS)
        for group in self.optimizer.param_groups:
            if isinstance(self.run.optimizer, Muon) and group["hidden"]:
                self._update_matrices(self.run.optimizer, group)
        self.optimizer.step()

    @torch.no_grad()
    def _update_matrices(self, muon: Muon, group: dict[str, Any]) -> None:
        for weight in group["params"]:
            update = muon.accumulate(weight.grad, self.optimizer.state[weight])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(group["lr"] * orthogonalized(update, torch.float32))
            weight.grad = None

    @torch.no_grad()
    def outputs(self, tokens_BS: Tensor) -> dict[str, Tensor]:
        """Return the residual stream after the last layer, and the logits."""
        seen: dict[str, Tensor] = {}
        layer = self.model.base_model.layers[-1]
        hook = layer.register_forward_hook(
            lambda _module, _inputs, output: seen.update(residual=output)
        )
        seen["logits"] = self.model(tokens_BS).logits
        hook.remove()
        return seen

    def sizes(self) -> dict[str, list[float]]:
        """Root mean squares of outputs, and of their changes since the first one, at every step."""
        held_out = batch_of(0).tokens_BS[:, :-1]
        first, sizes = self.outputs(held_out), defaultdict(list)
        for step in range(1, STEPS + 1):
            self.step(batch_of(step).tokens_BS)
            for name, output in self.outputs(held_out).items():
                sizes[name].append(root_mean_square(output))
                sizes[f"change of {name}"].append(root_mean_square(output - first[name]))
        return sizes


def root_mean_square(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def growth(
    family: str, optimizer: Any, small: tuple[int, int], large: tuple[int, int], *, transfers: bool
) -> dict[str, list[float]]:
    """The sizes in a large model over those in a small one, of (width, depth), at every step."""
    of_small, of_large = (
        Coordinates(run_of(family, *size, optimizer, small if transfers else None)).sizes()
        for size in (small, large)
    )
    return {
        name: [after / before for before, after in zip(sizes, of_large[name], strict=True)]
        for name, sizes in of_small.items()
    }


# Of the figures of `growth`, one that grows in the standard parametrization, and at least how much
# at every step. OLMo2 norms what it adds to the stream, so there the logits grow with the width.
GROWING = {
    ("olmo2", "width"): ("logits", 1.8),
    ("olmo2", "depth"): ("residual", 4.0),
    ("llama", "width"): ("residual", 2.5),
    ("llama", "depth"): ("change of residual", 3.0),
    ("gpt_neox", "width"): ("residual", 3.0),
    ("gpt_neox", "depth"): ("residual", 4.0),
}
GROWTH_OF = list(dict.fromkeys(family for family, _ in GROWING))
SIZES = {"width": ((32, 2), (128, 2)), "depth": ((32, 2), (32, 16))}
WIDE = {"width": ((64, 4), (512, 4)), "depth": ((32, 2), (32, 32))}
# Newton-Schulz of the wider matrices takes minutes.
LARGE = {"width": ((64, 4), (256, 4)), "depth": ((32, 2), (32, 32))}


def check_coordinates(
    family: str, optimizer: Any, axis: str, sizes: dict[str, Any], least: float, most: float = 1.5
) -> None:
    """At every of the steps the sizes in the large model are `least` to `most` of the small one's.

    Sums of drawn weights that are not learned yet fall, with the square root of width or depth: the
    logits, and OLMo2's stream, which is a sum of normed branches.
    """
    small, large = sizes[axis]
    for name, ratios in growth(family, optimizer, small, large, transfers=True).items():
        assert least < min(ratios), (name, ratios)
        assert max(ratios) < most, (name, ratios)

    name, grown = GROWING[family, axis]
    standard = growth(family, optimizer, small, large, transfers=False)
    assert min(standard[name]) > grown, standard[name]


@pytest.mark.parametrize("axis", SIZES)
@pytest.mark.parametrize("family", ["olmo2", "llama"])
def test_activations_do_not_grow_with_the_model(family, axis):
    check_coordinates(family, ADAMW, axis, SIZES, least=1 / 3)


@pytest.mark.stress
@pytest.mark.parametrize("axis", SIZES)
@pytest.mark.parametrize("family", GROWTH_OF)
def test_activations_do_not_grow_over_more_sizes(family, axis):
    check_coordinates(family, ADAMW, axis, WIDE, least=1 / 4)


@pytest.mark.stress
@pytest.mark.parametrize("axis", SIZES)
@pytest.mark.parametrize(
    "optimizer", [Muon(peak_lr=3e-3), Lion(peak_lr=1e-3)], ids=["muon", "lion"]
)
@pytest.mark.parametrize("family", GROWTH_OF)
def test_activations_do_not_grow_under_other_optimizers(family, optimizer, axis):
    """The first steps at full rate change more of OLMo2's small stream of drawn weights."""
    most = 3 if (family, axis) == ("olmo2", "depth") else 1.5
    check_coordinates(family, optimizer, axis, LARGE, least=1 / 5, most=most)


def test_a_study_says_at_which_size_its_peaks_were_found():
    settings = ("parametrization=completep", "base_width=64")
    study = resolve("olmo2-190m-lr", settings=settings)
    (line,) = (line for line in summary(study) if line.startswith("lr1e-3 "))
    assert "0.001 at width 64 and depth 4 (completep)  " in line
    assert study.name == "olmo2-190m-lr-parametrization=completep-base_width=64"

    plain = resolve("olmo2-190m-lr")
    others = {"base_width": 128}
    fingerprints = {
        fingerprint(run)
        for run in (plain.trained[0], study.trained[0], study.trained[0].model_copy(update=others))
    }
    assert len(fingerprints) == 3
    assert not any("completep" in line for line in summary(plain))


def test_a_tied_head_after_a_norm_without_weights_is_refused():
    model = model_of("olmo").model_copy(update={"tie_word_embeddings": True})
    with pytest.raises(ValueError, match=r"olmo has none; set model\.tie_word_embeddings to false"):
        small_run("tied", model=model, optimizer=ADAMW, **TRANSFERRED)


def test_a_base_without_a_parametrization_is_refused():
    with pytest.raises(UserError, match="base_depth belongs to completep; set parametrization"):
        resolve("olmo2-190m-lr", settings=("base_depth=2",))
