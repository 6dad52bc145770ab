"""Hadamard transforms in a compressed-tensors checkpoint: of inputs, and of the values' outputs.

`transform_config` of config.json names the linears whose inputs or outputs are to be transformed
when they compute; their codes are those of the weights in the transformed basis. A matrix of +1 and
-1, which readers divide by the root of its size, serves all linears of a group, and is stored with
the first of them, as llm-compressor stores what modules share.

vLLM computes powers of two without signs by a fast transform and reads the matrix for others. It
does so without tensor parallelism alone, and for linears without biases. transformers 5 does not
read `transform_config` (`compressed_tensors.transform.apply_transform_config` adds transforms).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from base.errors import UserError
from quant_eval.quantizer import QuantSpec
from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.placement import RESIDUAL_SIGNS, Place, places_of
from quant_eval.transforms.steps import Transform
from train.model.families import SITES, family_of

if TYPE_CHECKING:  # they take seconds to import
    from compressed_tensors.transform import TransformArgs, TransformConfig
    from transformers import PretrainedConfig

INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True)
class Matrix:
    """One Hadamard matrix.

    Attributes:
        kind: "had", of all features; "blocks", of successive ones; "rhad", of all with the signs of
            the residual stream before.
    """

    kind: str
    size: int

    @property
    def name(self) -> str:
        """The name of its group in `transform_config`."""
        return f"{self.kind}{self.size}"

    def transform(self, width: int) -> Transform:
        """Return the transform of `width` features."""
        seed = (RESIDUAL_SIGNS,) if self.kind == "rhad" else None
        return Transform(*hadamard_steps(width, self.size, seed))

    def stored(self) -> Tensor:
        """Return the matrix M as +1 and -1, bf16 [size, size]: rows x become x M / sqrt(size)."""
        # The images of unit vectors are the rows of the orthogonal matrix.
        signs: Tensor = self.transform(self.size).inputs(torch.eye(self.size)) * self.size**0.5
        return signs.round().to(torch.bfloat16)


class HadamardTransforms:
    """The transforms of one checkpoint.

    Args of the constructor:
        matrices: by location and the last name of linears.
    """

    def __init__(self, matrices: Mapping[tuple[str, str], Matrix]) -> None:
        self._matrices = dict(matrices)
        self._stored: set[Matrix] = set()

    @staticmethod
    def of_spec(spec: QuantSpec, config: "PretrainedConfig") -> "HadamardTransforms":
        """Return the transforms of a spec.

        UserError if the format cannot hold them.
        """
        _check(spec)
        if not spec.rotation:
            return HadamardTransforms({})
        family = family_of(config)
        places = places_of(spec, family, config)
        reading = (family.reading, (family.writing,), family.mlp_reading, (family.mlp_writing,))
        matrices = {
            (INPUT, name): _matrix(places.sites[site])
            for site, names in zip(SITES, reading, strict=True)
            for name in names
        }
        outputs = {(OUTPUT, name): _matrix(place) for name, place in places.outputs.items()}
        return HadamardTransforms(matrices | outputs)

    @staticmethod
    def read(settings: Mapping[str, Any]) -> "HadamardTransforms":
        """Return the transforms of a `transform_config`, or of {}."""
        matrices = {}
        for name, group in settings.get("config_groups", {}).items():
            # Names of groups are as `Matrix.name` writes them: kind and size.
            kind = name.rstrip("0123456789")
            for arguments in group["apply"]:
                for target in arguments["targets"]:
                    linear = target.rpartition(".")[2].removesuffix("$")
                    size = int(name.removeprefix(kind))
                    matrices[arguments["location"], linear] = Matrix(kind, size)
        return HadamardTransforms(matrices)

    def check_linears(self, linears: Mapping[str, nn.Linear]) -> None:
        """Refuse linears that vLLM would not transform."""
        biased = [name for name, linear in linears.items() if linear.bias is not None]
        if self._matrices and biased:
            raise UserError(
                f"{biased[0]} has a bias, and vLLM transforms linears without biases alone; leave"
                " the rotation or --save out"
            )

    def add(self, linear: str, width: int, transform: Transform) -> dict[str, Tensor]:
        """Return the matrices to store with a linear, by name: those not stored with another.

        `transform` is that of its inputs, which has to be the one in config.json.
        """
        # Compared on one row: no transform is written out as a matrix.
        probe_1I = torch.linspace(-1, 1, width, dtype=torch.float64)[None]
        expected, actual = self.of(INPUT, linear, width), copy.deepcopy(transform).to("cpu")
        assert expected is not None, f"{linear} has a transform that config.json does not name"
        assert torch.equal(actual.inputs(probe_1I), expected.inputs(probe_1I)), "another transform"
        tensors = {}
        for location in (INPUT, OUTPUT):
            matrix = self._matrices.get((location, linear.rpartition(".")[2]))
            if matrix and matrix not in self._stored:
                self._stored.add(matrix)
                tensors[f"{linear}.{matrix.name}_{location}.weight"] = matrix.stored()
        return tensors

    def of(self, location: str, linear: str, width: int) -> Transform | None:
        """Return the transform of the inputs or outputs of a linear."""
        matrix = self._matrices.get((location, linear.rpartition(".")[2]))
        return matrix.transform(width) if matrix else None

    def config(self) -> "TransformConfig | None":
        """Return the value of `transform_config`, None without transforms.

        It lists what is done when linears compute, not the weights, which are transformed already.
        vLLM takes the type "hadamard" for the fast transform.
        """
        from compressed_tensors.transform import TransformConfig, TransformScheme

        groups = {}
        for matrix in dict.fromkeys(self._matrices.values()):
            is_fast = matrix.size & (matrix.size - 1) == 0 and matrix.kind != "rhad"
            groups[matrix.name] = TransformScheme(
                type="hadamard" if is_fast else "random-hadamard",
                apply=self._applied(matrix),
                head_dim=matrix.size if matrix.kind == "blocks" else None,
            )
        return TransformConfig(config_groups=groups) if groups else None

    def _applied(self, matrix: Matrix) -> "list[TransformArgs]":
        """Return the places where a matrix M is applied: x M on inputs, y M^T on outputs."""
        from compressed_tensors.transform import TransformArgs

        applied = []
        for location in (INPUT, OUTPUT):
            targets = [
                rf"re:.*\.{name}$"
                for (where, name), other in self._matrices.items()
                if where == location and other == matrix
            ]
            if targets:
                is_inverse = location == OUTPUT
                applied.append(
                    TransformArgs(targets=targets, location=location, inverse=is_inverse)
                )
        return applied


def is_stored_matrix(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a transform's."""
    return name.endswith((f"_{INPUT}.weight", f"_{OUTPUT}.weight"))


def _matrix(place: Place) -> Matrix:
    assert place.kind == "hadamard"
    if place.signs == "residual":
        return Matrix("rhad", place.width)
    return Matrix("blocks", place.block) if place.block else Matrix("had", place.width)


def _check(spec: QuantSpec) -> None:
    """Refuse transforms that the format, or engines that read it, cannot hold."""
    instead = "measure it without --save" if spec.casts else "write its weights with --dense"
    is_held = spec.rotation in ("had", "quarot") and spec.smooth is None and not spec.shift
    if spec.is_transformed and not is_held:
        raise UserError(
            f"spec {spec.name}: compressed-tensors checkpoints hold one Hadamard matrix for all"
            f" blocks as a transform; give -had or -quarot alone, or {instead}"
        )
    if spec.rotation == "quarot" and spec.kv:
        raise UserError(
            f"spec {spec.name}: no engine rotates cached keys as checkpoints state it; leave -kv"
            f"{spec.kv.removeprefix('int')} out, or {instead}"
        )
