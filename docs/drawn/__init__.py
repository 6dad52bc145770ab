"""The pictures of the design pages: NAME.py has NAME(), which returns a Vega-Lite chart."""

from typing import Any


def logarithmic(
    field: str, title: str, domain: tuple[float, float], ticks: list[float], form: str
) -> dict[str, Any]:
    """Return a logarithmic axis, its ticks in a format of d3."""
    return {
        "field": field,
        "type": "quantitative",
        "scale": {"type": "log", "domain": list(domain), "nice": False},
        "axis": {"title": title, "values": ticks, "format": form},
    }
