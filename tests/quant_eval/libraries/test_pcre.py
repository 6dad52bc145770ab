"""Our `pcre` against PCRE2 itself, which PyPcre wraps, for every pattern that gptqmodel and
defuser compile.
"""

import ast
import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from quant_eval.libraries import pcre
from tests.lacking import skip

PROJECT = Path(__file__).resolve().parents[3]
USERS = ("gptqmodel", "defuser")
# PCRE2's bits. PyPcre sets the first two for text.
UTF, UCP = 0x00080000, 0x00020000
FLAGS = {re.IGNORECASE: 0x00000008, re.MULTILINE: 0x00000400, re.DOTALL: 0x00000020}
ANCHORED, ENDANCHORED = 0x80000000, 0x20000000

SUBJECTS = (
    "",
    "\n",
    " 10GB ",
    "5g\n",
    "q4_0",
    "q_0",
    "iq_k_xs",
    "q_k_g128",
    "q_k_s\n",
    "layers.3",
    "model.layers.12.mlp.down_proj",
    "model.layers.٣.mlp",
    *(f"model.layers.7.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *("model.layers.7.self_attn.q_norm", "model.layers.7.self_attn.k_norm"),
    *(f"model.layers.7.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "model.layers.0.input_layernorm\n",
    "model.layers.0.post_attention_layernorm",
    "blk.31.ffn_gate.weight",
    "blk.3.attn_output.weight\n\n",
    "model-00001-of-00002.safetensors",
    "model+x-00001-of-00002.safetensors",
    '#include "a.h"\n  # include <torch/extension.h>\r\nint x; // #include <b>\n',
    "/* one\ntwo */ PyObject* m; py::object o; PYBIND11_MODULE(x) // REGISTER_EXTENSION (y)\n",
    "namespace {\nSTABLE_TORCH_LIBRARY_FRAGMENT (a)\nREGISTER_EXTENSION(z)",
    "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2 \n",
    "cu130",
    "rocm6.2.1",
    "Cuda compilation tools, release 13.0, V13.0.48",
    "8.6;9.0+PTX, 12.0",
    "9.0+PTX",
    ">= 2.8.0,<3",
    "sm_90a sm_100 xsm_75",
    "\x1b[31mred\x1b[0m",
    "so the answer is (C).\nAnswer: D and B",
)


def sources(package: str) -> list[ast.Module]:
    """Parse the package's modules that import pcre."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    texts = [path.read_text() for path in Path(spec.origin).parent.rglob("*.py")]
    return [
        ast.parse(text)
        for text in texts
        if re.search(r"^\s*(import|from) pcre\b", text, re.MULTILINE)
    ]


NODES = [node for package in USERS for module in sources(package) for node in ast.walk(module)]


def compiled() -> list[re.Pattern]:
    """Compile what the sources compile: literals, and an f-string with a name in it."""
    patterns = []
    for node in NODES:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pcre.compile", "pcre.split"):
            pattern = node.args[0]
            if ast.unparse(node.func) == "pcre.compile" and isinstance(pattern, ast.Name):
                continue  # given by a caller
            flags = [keyword.value for keyword in node.keywords if keyword.arg == "flags"]
            scope = {"pcre": pcre, "model_base_name": "model+x"}
            values = [eval(ast.unparse(part), scope) for part in (pattern, *flags)]
            patterns.append(pcre.compile(*values))
    return patterns


def library() -> ctypes.CDLL:
    name = ctypes.util.find_library("pcre2-8") or "libpcre2-8.so.0"
    try:
        pcre2 = ctypes.CDLL(name)
    except OSError:
        skip("libpcre2-8 is not installed; apt-get install libpcre2-8-0")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures = {
        "compile": (pointer, [ctypes.c_char_p, size, ctypes.c_uint32, pointer, pointer, pointer]),
        "match_data_create_from_pattern": (pointer, [pointer, pointer]),
        "match": (
            ctypes.c_int,
            [pointer, ctypes.c_char_p, size, size, ctypes.c_uint32, pointer, pointer],
        ),
        "get_ovector_pointer": (ctypes.POINTER(size), [pointer]),
    }
    for function, (returned, arguments) in signatures.items():
        getattr(pcre2, f"pcre2_{function}_8").restype = returned
        getattr(pcre2, f"pcre2_{function}_8").argtypes = arguments
    return pcre2


class Pcre2:
    """A pattern as PCRE2 compiles it; matches are tuples of the groups' texts, the whole match
    first.
    """

    def __init__(self, pattern: re.Pattern, options: int = 0) -> None:
        self.pcre2 = library()
        options |= UTF | UCP | sum(bit for flag, bit in FLAGS.items() if pattern.flags & flag)
        text, error, offset = pattern.pattern.encode(), ctypes.c_int(), ctypes.c_size_t()
        self.code = self.pcre2.pcre2_compile_8(
            text, len(text), options, ctypes.byref(error), ctypes.byref(offset), None
        )
        assert self.code, f"PCRE2 refuses {pattern.pattern!r}: error {error.value}"
        self.data = self.pcre2.pcre2_match_data_create_from_pattern_8(self.code, None)
        self.groups = pattern.groups + 1

    def find_all(self, subject: str) -> list[tuple[str | None, ...]]:
        text, start, matches = subject.encode(), 0, []
        while self.pcre2.pcre2_match_8(self.code, text, len(text), start, 0, self.data, None) > 0:
            ends = self.pcre2.pcre2_get_ovector_pointer_8(self.data)
            spans = [(ends[2 * group], ends[2 * group + 1]) for group in range(self.groups)]
            unset = ctypes.c_size_t(-1).value
            matches.append(tuple(None if a == unset else text[a:b].decode() for a, b in spans))
            assert spans[0][1] > start, "an empty match: the loop would not end"
            start = spans[0][1]
        return matches


def groups(match: re.Match | None) -> list[tuple[str | None, ...]]:
    return [(match.group(), *match.groups())] if match else []


def test_only_these_packages_ask_for_pypcre():
    asking = {
        distribution.name.lower()
        for distribution in importlib.metadata.distributions()
        for requirement in distribution.requires or ()
        if re.match(r"pypcre\b", requirement, re.IGNORECASE)
    }
    assert asking == set(USERS)


def test_all_that_is_asked_of_pcre_is_there():
    used = {ast.unparse(node) for node in NODES if isinstance(node, ast.Attribute)}
    used = {name for name in used if re.fullmatch(r"pcre\.[\w.]+", name)}
    found = {"compile", "escape", "split", "Pattern", "Flag.CASELESS"}
    assert used >= {f"pcre.{name}" for name in found}
    assert len(compiled()) >= 30
    for name in used:
        eval(name, {"pcre": pcre})
    assert not [
        node for node in NODES if isinstance(node, ast.ImportFrom) and node.module == "pcre"
    ]


@pytest.mark.parametrize("pattern", compiled(), ids=lambda pattern: pattern.pattern)
def test_patterns_find_what_pcre2_finds(pattern):
    anywhere, whole = Pcre2(pattern), Pcre2(pattern, ANCHORED | ENDANCHORED)
    at_start = Pcre2(pattern, ANCHORED)
    hits = 0
    for subject in SUBJECTS:
        matches = [(match.group(), *match.groups()) for match in pattern.finditer(subject)]
        assert matches == anywhere.find_all(subject), subject
        assert groups(pattern.match(subject)) == at_start.find_all(subject)[:1], subject
        assert groups(pattern.fullmatch(subject)) == whole.find_all(subject), subject
        hits += bool(matches)
    assert 0 < hits < len(SUBJECTS)


def test_whoever_imports_gptqmodel_stands_in_first():
    paths = [
        path for folder in ("quant_eval", "tests") for path in PROJECT.glob(f"{folder}/**/*.py")
    ]
    importing = {
        path: text
        for path, text in ((path, path.read_text()) for path in paths)
        if re.search(r"^\s+(from|import) gptqmodel", text, re.MULTILINE)
    }
    assert len(importing) >= 4
    assert [path for path, text in importing.items() if "pcre.stand_in()" not in text] == []


def test_import_pcre_finds_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pcre", None)
    pcre.stand_in()
    assert importlib.import_module("pcre") is pcre
