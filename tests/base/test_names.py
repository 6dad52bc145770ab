"""Names that users guess, command lines that cannot be meant, and programs without libraries."""

import importlib
import os
import sys

import pytest
import typer

from base.errors import one_line
from base.names import MOST_COLUMNS, SYNONYMS, dotted_keys, nearest, take_one_of
from study.recipes.resolve import recipe_names, resolve
from tests.runs import PROJECT, execute, python
from tests.waiting import interruptible

PROGRAMS = ("train", "ckpt_tools", "quant_eval", "curvature", "study", "slurm")
KEYS = list(
    dotted_keys(resolve("tiny", "smoke").trained[0].model_dump(exclude={"name", "factors"}))
)


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        ("tinny", recipe_names(), "tiny"),
        ("olmo2_7b_lr", recipe_names(), "olmo2-7b-lr"),
        ("TINY", recipe_names(), "tiny"),
        ("steps", KEYS, "total_steps"),
        ("peak_lr", KEYS, "optimizer.peak_lr"),
        ("lr", KEYS, "optimizer.peak_lr"),
        ("optimiser.peak_lr", KEYS, "optimizer.peak_lr"),
        ("model.layers", KEYS, "model.num_hidden_layers"),
        ("layers", KEYS, "model.num_hidden_layers"),
        ("sed", KEYS, "seed"),
        ("kl", ["cross_entropy", "kl_divergence"], "kl_divergence"),
        ("gpu", ["cpu", "cuda"], "cuda"),
        ("bfloat16", ["fp32", "bf16"], "bf16"),
        ("zzz", recipe_names(), None),
        ("stage3", ["stage1", "stage2"], None),
        ("", recipe_names(), None),
        ("a" * 100_000, KEYS, None),
    ],
)
def test_the_nearest_name(word, names, meant):
    assert nearest(word, names) == meant


def test_every_synonym_leads_to_a_setting_or_a_value():
    settings = {key.rpartition(".")[2] for key in KEYS}
    assert SYNONYMS.keys() <= settings | {"cuda", "bf16", "fp32", "fp16"}


@pytest.mark.parametrize("folder", PROGRAMS)
def test_every_synonym_of_a_program_leads_to_a_command_or_an_option_of_it(folder):
    program = importlib.import_module(f"{folder}.__main__")
    commands = vars(typer.main.get_command(program.app))["commands"]
    options = {word for each in commands.values() for param in each.params for word in param.opts}
    assert program.SYNONYMS.keys() <= commands.keys() | options
    words = [word for each in program.SYNONYMS.values() for word in each.split()]
    assert not set(words) & commands.keys()  # what there is needs no synonym


def test_a_list_longer_than_a_line_has_the_nearest_first():
    names = [f"a-recipe-of-{number}-million-parameters" for number in range(10, 30)]
    hint = take_one_of("a-recipe-of-28-milion-parameters", names)
    assert hint.startswith("did you mean a-recipe-of-28-million-parameters? Else take one of a-rec")
    assert hint.endswith("-million-parameters and 18 more")
    hint = take_one_of("tinny", recipe_names())
    assert hint.startswith("did you mean tiny? Else take one of tiny-")
    assert len(hint) < len("did you mean tiny? Else take one of ") + MOST_COLUMNS + len(
        " and 99 more"
    )
    assert take_one_of("x", []) == "take one of none, there are none"


LINES = (
    ("study shwo tiny", "'python -m study' has no command 'shwo'; did you mean show?"),
    ("curvature trace a", "did you mean hutchinson? Else take one of hutchinson, lanczos, step"),
    ("quant_eval run a --device gpu", "--device cannot be 'gpu'; did you mean cuda?"),
    ("study run tiny --profil smoke", "has no option --profil; did you mean --profile?"),
    ("study run", "Missing argument 'name'; see 'python -m study run --help'"),
    ("train prepare a --out", "Option '--out' requires an argument; see 'python -m train"),
    ("study run tiny b c", "unexpected extra argument(s) (b c); see 'python -m study run --help'"),
    ("curvature hutchinson a --pairs b", "Input should be a valid integer"),
    ("study show tinny", "no recipe 'tinny'; did you mean tiny? Else take one of tiny-"),
    ("study evaluate tiny", "has no command 'evaluate'; did you mean run? Else take one of "),
    ("study status tiny --profile smoke", "has no option --profile, which show, run have; take"),
    ("quant_eval run a --bit 3", "has no option --bit; did you mean --spec? Else take one of --"),
    (
        "quant_eval run a --eval b --calibration c --spec gptq-3bit",
        "'3bit' is not understood, 3 bits are b3; for example",
    ),
    ("study show tiny --set steps=10", "no such setting; did you mean total_steps?"),
    ("study show tiny --profile smok", "no profile 'smok'; did you mean smoke?"),
    (f"study show tiny --set seed={'9' * 5000}", "a number of 5,000 digits; give another value"),
    (f"study show tiny --set zero={'[' * 5000}{']' * 5000}", "nested more than 64 deep; give"),
    ("study show tiny --set model.hidden_size=1e200", "'model.hidden_size': Input should be a"),
    ("study show tiny --set model.num_hidden_layers=100000000", "less than or equal to 4096"),
)


@pytest.mark.parametrize(("words", "reason"), LINES, ids=[words[:40] for words, _ in LINES])
def test_what_a_command_line_cannot_mean_is_one_line(words, reason):
    done = python(*words.split(" "))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert reason in line
    assert len(line) < 1100


def test_no_words_are_answered_with_the_help():
    done = python("study")
    assert (done.returncode, done.stderr.splitlines()[0][:6]) == (2, "Usage:")


def test_of_a_line_that_is_too_long_both_ends_are_shown():
    line = one_line("begin\x1b[31m " + "a" * 100_000 + "\n; end")
    assert len(line) < 1100
    assert line.startswith("begin?[31m ")
    assert line.endswith(" ; end")


def test_a_python_without_the_libraries_says_where_they_are():
    command = [sys.executable, "-S", "-m", "study", "list"]  # without site-packages
    done = execute(command, cwd=PROJECT)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "has no typer; make .venv with 'make venv' and start .venv/bin/python" in line


def test_a_library_that_is_missed_once_torch_distributed_is_there_is_named(tmp_path):
    """Its own hook for exceptions would keep the line to itself."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program/__init__.py").write_text("import base\n")
    later = "import torch.distributed\ntorch.distributed.init_process_group('gloo')\n"
    (tmp_path / "program/__main__.py").write_text(f"{later}import no_such_library\n")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT)])}
    variables |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = execute([sys.executable, "-m", "program"], cwd=tmp_path, variables=variables)
    assert done.returncode == 2
    assert "has no no_such_library; make .venv" in done.stderr.splitlines()[-1]


def test_an_interrupt_of_slow_imports_is_one_word(tmp_path):
    """The library that the program imports first sends the signal itself."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT)])}
    command = [sys.executable, "-m", "study", "list"]
    done = execute(command, cwd=tmp_path, variables=variables, preexec_fn=interruptible)
    assert (done.returncode, done.stderr) == (-2, "interrupted\n")
