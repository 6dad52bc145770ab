"""Costs of this project's code as ratios to a peer's. Nothing is asserted."""


def line(comparison: str, ratio: float, remark: str) -> str:
    """One line of `make bench`."""
    return f"{comparison:<70} {ratio:>6.2f}   ({remark})"
