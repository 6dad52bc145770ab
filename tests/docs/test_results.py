"""The pages of results, from planted pages and rows."""

from typing import Any

from docs.results import index, small_table


def test_a_small_table_has_places_and_errors_in_few_digits():
    rows: list[Any] = [
        {"run": "a", "step": 2, "quant/rtn-b3-g32/kl_divergence": 0.12345678, "host": "vm"},
        {"run": "b", "step": 4, "quant/rtn-b3-g32/kl_divergence": None, "host": "vm"},
    ]
    assert small_table(rows) == [
        ["run", "step", "quant/rtn-b3-g32/kl_divergence"],
        ["a", "2", "0.123457"],
        ["b", "4", ""],
    ]


def test_the_index_has_a_line_per_study(tmp_path):
    page = tmp_path / "tiny" / "README.md"
    page.parent.mkdir()
    page.write_text(
        "# tiny\n\n| machine | two cores |\n| command | `python -m study run tiny` |\n"
        "| hours of steps | 0.25 (train 0.20, quantize 0.05) |\n\n"
        "surge  supported\nflat  contradicted\npeaks  supported\n"
    )
    assert index(tmp_path).splitlines()[-1] == (
        "| [tiny](tiny/README.md) | two cores | 0.25 | `python -m study run tiny` |"
        " [2 supported, 1 contradicted](tiny/claims.txt) |"
    )


def test_no_study_is_no_line(tmp_path):
    assert index(tmp_path).endswith("| --- | --- | --- | --- | --- |\n")
