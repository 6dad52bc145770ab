"""Figures of one study on CPUs that round differently: `python -m tests.cpu_noise ROOT...`, see
other_cpus.sh.
"""

import sys
from pathlib import Path

import pyarrow.parquet as pq

FIGURES = {
    "held-out loss": ("held_out_loss", "held_out_loss_standard_error"),
    "KL, 3 bits": ("quant/gptq-b3-g32/kl_divergence", None),
    "KL, 4 bits": ("quant/gptq-b4-g32/kl_divergence", None),
    "relative error, 3 bits": ("quant/gptq-b3-g32/relative_error", None),
    "trace": ("curvature/trace", "curvature/trace_standard_error"),
    "lambda max": ("curvature/lambda_max", None),
}


def final_rows(root: Path) -> dict[str, dict]:
    """Run -> its row of the last checkpoint of the only study below a root."""
    (table,) = root.glob("*/table.parquet")
    rows = [row for row in pq.read_table(table).to_pylist() if row["average"] is None]
    return {row["run"]: row for row in sorted(rows, key=lambda row: row["step"])}


def main(roots: list[Path]) -> None:
    """Print a Markdown table: a line per figure and run, a column per root, and the spread over
    them.
    """
    tables = [final_rows(root) for root in roots]
    print("| figure | run |", " | ".join(root.name for root in roots), "| spread |")
    print("|---|---|" + "---|" * (len(roots) + 1))
    for label, (column, error) in FIGURES.items():
        for run in tables[0]:
            values = [table[run][column] for table in tables]
            errors = [table[run].get(error) if error else None for table in tables]
            cells = [
                f"{value:.4g}" + (f" ± {by:.2g}" if by else "")
                for value, by in zip(values, errors, strict=True)
            ]
            print(f"| {label} | {run} |", " | ".join(cells), f"| {max(values) - min(values):.2g} |")


if __name__ == "__main__":
    main([Path(root) for root in sys.argv[1:]])
