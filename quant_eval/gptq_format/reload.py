"""The losses of a saved checkpoint as gptqmodel computes them, in a process of its own: an independent reader.

The process is `python -m quant_eval.gptq_format.run_reload JOB.json`; it leaves `losses.safetensors` in `Job.out`.

Shapes: N blocks, L tokens of a block.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant_eval.libraries.job import process_environment
from train.command import UserError
from train.frozen import Frozen
from train.run_directory import write_json

BLOCKS, LOSSES = "blocks.safetensors", "losses.safetensors"


class Job(Frozen):
    """What the process is told."""

    checkpoint: Path
    blocks: Path = Field(description="safetensors file; 'input_ids' int64 [N, L], unpadded")
    dtype: Literal["fp32", "bf16", "fp16"] = Field(description="that the model computes in")
    batch_size: int = Field(ge=1)
    out: Path = Field(description="safetensors file to write; 'nll' float64 [N]")


def reload_with_gptqmodel(
    checkpoint: Path, input_ids_NL: Tensor, *, dtype: Literal["fp32", "bf16", "fp16"], batch_size: int, threads: int
) -> Tensor:
    """The sum over each block's targets of -log p, nats, float64 [N]; every token but a block's first is a target.

    Raises:
        UserError: gptqmodel does not load the checkpoint; the reason is the last line of its process.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        save_file({"input_ids": input_ids_NL.cpu().contiguous()}, place / BLOCKS)
        job = Job(
            checkpoint=checkpoint.resolve(),
            blocks=place / BLOCKS,
            dtype=dtype,
            batch_size=batch_size,
            out=place / LOSSES,
        )
        write_json(place / "job.json", job.model_dump(mode="json"))
        done = subprocess.run(
            [sys.executable, "-m", "quant_eval.gptq_format.run_reload", str(place / "job.json")],
            capture_output=True,
            text=True,
            check=False,
            env=process_environment(threads),
            cwd=place,  # where it leaves a log
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise UserError(f"{checkpoint} was not loaded by gptqmodel: {lines[-1]}; save it again")
        return load_file(place / LOSSES)["nll"]
