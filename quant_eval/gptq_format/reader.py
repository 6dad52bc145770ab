"""Reading a checkpoint in the GPTQ format as the dense weights that its kernels compute with.

Shapes: O output features, I input features, G groups of a row.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from base.errors import UserError
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import Described, read_whole
from quant_eval.gptq_format.layout import PACKED, read_layout
from quant_eval.gptq_format.packing import TAKEN_FROM_ZEROS, unpack
from quant_eval.grid import Rounded


class SavedWeights:
    """The weights of a saved checkpoint by the HF names of the model that was quantized.

    A packed linear is scale x (code - zero), exact in fp32, rounded to `dtype`; one is held
    unpacked at a time.

    Attributes:
        layout: what config.json says of the packed tensors.
        dtype: of packed linears once they are dense.
        tensors: shapes and types of the dense weights, in the order of the files.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Open the files and check all that can be seen without unpacking.

        Args:
            directory: a saved checkpoint.
            dtype: of packed linears; None: as config.json says. fp32 keeps what bf16 would round
                away.

        Raises:
            UserError: a tensor is missing, has another shape or type than config.json says, or
                groups that do not exist; the message names it.
        """
        self.directory = directory
        self.layout, saved_dtype = read_layout(directory)
        self.dtype = dtype or saved_dtype
        self._files = HFWeights(directory)
        self._held: tuple[str, Rounded] | None = None
        self._linears: set[str] = set()
        tensors: dict[str, Described] = {}
        for name, described in self._files.tensors.items():
            linear, _, last = name.rpartition(".")
            if last not in PACKED:
                tensors[name] = described
            elif linear not in self._linears:
                self._linears.add(linear)
                tensors[f"{linear}.weight"] = self._checked(linear)
        self.tensors: Mapping[str, Described] = tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a dense weight, contiguous."""
        linear = name.removesuffix(".weight")
        if linear == name or linear not in self._linears:
            return self._files.read(name, start, stop)
        whole = self.rounded(linear)
        rows = Rounded(
            whole.codes_OI[start:stop],
            whole.scales_OG[start:stop],
            whole.zeros_OG[start:stop],
            whole.groups_I,
        )
        return rows.dense().to(self.dtype)

    def rounded(self, linear: str) -> Rounded:
        """Codes and grids of a linear, by its module's name.

        Raises:
            UserError: a zero is none of the codes, which loaders differ about.
        """
        if self._held is None or self._held[0] != linear:
            packed = {key: read_whole(self._files, f"{linear}.{key}") for key in PACKED}
            rounded = unpack(packed, self.layout.bits, self.layout.checkpoint_format)
            first = TAKEN_FROM_ZEROS[self.layout.checkpoint_format]
            if (
                not first
                <= int(rounded.zeros_OG.min())
                <= int(rounded.zeros_OG.max())
                < 2**self.layout.bits
            ):
                raise UserError(
                    f"{self.directory}: '{linear}.qzeros' holds a zero that format"
                    f" {self.layout.checkpoint_format} has no place for; save the checkpoint again"
                )
            self._held = linear, rounded
        return self._held[1]

    def _checked(self, linear: str) -> Described:
        """The dense weight of a linear whose packed tensors are as they have to be."""
        held = self._files.tensors
        missing = [key for key in PACKED if f"{linear}.{key}" not in held]
        if missing or f"{linear}.weight" in held:
            problem = (
                f"'{linear}.{missing[0]}' is missing"
                if missing
                else f"'{linear}.weight' is there, and packed too"
            )
            raise UserError(f"{self.directory}: {problem}; save the checkpoint again")
        num_outputs = held[f"{linear}.scales"].shape[-1]
        num_inputs = held[f"{linear}.g_idx"].shape[0]
        for key, wanted in self.layout.packed(num_outputs, num_inputs).items():
            found = held[f"{linear}.{key}"]
            if found != wanted:
                raise UserError(
                    f"{self.directory}: '{linear}.{key}' is {found.dtype} {found.shape},"
                    f" config.json needs {wanted.dtype} {wanted.shape}; save the checkpoint again"
                )
        groups_I = read_whole(self._files, f"{linear}.g_idx")
        num_groups = self.layout.groups(num_inputs)
        if not 0 <= int(groups_I.min()) <= int(groups_I.max()) < num_groups:
            raise UserError(
                f"{self.directory}: '{linear}.g_idx' names a group outside of 0 .."
                f" {num_groups - 1}; save it again"
            )
        if not self.layout.desc_act and not torch.equal(
            groups_I, self.layout.natural_groups(num_inputs)
        ):
            raise UserError(
                f"{self.directory}: '{linear}.g_idx' is not in order although desc_act is false, so"
                " kernels would not read it; save the checkpoint again"
            )
        return Described((num_outputs, num_inputs), self.dtype)
