"""The picture of docs/design/data-order.md: the order of a small text beside NumPy's shuffle."""

from typing import Any

import numpy as np

from study.figures.charts import CONFIG
from train.data.order import permute

SIZE, SHOWN, SEED = 10_000, 250, 6198


def points(title: str, sequences: np.ndarray) -> list[dict[str, Any]]:
    """Return a point for each of the first positions of the order."""
    return [
        {"order": title, "position": position, "place": int(sequence)}
        for position, sequence in enumerate(sequences[:SHOWN])
    ]


def data_order() -> dict[str, Any]:
    """Return the places that the first positions of three orders read, as a chart."""
    positions = np.arange(SIZE)
    first, second = (permute(positions, SIZE, SEED, epoch) for epoch in (0, 1))
    stored = np.random.default_rng(SEED).permutation(SIZE)
    rows = [
        *points("epoch 0, computed", first),
        *points("epoch 1, computed", second),
        *points("numpy's shuffle, stored", stored),
    ]
    return {
        "title": f"The first {SHOWN} of {SIZE:,} sequences: a bijection without visible structure",
        "data": {"values": rows},
        "facet": {"column": {"field": "order", "title": None, "sort": None}},
        "spec": {
            "width": 190,
            "height": 190,
            "mark": {"type": "point", "size": 4, "filled": True, "aria": False},
            "encoding": {
                "x": {
                    "field": "position",
                    "type": "quantitative",
                    "title": "position in training (sequences)",
                    "axis": {"tickCount": 4},
                },
                "y": {
                    "field": "place",
                    "type": "quantitative",
                    "title": "place in the token file (sequences)",
                    "axis": {"tickCount": 4},
                },
            },
        },
        "config": CONFIG,
    }
