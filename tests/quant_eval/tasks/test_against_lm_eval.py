"""Our figures are lm-eval's own: each model is evaluated by it once more, with definitions of
its own on the files.
"""

import hashlib
import json
from fractions import Fraction

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from scipy.stats import binomtest

from quant_eval.paper_tasks import PAPER_TASKS, choose_tasks
from tests.quant_eval.tasks.task_files import DEFINITIONS, LM_EVAL, SUBJECTS, own_task_manager

LEAVES = {task: [task] for task in LM_EVAL} | {"mmlu": [f"mmlu_{subject}" for subject in SUBJECTS]}


@pytest.fixture(scope="module")
def measured(pair, settings_of, measure_tasks):
    return measure_tasks(
        pair.full, pair.quantized, pair.tokenizer, settings_of(*choose_tasks("paper"))
    )


@pytest.fixture(scope="module")
def own(pair, task_files, tmp_path_factory):
    """Answers of lm-eval for the full and of the quantized model, in other batches."""
    manager = own_task_manager(task_files, tmp_path_factory.mktemp("own"))
    with pytest.MonkeyPatch.context() as patch:
        # lists every installed package by pip, seconds that no figure depends on
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        return [
            lm_eval.simple_evaluate(
                model=HFLM(pretrained=model, tokenizer=pair.tokenizer, batch_size=5),
                tasks=[f"own_{task}" for task in PAPER_TASKS],
                task_manager=manager,
                num_fewshot=5,
                fewshot_random_seed=3,
                bootstrap_iters=1,  # unused: the standard error of a mean has a closed form
            )
            for model in (pair.full, pair.quantized)
        ]


def items_of(result, task):
    """lm-eval's samples of a task in file order, subjects one after the other."""
    return [
        item
        for leaf in LEAVES[task]
        for item in sorted(result["samples"][f"own_{leaf}"], key=lambda x: x["doc_id"])
    ]


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_every_item_and_their_mean_are_lm_evals(task, measured, own):
    full, quantized = (items_of(result, task) for result in own)
    assert measured["per_item"][task]["correct"] == "".join(str(int(item["acc"])) for item in full)
    assert measured["per_item"][task]["correct_quantized"] == "".join(
        str(int(item["acc"])) for item in quantized
    )
    figures = measured["tasks"][task]
    assert figures["items"] == len(full)
    assert figures["truncated_items"] == figures["unanswerable_items"] == 0
    for name, result in zip(("", "_quantized"), own, strict=True):
        reported = result["results"][f"own_{task}"]
        # mmlu: lm-eval's group
        assert figures[f"accuracy{name}"] == pytest.approx(reported["acc,none"], abs=1e-12)
        if task != "mmlu":  # lm-eval pools variances within subjects there
            assert figures[f"standard_error{name}"] == pytest.approx(
                reported["acc_stderr,none"], rel=1e-9
            )


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_the_models_are_asked_what_lm_eval_asks(task, measured, own):
    requests = [[list(request) for request in item["arguments"]] for item in items_of(own[0], task)]
    # examples are in there
    assert all("\n\n" in context for item in requests for context, _ in item)
    hashes = [hashlib.sha256(json.dumps(item).encode()).hexdigest() for item in requests]
    assert (
        measured["tasks"][task]["prompts_sha256"]
        == hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    )


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_paired_figures(task, measured, own):
    full, quantized = ([item["acc"] == 1 for item in items_of(result, task)] for result in own)
    figures = measured["tasks"][task]
    lost = sum(a and not b for a, b in zip(full, quantized, strict=True))
    gained = sum(b and not a for a, b in zip(full, quantized, strict=True))
    assert (figures["only_full_correct"], figures["only_quantized_correct"]) == (lost, gained)
    expected = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert figures["p_value"] == pytest.approx(expected, rel=1e-12)
    degradation = Fraction(lost - gained, len(full) - sum(full))
    assert figures["degradation"] == pytest.approx(float(degradation), abs=1e-12)
    assert figures["difference"] == pytest.approx((lost - gained) / len(full), abs=1e-12)


def test_the_two_models_do_differ(measured):
    """Otherwise the pairing above would not have been seen."""
    discordant = {
        (row["only_full_correct"], row["only_quantized_correct"])
        for row in measured["tasks"].values()
    }
    assert len(discordant) > 5


def test_the_mean_counts_every_task_once(measured, own):
    accuracy, accuracy_quantized = (
        sum(result["results"][f"own_{task}"]["acc,none"] for task in PAPER_TASKS) / 12
        for result in own
    )
    mean = measured["mean"]
    assert mean["tasks"] == 12
    assert mean["items"] == sum(len(items_of(own[0], task)) for task in PAPER_TASKS)
    assert mean["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert mean["degradation"] == pytest.approx(
        (accuracy - accuracy_quantized) / (1 - accuracy), abs=1e-12
    )
    low, high = mean["intervals"]["difference"]
    assert low < mean["difference"] < high


def test_the_same_measurement_twice_is_the_same(measured, pair, settings_of, measure_tasks):
    """Alone a task gives what it gives among all twelve, intervals included."""
    alone = measure_tasks(pair.full, pair.quantized, pair.tokenizer, settings_of("winogrande"))
    assert alone["tasks"]["winogrande"] == measured["tasks"]["winogrande"]
    assert alone["per_item"]["winogrande"] == measured["per_item"]["winogrande"]


def test_the_table_is_lm_evals_but_for_pubmedqa():
    """Datasets and splits of the installed lm-eval; a later version that moves a dataset is
    noticed here.
    """
    manager = TaskManager(
        include_defaults=False,
        include_path=[DEFINITIONS / row.folder for row in PAPER_TASKS.values()],
    )
    for name, row in PAPER_TASKS.items():
        leaf = "mmlu_anatomy" if name == "mmlu" else name
        defined = manager.task_index[leaf].cfg
        evaluated = defined.get("test_split") or defined["validation_split"]
        examples = defined.get("fewshot_split") or defined["training_split"]
        assert (row.evaluated, row.fewshot) == (evaluated, examples), name
        assert "acc" in [metric["metric"] for metric in defined["metric_list"]], name
        if name != "pubmedqa":
            assert row.dataset == defined["dataset_path"], name
        if name not in ("pubmedqa", "mmlu"):
            assert row.config == defined.get("dataset_name"), name
    subjects = {
        leaf
        for tag in ("stem", "other", "social_sciences", "humanities")
        for leaf in manager.task_index[f"mmlu_{tag}_tasks"].tags
    }
    assert len(subjects) == 57
