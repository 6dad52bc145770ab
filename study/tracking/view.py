"""The first view of a study in MLflow: which columns its list of runs has, and which charts.

MLflow keeps a view that somebody shares in a tag of the experiment, and opens it for an address
that names it (`mlflow.sharedViewState.NAME`, `viewStateShareKey=NAME`). The state is that of MLflow
3.17's page of an experiment; keys that it does not know are left out by the page itself.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.definition import Study
from study.measurements.curvature import TRACE
from study.paths import MIRROR_JSON
from study.tracking.store import HOST, HTTP, PORT, masked, server_command, store_uri
from study.tracking.streams import FINAL
from train.run.metrics import HELD_OUT_LOSS

NAME = "quantization"
VIEW_TAG = f"mlflow.sharedViewState.{NAME}"
# Of an experiment: MLflow would ask which kind it is before it shows anything.
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
SECTION = "quantization"
COLUMN_PIXELS = 210  # shows a name such as final/gptq-b3-g128/kl_divergence whole


def opening(directory: Path, uri: str) -> str:
    """Return what a person does to look at a study in a store, in a line or two."""
    root = directory.parent
    own = uri == store_uri(root)
    lines = [f"open it with: {server_command(root)}" if own else f"it is in {masked(uri)}"]
    if own:
        lines.append("every user of that machine can read and change it; SECURITY.md has a login")
    server = f"http://{HOST}:{PORT}" if own else masked(uri).rstrip("/")
    mirrored = directory / MIRROR_JSON
    if server.startswith(HTTP) and mirrored.exists():
        experiment = json.loads(mirrored.read_text())["experiment_id"]
        query = f"viewStateShareKey={NAME}&compareRunsMode=CHART"
        lines.append(f"then look at: {server}/#/experiments/{experiment}/runs?{query}")
    return "\n".join(lines)


def view_of(study: Study, parent: str) -> str:
    """Return the state of MLflow's page: runs by what they were set to and what came of it.

    `parent` is the id of the study's own run, which has no row. The lowest error comes first.
    """
    settings, finals = [axis.key for axis in study.axes], final_metrics(study)
    columns = [
        *(f"params.`{key}`" for key in settings),
        *(f"metrics.`{name}`" for name in finals),
    ]
    state = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'",
        # by time of creation the page would put all runs below the study's own, folded
        "orderByKey": f"metrics.`{finals[1]}`",
        "orderByAsc": True,
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": dict.fromkeys(columns, COLUMN_PIXELS),
        "runsHiddenMode": "SHOW_ALL",
        "compareRunSections": [_section()],
        "compareRunCharts": _charts(study, settings, finals),
        # the page adds sections of the other metrics; by name they would come first
        "isAccordionReordered": True,
    }
    return json.dumps(state)


def final_metrics(study: Study) -> list[str]:
    """Return the metrics of a run's end: its loss, and what each spec does to it."""
    errors = [f"{FINAL}/{spec}/kl_divergence" for spec in study.quantization.specs]
    curved = [f"{FINAL}/trace"] if study.curvature else []
    return [f"{FINAL}/{HELD_OUT_LOSS}", *errors, *curved]


def _section() -> dict[str, Any]:
    return {
        "uuid": SECTION,
        "name": "Quantization",
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }


def _charts(study: Study, settings: Sequence[str], finals: Sequence[str]) -> list[dict[str, Any]]:
    """Return the axes of the sweep beside the final errors, and errors along the trajectories."""
    charts: list[dict[str, Any]] = [
        {
            "type": "PARALLEL",
            "selectedParams": list(settings),
            "selectedMetrics": list(finals),
            "showAllRuns": True,
        }
    ]
    along = [f"quant/{spec}/kl_divergence" for spec in study.quantization.specs]
    for name in (*along, HELD_OUT_LOSS, *([TRACE] if study.curvature else [])):
        charts.append(
            {
                "type": "LINE",
                "displayName": name,
                "metricKey": name,
                "selectedMetricKeys": [name],
                "xAxisKey": "step",
                "scaleType": "log",
                "lineSmoothness": 0,
                "displayPoints": True,
            }
        )
    return [
        {"uuid": f"{SECTION}-{index}", "metricSectionId": SECTION, "isGenerated": False, **chart}
        for index, chart in enumerate(charts)
    ]
