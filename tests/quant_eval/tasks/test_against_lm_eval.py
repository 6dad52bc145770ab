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

from quant_eval.paper_tasks import PAPER_TASKS, choose_tasks
from quant_eval.tasks.paired import mcnemar_p_value
from tests.quant_eval.tasks.task_files import DEFINITIONS, LM_EVAL, SUBJECTS, own_task_manager

LEAVES = {task: [task] for task in LM_EVAL} | {"mmlu": [f"mmlu_{subject}" for subject in SUBJECTS]}


@pytest.fixture(scope="module")
def measured(pair, settings_of, measure_tasks):
    settings = settings_of(*choose_tasks("paper"))
    measured = measure_tasks(pair.full, pair.quantized, pair.tokenizer, settings)
    keys = ("only_full_correct", "only_quantized_correct")
    discordant = {tuple(row[key] for key in keys) for row in measured["tasks"].values()}
    assert len(discordant) > 5  # the two models do differ
    return measured


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
def test_every_item_and_what_follows_from_them_are_lm_evals(task, measured, own):
    figures, answers = measured["tasks"][task], list[list[bool]]()
    assert figures["truncated_items"] == figures["unanswerable_items"] == 0
    for name, result in zip(("", "_quantized"), own, strict=True):
        items, reported = items_of(result, task), result["results"][f"own_{task}"]
        assert figures["items"] == len(items)
        answers.append([item["acc"] == 1 for item in items])
        correct = "".join(str(int(is_right)) for is_right in answers[-1])
        assert measured["per_item"][task][f"correct{name}"] == correct
        # mmlu: lm-eval's group
        assert figures[f"accuracy{name}"] == pytest.approx(reported["acc,none"], abs=1e-12)
        if task != "mmlu":  # lm-eval pools variances within subjects there
            error = pytest.approx(reported["acc_stderr,none"], rel=1e-9)
            assert figures[f"standard_error{name}"] == error
    full, quantized = answers
    lost = sum(a and not b for a, b in zip(full, quantized, strict=True))
    gained = sum(b and not a for a, b in zip(full, quantized, strict=True))
    assert (figures["only_full_correct"], figures["only_quantized_correct"]) == (lost, gained)
    assert figures["p_value"] == mcnemar_p_value(lost, gained)
    degradation = Fraction(lost - gained, len(full) - sum(full))
    assert figures["degradation"] == pytest.approx(float(degradation), abs=1e-12)
    assert figures["difference"] == pytest.approx((lost - gained) / len(full), abs=1e-12)


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_the_models_are_asked_what_lm_eval_asks(task, measured, own):
    requests = [[list(request) for request in item["arguments"]] for item in items_of(own[0], task)]
    # examples are in there
    assert all("\n\n" in context for item in requests for context, _ in item)
    hashes = [hashlib.sha256(json.dumps(item).encode()).hexdigest() for item in requests]
    digest = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    assert measured["tasks"][task]["prompts_sha256"] == digest


def test_the_mean_counts_every_task_once(measured, own):
    names = [f"own_{task}" for task in PAPER_TASKS]
    full, quantized = ([result["results"][name]["acc,none"] for name in names] for result in own)
    accuracy, accuracy_quantized = sum(full) / 12, sum(quantized) / 12
    mean = measured["mean"]
    assert mean["tasks"] == 12
    assert mean["items"] == sum(len(items_of(own[0], task)) for task in PAPER_TASKS)
    assert mean["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    degradation = (accuracy - accuracy_quantized) / (1 - accuracy)
    assert mean["degradation"] == pytest.approx(degradation, abs=1e-12)
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
