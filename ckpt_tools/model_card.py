"""The model card of a published export: its recipe, its parity, and its measurements."""

import json
from collections.abc import Iterator
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ckpt_tools.averaging import describe
from ckpt_tools.hf.measured import Eigenvalue, MeasuredMean, Read
from ckpt_tools.hf.results import Result

README = "README.md"
TEMPLATE = """\
---
{{ card_data }}
---

# {{ run.name }} {{ revision }}

{{ "An average of weights (%s)" % average if average else "Weights" }}
of the pretraining run `{{ run.name }}`
after update {{ "{:,}".format(lineage.step) }} of {{ "{:,}".format(run.total_steps) }}.
Load it with `AutoModelForCausalLM.from_pretrained("{{ revision }}")`, the path of this directory.
{% for ingredient in lineage.ingredients %}
- {{ lineage.coefficients[loop.index0] }} of `{{ ingredient.path }}`
{%- endfor %}

`lineage.json` says what this was made from, with size and SHA-256 of every file of the model.
{%- if license == "other" %} The publisher has not named a license yet.{% endif %}

## Parity with the training engine

{% if lineage.parity -%}
transformers in fp32 computes from these files what the training engine computed for the same
tokens, but for {{ "%.2g" | format(lineage.parity.logits) }} of the largest logit;
{{ "%.2g" | format(lineage.parity.tolerance) }} is allowed ({{ lineage.parity.precision }}).
{%- else -%}
Made from files: no training engine computed with these weights.
{%- endif %}

## Measured

{% for result, figure, value, uncertainty in figures -%}
{% if loop.first -%}
Losses are in nats per token. The files `result.json` have all figures and settings.

| result | figure | value | interval or standard error |
|---|---|---|---|
{% endif -%}
| `{{ result }}` | {{ figure }} | {{ value }} | {{ uncertainty }} |
{% else -%}
Nothing.
{% endfor %}
## Recipe

```json
{{ recipe }}
```
"""


def model_card(
    revision: str,
    run: dict[str, Any],
    lineage: dict[str, Any],
    results: list[Result[Any]],
    license: str,
) -> str:
    """Return README.md of one revision, from the settings of its run and its published lineage."""
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        tags=[run["model"]["family"], "pretraining", "training-dynamics", "quantization"],
    )
    rows = [
        # The last two directories of a result are <measurement>/<spec>.
        [f"{result.path.parent.parent.name}/{result.path.parent.name}", *map(_cell, cells)]
        for result in results
        for cells in _figures(result.measured)
    ]
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        run=run,
        revision=revision,
        lineage=lineage,
        average=describe(lineage),
        recipe=json.dumps(run, indent=2),
        figures=rows,
    )
    return str(card.content)


def _figures(measured: Read, prefix: str = "") -> Iterator[tuple[str, float, Any]]:
    """Yield every single figure of a result: name, value, and its uncertainty."""
    intervals = getattr(measured, "intervals", {})
    for key, value in measured:
        name = prefix + key.replace("_", " ")
        if isinstance(value, float):
            yield name, value, intervals.get(key)
        elif isinstance(value, Eigenvalue):
            yield name, value.value, "converged" if value.converged else "NOT converged"
        elif isinstance(value, MeasuredMean):
            yield name, value.mean, value.standard_error
        elif isinstance(value, Read) and key != "interval":  # a part, such as the whole of a step
            yield from _figures(value, f"{name}: ")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return f"[{value[0]:.4g}, {value[1]:.4g}]"
    return "-" if value is None else str(value)
