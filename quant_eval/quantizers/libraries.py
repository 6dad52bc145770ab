"""Methods of other projects' libraries, each run in a process of its own (`libraries.job`)."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from base.errors import UserError
from quant_eval.grammar import number
from quant_eval.group import LinearGroup, RoundedGroup
from quant_eval.quantizer import (
    Damping,
    GroupSpec,
    Iterations,
    Order,
    RoundingOrder,
    StaticGroups,
    Symmetric,
    check_order,
)

# GPTQ as arXiv:2510.06213 ran it: the defaults of gptqmodel before version 5.
PAPER: dict[str, Any] = {
    "group_size": 128,
    "symmetric": True,
    "order": "actorder",
    "static_groups": False,
    "damping": 0.05,
}
# Found right linear by linear. Olmo is not: gptqmodel does not know the order of its linears, and
# calibrates o_proj and down_proj on inputs from before q_proj and gate_proj were rounded. Classes
# of this project's own, as open-sci-ref's, it does not know.
BY_GPTQMODEL = (
    *("Olmo2ForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM"),
    *("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("SmolLM3ForCausalLM", "ApertusForCausalLM", "Olmo3ForCausalLM"),
)
AUTOROUND_MULTIPLE = 32  # auto-round leaves out linears of other sizes


class LibrarySpec(GroupSpec):
    """Integers on grids, by another project's library, which leaves dense weights."""

    symmetric: Symmetric = True

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Return the weights that the library left."""
        assert group.library_OI is not None
        return RoundedGroup(group.library_OI)


class GPTQModel(LibrarySpec):
    """GPTQ by gptqmodel."""

    method = "gptqmodel"
    title = "GPTQ by gptqmodel"
    source = (
        "arXiv:2210.17323 as ModelCloud's gptqmodel 7.6 implements it; -paper is what"
        " arXiv:2510.06213 ran"
    )
    library = "gptqmodel"
    module = "run_gptqmodel"
    architectures = BY_GPTQMODEL
    widths = (2, 3, 4, 8)
    abbreviations: ClassVar = {"paper": PAPER}

    order: RoundingOrder = "natural"
    static_groups: StaticGroups = False
    damping: Damping = 0.05

    @model_validator(mode="after")
    def _order_fits(self) -> Self:
        check_order(self.order, self.static_groups, self.group_size)
        return self


class GPTAQ(LibrarySpec):
    """GPTQ that also makes good the errors of the layers before."""

    method = "gptaq"
    title = "GPTAQ"
    source = "Li et al. 2025, arXiv:2504.02692, by gptqmodel 7.6"
    library = "gptqmodel"
    module = "run_gptqmodel"
    architectures = BY_GPTQMODEL
    widths = (2, 3, 4, 8)
    order: ClassVar[Order] = "natural"
    static_groups: ClassVar[bool] = False

    damping: Damping = 0.05
    alpha: Annotated[float, number("alpha", "alpha {:g}")] = Field(
        default=0.25, ge=0, le=1, description="weight of GPTAQ's asymmetric term"
    )


class AWQ(LibrarySpec):
    """Scales that protect the weights of loud inputs."""

    method = "awq"
    title = "AWQ"
    source = "Lin et al. 2023, arXiv:2306.00978, by llmcompressor 0.14 with this project's mappings"
    library = "llmcompressor"
    module = "run_llmcompressor"
    widths = (3, 4, 8)
    folds = True

    symmetric: Symmetric = False


class AutoRound(LibrarySpec):
    """Rounding up or down learned by signed gradient descent."""

    method = "autoround"
    title = "AutoRound"
    source = "Cheng et al. 2023, arXiv:2309.05516, by auto-round 0.15"
    library = "auto-round"
    module = "run_autoround"
    widths = (2, 3, 4, 8)

    iterations: Iterations = 200

    @property
    def needs_equal_lengths(self) -> bool:
        """It is learned on calibration sequences, which have to be of one length."""
        return True

    def check_sizes(self, name: str, shape: tuple[int, int]) -> None:
        """Raise UserError for groups that do not divide, or a linear that is left out."""
        super().check_sizes(name, shape)
        outputs, inputs = shape
        if outputs % AUTOROUND_MULTIPLE or inputs % AUTOROUND_MULTIPLE:
            raise UserError(
                f"auto-round leaves out {name}, {outputs} x {inputs}: it takes multiples of"
                f" {AUTOROUND_MULTIPLE}; use our own gptq"
            )
