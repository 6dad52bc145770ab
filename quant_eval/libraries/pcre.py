"""The part of PyPcre that gptqmodel and its defuser use, on the standard library's `re`.

PyPcre is published as source alone: installing it takes a C compiler and Python's headers, which
many machines lack. gptqmodel 7.6.0 and defuser 0.0.28 ask of it what `re` has as well, and
`tests/quant_eval/libraries/test_pcre.py` shows that each of their patterns finds the same in
either. So a process that imports gptqmodel calls `stand_in` first.
"""

import sys
from re import DOTALL, IGNORECASE, MULTILINE, Pattern, compile, escape, split

__all__ = ["Flag", "Pattern", "compile", "escape", "split", "stand_in"]


class Flag:
    """PCRE2's names of flags."""

    CASELESS = IGNORECASE
    MULTILINE = MULTILINE
    DOTALL = DOTALL


def stand_in() -> None:
    """Make `import pcre` find this module, in this process."""
    sys.modules["pcre"] = sys.modules[__name__]
