"""The ends of training of several studies in one table.

Columns are those of the studies' own tables, and what studies differ in: see `SIZE_COLUMNS`. A
column that a study does not have is empty.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from base.files import replaced_file
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from study.definition import Study
from study.paths import last_model, quantization_result
from study.released import ReleasedRun
from study.results.summary import RunSummary, summarize
from study.results.table import read_table, schema_of
from train.model.config import ModelConfig
from train.model.families import parameter_shapes

SIZE_COLUMNS = {
    "label": pa.string(),
    "parameters": pa.int64(),
    "tokens_per_parameter": pa.float64(),
    "evaluation_sha256": pa.string(),
}
End = dict[str, Any]


def parameters_of(model: ModelConfig) -> int:
    """Return the parameters without the token embedding, as OLMo-core's ladder names sizes."""
    shapes = parameter_shapes(model).items()
    return sum(math.prod(shape) for name, shape in shapes if "embed" not in name)


def ends_of(directory: Path, study: Study) -> list[End]:
    """Return a row for every end of training that the study's table holds."""
    summaries = summarize(study, read_table(directory, study))
    return [_end(directory, study, summary) for summary in summaries if summary.last]


def _end(directory: Path, study: Study, summary: RunSummary) -> End:
    run = summary.run
    end = dict(summary.last or {}) | {"label": summary.label}
    path = directory / quantization_result(run.name, last_model(run), study.quantization.specs[0])
    if path.exists():
        evaluation = read_result(path, Quantization).spec.evaluation
        end["evaluation_sha256"] = evaluation.sha256 if evaluation else None
    if not isinstance(run, ReleasedRun):  # of a released model no size is known
        end["parameters"] = parameters_of(run.model)
        end["tokens_per_parameter"] = end["tokens"] / end["parameters"]
    return end


def write_ends(path: Path, ends: Sequence[End], studies: Sequence[Study]) -> None:
    """Write the ends as parquet, aside and renamed.

    A factor that is a number in one study and a word in another is text.
    """
    types: dict[str, set[pa.DataType]] = {name: {kind} for name, kind in SIZE_COLUMNS.items()}
    for study in studies:
        for field in schema_of(study):
            types.setdefault(field.name, set()).add(field.type)
    texts = {name for name, own in types.items() if len(own) > 1 and pa.string() in own}
    columns = {
        name: pa.string() if name in texts else pa.float64() if len(own) > 1 else own.pop()
        for name, own in types.items()
    }
    rows = [
        {
            name: str(value) if name in texts and value is not None else value
            for name, value in end.items()
        }
        for end in ends
    ]
    with replaced_file(path) as aside:
        pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema([*columns.items()])), aside)
