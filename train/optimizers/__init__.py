"""The optimizers of a run, one file and one row each: `optimizer` in run.json.

Its key `matrices` names the row: what updates the hidden matrices, and with them all the rest
unless the row leaves that to another one, as Muon does.

A row is a settings class. It says in words what it is, which fp32 states it keeps for a parameter
(`STATES`: their keys in checkpoints, and 4 bytes each for the planner), and how it updates weights
in place. Engines, checkpoints and planner read all of that from the row:

- An update that takes each weight by itself needs no more. Its states are sharded as the fp32
  weights are, by megatron-core's distributed optimizer over tensor, pipeline and data ranks, and by
  DeepSpeed's ZeRO.
- One that takes hidden matrices whole is a `MatrixOptimizer`: `train.optimizers.matrices` brings
  their parts together. Fp32 states of a whole matrix, of any shape, are on the rank that computes
  it, and in checkpoints by the HF name of the matrix.

No other file names an optimizer. `settings` holds what all have in common, `stepping` is the
optimizer that both engines step.
"""

from typing import Annotated

from pydantic import Field

from train.optimizers.adamw import AdamW
from train.optimizers.lion import Lion
from train.optimizers.muon import Muon
from train.optimizers.soap import Soap

AnyOptimizer = Annotated[AdamW | Muon | Lion | Soap, Field(discriminator="matrices")]
