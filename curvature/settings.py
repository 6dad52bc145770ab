"""What decides the numbers of a measurement, the model and the text aside: one class of settings for each spec."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from curvature.trace import hutch_plus_plus, xtrace
from curvature.trace.hutchinson import check_pairs
from train.command import UserError
from train.frozen import Frozen

Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]


class ProductSettings(Frozen):
    """How Hessian-vector products are computed, and on which sequences."""

    microbatch_sequences: Count = Field(default=2, description="sequences of one product")
    sequence_length: Count | None = Field(default=None, description="tokens; None is the model's context")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the probes and of the order of the sequences")
    level: float = Field(default=0.95, gt=0, le=0.9999, description="coverage of the intervals")
    route: Literal["dual", "finite-difference"] = "dual"
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="of the dual layers' products of matrices")
    checkpointing: bool = Field(default=False, description="keep only the blocks' inputs for the backward pass")
    sharding: Literal["none", "fsdp"] = Field(default="none", description="of the parameters over the ranks")
    device: Literal["cpu", "cuda"] = "cpu"
    vectors: Literal["device", "host"] = Field(default="device", description="where vectors over all parameters lie")
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = Field(
        default=None, description="kernel of transformers that finite differences run; None is sdpa"
    )

    def check(self) -> None:
        """UserError for settings that do not go together."""
        if self.route == "dual" and self.attention is not None:
            raise UserError(
                f"--attention {self.attention}: the dual layers need second derivatives and compute attention of their "
                f"own; leave it out, or give --route finite-difference"
            )
        if self.attention == "flash_attention_2":
            raise UserError(
                "flash_attention_2 computes in half precision alone, where differences of gradients drown; "
                "give --attention sdpa"
            )
        if self.attention == "flex_attention" and self.device == "cpu":
            raise UserError("flex_attention has no backward pass on CPUs; give --attention sdpa")
        if self.route == "finite-difference" and self.dtype == "bf16":
            raise UserError("differences of gradients drown in bf16's rounding; give --dtype fp32 or --route dual")


class _EigenSettings(ProductSettings):
    """The fixed batch and how far eigenvalues on it are taken."""

    fixed_sequences: Count = Field(default=8, description="sequences of the fixed batch")
    max_iterations: Several = Field(default=50, description="iterations on the fixed batch at most")
    tolerance: float = Field(default=1e-3, gt=0, description="|Hx - lambda x| / |lambda| that counts as converged")

    @property
    def has_eigenvalues(self) -> bool:
        """True where eigenvalues are measured."""
        return True


class _TraceSettings(_EigenSettings):
    """A trace, and beside it the top eigenvalue: up to `max_iterations` further products, of as many vectors."""

    lambda_max: bool = Field(default=True, description="whether the top eigenvalue is measured too")
    # A residual of 1e-2 leaves 1e-4 of the value; trained checkpoints took 4 to 13 iterations to it.
    max_iterations: Several = Field(default=16, description="iterations on the fixed batch at most")
    tolerance: float = Field(default=1e-2, gt=0, description="|Hx - lambda x| / |lambda| that counts as converged")
    OF_LAMBDA_MAX: ClassVar[tuple[str, ...]] = ("max_iterations", "tolerance")

    @property
    def has_eigenvalues(self) -> bool:
        """True where eigenvalues are measured."""
        return self.lambda_max

    def check(self) -> None:
        """UserError for settings that do not go together."""
        super().check()
        for name in self.OF_LAMBDA_MAX:
            if not self.lambda_max and name in self.model_fields_set:
                raise UserError(f"--{name.replace('_', '-')} is of lambda_max; leave it out, or --no-lambda-max")


class HutchinsonSettings(_TraceSettings):
    """Traces from fresh (probe, microbatch) pairs, and lambda_max."""

    name: Literal["hutchinson"] = "hutchinson"
    pairs: Several = Field(default=32, description="(probe, microbatch) pairs behind the trace, at most")
    probes_per_microbatch: Count = Field(default=1, description="probes that share a microbatch")
    relative_error: float | None = Field(
        default=None, gt=0, description="stop when standard error / |trace| is no more; None takes all pairs"
    )
    norm_pairs: Several = Field(default=16, description="pairs whose probes are restricted to the norms")
    companion_pairs: Several = Field(default=16, description="microbatches of the Gauss-Newton and Fisher traces")
    OF_LAMBDA_MAX = ("fixed_sequences", *_TraceSettings.OF_LAMBDA_MAX)

    def check(self) -> None:
        """UserError for settings that do not go together."""
        super().check()
        check_pairs(self.pairs, self.probes_per_microbatch, self.relative_error)


class FixedTraceSettings(_TraceSettings):
    """The trace on the fixed batch by Hutch++ or XTrace, and lambda_max."""

    name: Literal["hutch++", "xtrace"]
    products: Annotated[int, Field(ge=6)] = Field(default=60, description="Hessian products behind the trace")

    def check(self) -> None:
        """UserError for settings that do not go together."""
        super().check()
        (hutch_plus_plus if self.name == "hutch++" else xtrace).check_products(self.products)


class LanczosSettings(_EigenSettings):
    """Both ends of the spectrum on the fixed batch, and its density."""

    name: Literal["lanczos"] = "lanczos"
    largest: Count = Field(default=5, description="algebraically largest eigenvalues")
    smallest: int = Field(default=3, ge=0, description="algebraically smallest eigenvalues")
    starts: Several = Field(default=4, description="start vectors of the density")
    steps: Several = Field(default=30, description="Lanczos steps of each of them")

    def check(self) -> None:
        """UserError for settings that do not go together."""
        super().check()
        wanted = self.largest + self.smallest
        if wanted > self.max_iterations:
            raise UserError(
                f"{wanted} eigenvalues take as many iterations; give --max-iterations {wanted} or ask for fewer"
            )


class PowerSettings(_EigenSettings):
    """Trace and top eigenvalue as arXiv 2510.06213 took them: probes and power iteration on one fixed batch."""

    name: Literal["power"] = "power"
    max_iterations: Several = Field(default=100, description="power iterations at most")
    probes: Several = Field(default=100, description="Rademacher probes of the trace, all on the fixed batch")


CurvatureSettings = HutchinsonSettings | FixedTraceSettings | LanczosSettings | PowerSettings
SPECS: dict[str, type[CurvatureSettings]] = {
    "hutchinson": HutchinsonSettings,
    "hutch++": FixedTraceSettings,
    "xtrace": FixedTraceSettings,
    "lanczos": LanczosSettings,
    "power": PowerSettings,
}
