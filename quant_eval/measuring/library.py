"""A model that another project's library quantizes, in a process of its own.

Shapes: N calibration sequences, L tokens of a sequence.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from base.ranks import Ranks
from ckpt_tools.formats.hf_weights import HFWeights, read_header
from ckpt_tools.formats.weights import DTYPES, Described, FileTensor, Weights
from quant_eval.libraries.job import MODULES, REPORT, WEIGHTS, Job, Report, run_job
from quant_eval.model.streamed import StreamedModel
from quant_eval.settings import ComputeSettings
from quant_eval.specs import QuantSpec


class Overlaid:
    """Weights of which some are in another file."""

    def __init__(self, below: Weights, path: Path) -> None:
        self._below = below
        self._above: dict[str, FileTensor] = read_header(path)
        assert self._above.keys() <= below.tensors.keys()

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Those below: names and shapes are the same."""
        return self._below.tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor."""
        above = self._above.get(name)
        return above.read(start, stop) if above else self._below.read(name, start, stop)


def library_model(
    hf_dir: Path,
    spec: QuantSpec,
    draw_NL: Tensor,
    compute: ComputeSettings,
    work: Path,
    ranks: Ranks,
) -> tuple[StreamedModel, Report] | tuple[None, None]:
    """Return the model as the library of the spec's method quantizes it; None for own methods.

    Rank 0 runs the library. `work` is a directory that all ranks see; the weights in it are read
    until the model is done with.
    """
    if spec.method not in MODULES:
        return None, None
    if ranks.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        save_file({"input_ids": draw_NL}, work / "calibration.safetensors")
        job = Job(
            hf_dir=hf_dir,
            spec=spec,
            calibration=work / "calibration.safetensors",
            dtype=compute.dtype,
            batch_size=compute.batch_size,
            threads=torch.get_num_threads(),
            out=work / "out",
        )
        run_job(job)
    ranks.wait()
    report = Report.model_validate_json((work / "out" / REPORT).read_text())
    weights = Overlaid(HFWeights(hf_dir), work / "out" / WEIGHTS)
    return StreamedModel(hf_dir, weights, DTYPES[compute.dtype], ranks.device), report
