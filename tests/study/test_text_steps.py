"""Text of a study: what its steps make, and what has to be there before."""

import pytest

from base.errors import UserError
from dynamics.recipes import resolve
from study.text.kinds import PackageSources, PreparedText, TokenFile, TokenFiles
from study.text.steps import check_held_out, check_text, prefix, record, text_steps


def test_text_that_no_step_makes_is_asked_for_with_its_command(tmp_path):
    study = resolve("olmo2-7b-lr", "full")
    assert isinstance(study.text, PreparedText)
    directory = tmp_path / study.name
    with pytest.raises(UserError) as caught:
        check_text(study, directory)
    message = str(caught.value)
    place = tmp_path / record(study, "train").removeprefix("../")
    assert f"{place} does not exist" in message
    assert "python -m train index" in message
    assert f"--out {place.with_suffix('')}" in message
    assert f"--tokenizer {tmp_path / study.text.tokenizer_directory}" in message
    place.parent.mkdir(parents=True)
    place.touch()
    check_text(study, directory)  # the other token files are made by the study's own steps
    assert {step.kind for step in text_steps(study)} == {"download", "prepare"}


@pytest.mark.parametrize("recipe", ["tiny", "pythia-160m-lr"])
def test_text_that_steps_make_needs_nothing_before(tmp_path, recipe):
    check_text(resolve(recipe, "full"), tmp_path / recipe)


def test_given_token_files_have_no_steps_and_must_be_there(tmp_path):
    files = TokenFiles(
        held_out=str(tmp_path / "held_out"),
        calibration=str(tmp_path / "train"),
        tokenizer=str(tmp_path),
        sha256="0" * 64,
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
    files = TokenFiles(
        held_out=str(held_out_prefix),
        calibration=str(held_out_prefix),
        tokenizer=str(tmp_path),
        sha256="0" * 64,
    )
    study = resolve("tiny", "smoke")
    for tokens, block_tokens, refused in (
        (6000, 6000, False),
        (4000, 6000, True),
        (6000, 4000, True),
    ):
        settings = {"eval_tokens": tokens, "block_tokens": block_tokens}
        quantization = study.quantization.model_copy(update=settings)
        changed = study.model_copy(update={"text": files, "quantization": quantization})
        if refused:
            with pytest.raises(UserError, match=r"17 evaluated documents .* raise --eval-tokens"):
                check_held_out(changed, tmp_path / "study")
        else:
            check_held_out(changed, tmp_path / "study")
    check_held_out(study, tmp_path / "study")  # its text is yet to be made


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
