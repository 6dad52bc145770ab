"""Text of the user's: which kind it is, what is held out of it, and what is refused before
anything starts.
"""

import json
import random
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from base.errors import UserError
from ckpt_tools.__main__ import app as ckpt_tools_app
from quant_eval.measuring.texts import open_text
from study.__main__ import app as study_app
from study.definition import Study, load_study, save_study
from study.pipeline.ledger import Ledger
from study.recipes.resolve import recipe_names, resolve, whole_recipes
from study.step import Machine
from study.step import resolve as resolved
from study.text.own import TextOptions, source_of
from study.text.steps import check_documents_of, check_text, prefix, record, text_steps
from study.text.survey import needs_of
from study.text_kinds import OwnText, PackageSources, PreparedText, TokenFile
from tests.study.commands import printed, refused
from tests.study.synthetic import text_in_place
from train.__main__ import app as train_app
from train.data.corpus import open_corpus
from train.data.prepare import prepare
from train.run.directory import RunDirectory
from train.run_data import open_data

PROGRAMS = {"study": study_app, "train": train_app, "ckpt_tools": ckpt_tools_app}
PROJECT = Path(__file__).resolve().parents[2]
LETTERS = random.Random(9)
WORDS = [
    "".join(LETTERS.choices("abcdefghijklmnopqrstuvwxyz", k=2 + n % 7)) + " " for n in range(3000)
]


def write_documents(path: Path, seed: int, documents: int, words: int = 120) -> Path:
    """Documents of random words, every eighth of them a copy of the one before."""
    generator = random.Random(seed)
    lines: list[str] = []
    for number in range(documents):
        if number % 8 or not lines:
            lines.append(json.dumps({"text": "".join(generator.choices(WORDS, k=words))}))
        else:
            lines.append(lines[-1])
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("own")
    return write_documents(directory / "some.jsonl", 1, 1500), write_documents(
        directory / "more.jsonl", 2, 1500
    )


def make(study: Study, directory: Path, in_processes: bool = False) -> None:
    """Run the study's own steps that make its text."""
    save_study(directory, study)
    ledger = Ledger(directory, text_steps(study))
    for step in ledger.steps.values():
        command = resolved(step.command, directory, Machine())
        if in_processes:
            subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
        else:
            CliRunner().invoke(PROGRAMS[command[2]], command[3:], catch_exceptions=False)
        ledger.finish(step, ledger.fingerprint(step), 1.0)


USES = ("train", "held_out", "calibration")


def documents(directory: Path, tokenizer: Tokenizer) -> dict[str, list[str]]:
    """The texts of the documents that were made for each use."""
    corpora = {use: open_corpus(directory / "data" / use, verify_hashes=True) for use in USES}
    return {
        use: [
            tokenizer.decode(corpus.document(index)[:-1].tolist())
            for index in range(corpus.manifest.documents)
        ]
        for use, corpus in corpora.items()
    }


@pytest.mark.parametrize(
    ("recipe", "in_processes"),
    [("tiny", True), ("olmo2-30m-lr", False), ("pythia-160m-lawa", False)],
)
def test_a_study_makes_its_text_of_files_without_a_network(tmp_path, files, recipe, in_processes):
    """Disjoint documents, all of them, as many as the study reads; the runs and measurements can
    open them.
    """
    study = resolve(recipe, "smoke", text=TextOptions(files), root=tmp_path)
    directory = tmp_path / study.name
    check_text(study, directory)
    assert isinstance(study.text, OwnText)
    assert not {"download", "dataset"} & {
        word for step in text_steps(study) for word in (step.kind, *step.command)
    }
    make(study, directory, in_processes)
    tokenizer = Tokenizer.from_file(str(directory / "data/tokenizer/tokenizer.json"))
    assert tokenizer.get_vocab_size() == study.trained[0].model.vocab_size

    texts_by_use = documents(directory, tokenizer)
    texts = [json.loads(line)["text"] for path in files for line in path.read_text().splitlines()]
    beginnings = {text[:60] for text in texts}
    assert {text[:60] for use in texts_by_use for text in texts_by_use[use]} == beginnings
    assert sum(map(len, texts_by_use.values())) == len(texts)
    by_use = [{text[:60] for text in texts_by_use[use]} for use in texts_by_use]
    assert len(by_use[0] | by_use[1] | by_use[2]) == sum(map(len, by_use))  # copies stay together

    needs = needs_of(study)
    for use in USES:
        corpus = open_text(directory / "data" / use, directory, 10**6)
        assert corpus.manifest.tokens >= getattr(needs, use)
    held_out = open_corpus(directory / "data/held_out")
    assert held_out.lengths_D.max() <= study.quantization.eval_tokens // 50
    for run in study.trained:
        open_data(run, RunDirectory(directory / run.name), verify_hashes=True).batch(
            run.total_steps
        )


@pytest.mark.parametrize("kind", ["slice", "pca", "critical"])
def test_losses_on_planes_and_lines_have_text_enough(kind):
    """A named plane without quantization by block, and all that is of a number of sequences."""
    settings = (f"{kind}.sequences=5000",)
    study = resolve("pythia-160m-lawa", "smoke", settings)
    assert not study.quantization.by_block
    length = study.trained[0].data.sequence_length
    assert needs_of(study).held_out == 5000 * length + 1


def test_the_text_may_be_in_a_field_of_another_name(tmp_path, files):
    """The same documents and tokens as under the default one; the key is part of the identity."""
    plain = resolve("tiny", "smoke", text=TextOptions(files[:1]), root=tmp_path)
    make(plain, tmp_path / plain.name)
    other = tmp_path / "some.jsonl"
    other.write_text(files[0].read_text().replace('{"text": ', '{"text": "no", "content": '))
    study = resolve("tiny", "smoke", text=TextOptions((other,), None, "content"), root=tmp_path)
    make(study, tmp_path / study.name)
    check_text(study, tmp_path / study.name)
    assert isinstance(study.text, OwnText)
    for use in USES:
        corpora = [open_corpus(tmp_path / each.name / "data" / use) for each in (plain, study)]
        assert corpora[0].manifest.sha256 == corpora[1].manifest.sha256
    keys = (None, "text", "content")
    default, named, content = (source_of(TextOptions((other,), None, key)).sha256 for key in keys)
    assert default == named != content == study.text.sha256


def test_a_token_file_is_shared_out_with_its_own_tokenizer(tmp_path, files, tokenizer_dir):
    prepare(files, tokenizer_dir, tmp_path / "tokens")
    text = TextOptions((tmp_path / "tokens",), tokenizer_dir)
    study = resolve("tiny", "smoke", ("engine=deepspeed",), text=text, root=tmp_path)
    assert study.name.startswith("tiny-smoke-engine=deepspeed-text=tokens.")
    directory = tmp_path / study.name
    make(study, directory)
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    assert (directory / "data/tokenizer/tokenizer.json").read_bytes() == (
        tokenizer_dir / "tokenizer.json"
    ).read_bytes()
    texts = documents(directory, tokenizer)
    assert sum(map(len, texts.values())) == 3000
    for run in study.trained:
        open_data(run, RunDirectory(directory / run.name), verify_hashes=True)


def test_the_token_files_of_a_study_are_read_in_place(tmp_path, files, tokenizer_dir):
    prepare(files, tokenizer_dir, tmp_path / "tokens")
    text = TextOptions((tmp_path / "tokens",), tokenizer_dir)
    first = resolve("tiny", "smoke", text=text, root=tmp_path)
    directory = tmp_path / first.name
    make(first, directory)
    study = resolve("pythia-160m-lr", "smoke", text=TextOptions((directory,)), root=tmp_path)
    assert text_steps(study) == []
    check_text(study, tmp_path / study.name)
    assert isinstance(study.text, PreparedText)
    assert study.text.calibration.name == str(directory / "data/calibration")
    for run in study.trained:
        assert run.data.train == str(directory / "data/train")
        open_data(run, RunDirectory(tmp_path / study.name / run.name), verify_hashes=True)


@pytest.mark.parametrize("recipe", whole_recipes())
def test_every_recipe_takes_the_text(tmp_path, files, recipe):
    """Branches name their changed parents, the file of the study brings it back, the plain one
    is another.
    """
    study, plain = (
        resolve(recipe, "smoke", text=TextOptions(files), root=tmp_path),
        resolve(recipe, "smoke"),
    )
    assert study.name.startswith(f"{plain.name}-text=some+1.")
    assert [run.name for run in study.trained] == [run.name for run in plain.trained]
    for run in study.trained:
        assert (run.data.train, run.data.held_out) == ("../data/train", "../data/held_out")
        assert run.data.tokenizer == "../data/tokenizer"
    save_study(tmp_path, study)
    assert load_study(tmp_path) == study


def test_a_full_recipe_refuses_a_text_that_is_too_small(tmp_path, files):
    assert "trajectory" in recipe_names()
    with pytest.raises(UserError, match=r"some\.jsonl, more\.jsonl holds 3,000 documents of about"):
        resolve("olmo2-30m-lr", "full", text=TextOptions(files), root=tmp_path)


def test_the_content_is_the_identity_not_the_place(tmp_path, files):
    study = resolve("tiny", "smoke", text=TextOptions(files), root=tmp_path)
    directory = tmp_path / study.name
    save_study(directory, study)
    moved = tuple(Path(shutil.copy(path, tmp_path / path.name)) for path in files)
    assert (
        resolve("tiny", "smoke", text=TextOptions(moved), root=tmp_path) == study
    )  # with the places it has recorded
    moved[0].write_text(moved[0].read_text().replace(" a", " b", 1))
    assert resolve("tiny", "smoke", text=TextOptions(moved), root=tmp_path).name != study.name
    assert resolve("tiny", "smoke", text=TextOptions(files[::-1]), root=tmp_path).name != study.name


def test_a_changed_file_is_noticed_until_its_tokens_are_there(tmp_path, files):
    copies = tuple(Path(shutil.copy(path, tmp_path / path.name)) for path in files)
    study = resolve("tiny", "smoke", text=TextOptions(copies), root=tmp_path)
    directory = tmp_path / study.name
    check_text(study, directory)
    copies[1].write_text(copies[1].read_text() + json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(UserError, match="was changed since the study was started with it"):
        check_text(study, directory)
    copies[1].unlink()
    with pytest.raises(UserError, match=r"more\.jsonl does not exist"):
        check_text(study, directory)
    (directory / "data").mkdir(parents=True)
    for use in USES:
        (directory / "data" / f"{use}.json").touch()
    check_text(study, directory)


@pytest.fixture(scope="module")
def bad(tmp_path_factory, tokenizer_dir) -> Path:
    directory = tmp_path_factory.mktemp("bad")
    write_documents(directory / "few.jsonl", 3, 40)
    (directory / "one.txt").write_text("".join(random.Random(1).choices(WORDS, k=100_000)))
    (directory / "empty.jsonl").touch()
    (directory / "broken.jsonl").write_text('{"text": "a"}\n{"no": 1}\n')
    (directory / "folder").mkdir()
    (directory / "link.jsonl").symlink_to(directory / "few.jsonl")
    (directory / "content.jsonl").write_text('{"id": "1", "content": "a text"}\n')
    prepare([directory / "few.jsonl"], tokenizer_dir, directory / "tokens")
    other = shutil.copytree(tokenizer_dir, directory / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    return directory


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.jsonl"], "absent.jsonl does not exist; --text takes FILES of text, PREFIX of a"),
        (["empty.jsonl"], "empty.jsonl is empty"),
        (["broken.jsonl"], "broken.jsonl:2 has no 'text' but no; name what holds the text with"),
        (["folder"], "is a directory without a study; give its files, --text"),
        (["few.jsonl", "few.jsonl"], "few.jsonl is given twice; give every source once"),
        (["few.jsonl", "link.jsonl"], "few.jsonl are one file; give every source once"),
        (["content.jsonl"], "has no 'text' but id, content; name what holds the text with --key,"),
        (["few.jsonl", "--key=body"], "few.jsonl:1 has no 'body' but text; name what holds"),
        (["tokens", "--tokenizer", "other", "--key=body"], "--key body is for files of text"),
        (["few.jsonl", "tokens"], "names places of several kinds"),
        (["few.jsonl"], "few.jsonl holds 40 documents of about"),
        (["one.txt"], "one.txt holds 1 documents of about"),
        (["tokens"], "does not say which tokenizer made it; name its directory with --tokenizer"),
        (["tokens", "--tokenizer", "other"], "was not made by the tokenizer in"),
        (["tokens", "--tokenizer", "folder"], "holds no tokenizer.json"),
        (
            ["few.jsonl", "--tokenizer", "other", "--set", "model.vocab_size=256"],
            "has tokens up to 319, the models of tiny",
        ),
        (["tokens", "tokens2", "--tokenizer", "other"], "tokens2 does not exist"),
    ],
)
def test_bad_text_is_refused_before_anything_starts(tmp_path, bad, arguments, words):
    # names of files stand for those in `bad`
    given = [
        str(bad / argument) if not argument.startswith("--") and "=" not in argument else argument
        for argument in arguments
    ]
    smoke = ("run", "tiny", "--profile", "smoke")
    assert words in refused(*smoke, "--root", tmp_path / "runs", "--text", *given)
    assert not (tmp_path / "runs").exists()


def test_the_text_is_part_of_the_name_by_which_a_study_is_found(tmp_path, files):
    text = ("--text", *map(str, files))
    shown = printed("show", "tiny", "--profile", "smoke", *text, "--root", tmp_path, "--all")
    name = shown.partition(":")[0]
    words = " ".join(shown.split())
    assert f"text: own; sources {files[0]}, {files[1]}; key text; sha256 " in words
    assert f"{name}/study.json does not exist" in refused("status", name, "--root", tmp_path)
    save_study(tmp_path / name, resolve("tiny", "smoke", text=TextOptions(files), root=tmp_path))
    status = printed("status", name, "--root", tmp_path)
    assert f"steps complete in {tmp_path / name}" in status
    assert "belongs to a recipe" in refused("show", name, *text, "--root", tmp_path)
    for option in ("--tokenizer", "--key"):
        assert "belongs to --text" in refused("show", "tiny", option, tmp_path)


def test_text_that_no_step_makes_is_asked_for_with_its_command(tmp_path):
    study = resolve("olmo2-7b-lr", "full")
    assert isinstance(study.text, PreparedText)
    directory = tmp_path / study.name
    with pytest.raises(UserError) as caught:
        check_text(study, directory)
    message = str(caught.value)
    manifest = tmp_path / record(study, "train").removeprefix("../")
    assert f"{manifest} does not exist" in message
    assert "python -m train index" in message
    assert f"--out {manifest.with_suffix('')}" in message
    assert f"--tokenizer {tmp_path / study.text.tokenizer_directory}" in message
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    check_text(study, directory)  # the other token files are made by the study's own steps
    assert {step.kind for step in text_steps(study)} == {"download", "prepare"}


@pytest.mark.parametrize("recipe", ["tiny", "pythia-160m-lr"])
def test_text_that_steps_make_needs_nothing_before(tmp_path, recipe):
    check_text(resolve(recipe, "full"), tmp_path / recipe)


def test_given_token_files_have_no_steps_and_must_be_there(tmp_path):
    files = text_in_place(
        held_out=tmp_path / "held_out", calibration=tmp_path / "train", tokenizer=tmp_path
    )
    study = resolve("tiny", "smoke").model_copy(update={"text": files, "runs": ()})
    assert text_steps(study) == []
    assert prefix(study, "held_out") == str(tmp_path / "held_out")
    assert prefix(study, "calibration") == str(tmp_path / "train")
    with pytest.raises(UserError, match=r"held_out\.json does not exist"):
        check_text(study, tmp_path / "study")
    for use in ("held_out", "calibration"):
        (tmp_path / record(study, use)).touch()
    check_text(study, tmp_path / "study")


def test_few_held_out_documents_are_refused_before_anything_is_trained(tmp_path, held_out_prefix):
    """30 documents of 240 tokens: 4,000 tokens are 17 of them, 6,000 are 26."""
    files = text_in_place(held_out=held_out_prefix, calibration=held_out_prefix, tokenizer=tmp_path)
    study = resolve("tiny", "smoke")
    for tokens, block_tokens in ((6000, 6000), (4000, 6000), (6000, 4000)):
        settings = {"eval_tokens": tokens, "block_tokens": block_tokens}
        quantization = study.quantization.model_copy(update=settings)
        changed = study.model_copy(update={"text": files, "quantization": quantization})
        few = pytest.raises(UserError, match=r"17 evaluated documents .* raise --eval-tokens")
        with few if tokens != block_tokens else nullcontext():
            check_documents_of(changed, tmp_path / "study")
    check_documents_of(study, tmp_path / "study")  # its text is yet to be made


def test_a_token_file_of_nobodys_is_asked_for_with_a_command_that_makes_it(tmp_path):
    """A recipe of one's own, whose text has no dataset and says nothing of its origin."""
    study = resolve("olmo2-7b-lr", "full")
    mine = TokenFile(name="mine")
    text = PreparedText(tokenizer="my/tok", train=mine, held_out=mine, calibration=mine)
    with pytest.raises(UserError) as caught:
        check_text(study.model_copy(update={"text": text}), tmp_path / "runs" / "mine")
    message = str(caught.value)
    texts = tmp_path / "runs" / "texts"
    assert (
        f"{texts}/mine.json does not exist; make it first: python -m train prepare FILES (--out"
        f" {texts}/mine, " in message
    )
    assert f"--tokenizer {texts}/my--tok" in message
    assert message.endswith("or take text of your own with --text")


def test_another_version_of_a_package_is_refused_before_anything_runs(tmp_path):
    study = resolve("tiny", "smoke")
    text = PackageSources(packages=(f"sympy==0.1#sha256={'0' * 64}",), vocab_size=1024)
    with pytest.raises(UserError, match=r"the text is of sympy==0\.1, here sympy is 1"):
        check_text(study.model_copy(update={"text": text}), tmp_path / study.name)
