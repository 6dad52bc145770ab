"""The hardware of a study: what steps take of it, what this machine has, and room on the disk."""

import json
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pynvml
import pytest
import torch
from datasets.naming import camelcase_to_snakecase
from transformers import Olmo2Config, Olmo2ForCausalLM

from base import gpus
from base.errors import UserError
from base.frozen import fingerprint
from study.definition import Study, load_study, save_study
from study.machine import released_size
from study.machine.disk import check_room, needed_bytes
from study.machine.hardware import UNKNOWN_BYTES, Hardware, planned, this_machine
from study.machine.measurable import check_measurable
from study.machine.needs import ON_GPU, Needs, write_run_configurations
from study.recipes.resolve import resolve as recipe
from study.recipes.resolve import whole_recipes
from study.step import Step, resolve
from study.steps import steps_of
from tests.interpreter import interpreter
from tests.runs import PROJECT
from train.model.config import hf_settings, multiplied_parameters, parameter_shapes
from train.model.presets import OLMO2_190M, PYTHIA_160M
from train.planning.flops import GPUS
from train.planning.memory import rank_memory
from train.run.config import load_run

NOWHERE = Path("/nonexistent")
PLACEHOLDERS = ("{launch}", "{device}", "{sharding}", "{cores}", "{python}", "{study}", "{root}")


def needs_on(study: Study, gpus: int, kind: str = "h100") -> Needs:
    return Needs(study, planned(gpus, kind, 16))


def steps_by_kind(study: Study) -> dict[str, Step]:
    """The first step of each kind."""
    return {step.kind: step for step in reversed(steps_of(study))}


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("olmo2-7b-lr", 8),
        *((name, 1) for name in whole_recipes() if name != "tiny"),
        *(
            pytest.param(name, 8, marks=pytest.mark.stress)
            for name in whole_recipes()
            if name != "tiny"
        ),
    ],
)
def test_every_recipe_has_a_plan_for_one_gpu_and_eight_or_names_the_machine_that_takes_it(
    name, gpus
):
    study = recipe(name, "full")
    needs = needs_on(study, gpus)
    if name.startswith("olmo2-7b") and gpus == 1:  # 18 bytes a parameter are 131 GB
        with pytest.raises(
            UserError, match=r"fits no layout on 1 x h100 of 80 GB; .* that take it: 4 x h100, "
        ):
            _ = needs.trainings
        return
    for run in study.trained:
        fitted, ranks = needs.trainings[run.name]
        assert fingerprint(fitted) == fingerprint(run), "a layout is not part of what a run is"
        assert rank_memory(fitted, ranks).bytes <= GPUS["h100"].memory_bytes
        assert 1 <= ranks <= gpus
        assert fitted.batch_size % (fitted.data_parallel_size(ranks) * fitted.micro_batch_size) == 0
    for kind, step in steps_by_kind(study).items():
        machine = needs.machine(step)
        assert machine.gpus <= gpus
        assert (machine.gpus > 0) == (kind in ON_GPU)
        words = resolve(step.command, NOWHERE, machine)
        assert not [word for word in words if word.startswith(PLACEHOLDERS)]
        # `curvature step` refuses several ranks that share nothing
        assert kind != "step" or machine.gpus == 1 or "fsdp" in words


def test_a_machine_that_a_refusal_names_takes_the_study_and_half_of_it_does_not():
    study = recipe("olmo2-7b-lr", "full")
    assert needs_on(study, 4).trainings["lr3e-4"].ranks == 4
    with pytest.raises(UserError):
        _ = needs_on(study, 2).trainings


def test_runs_that_can_train_at_once_have_a_share_each():
    study = recipe("olmo2-190m-lr", "full")  # four runs, and the anneals that branch from them
    assert {training.ranks for training in needs_on(study, 8).trainings.values()} == {2}
    assert {training.ranks for training in needs_on(study, 3).trainings.values()} == {1}
    sevens = needs_on(recipe("olmo2-7b-lr", "full"), 8).trainings["lr3e-4"]
    # two at a time would be split over four GPUs each
    assert (sevens.ranks, sevens.run.recompute) == (8, "none")


def test_on_the_cpu_everything_is_as_the_recipe_has_it():
    study = recipe("tiny", "smoke")
    needs = Needs(study, Hardware(2))
    steps = steps_by_kind(study)
    launch = needs.machine(steps["train"]).launch
    assert launch[launch.index("--nproc-per-node") + 1] == "2"
    for step in steps_of(study):
        machine = needs.machine(step)
        assert (machine.device, machine.gpus, machine.sharding) == ("cpu", 0, "none")
        assert step.kind == "train" or machine.launch == ("{python}",)
    assert [training.run for training in needs.trainings.values()] == list(study.trained)


def test_runs_of_one_rank_train_on_all_cores_without_torchrun():
    study = recipe("tiny", "full")
    needs = Needs(study, Hardware(2))
    train = steps_by_kind(study)["train"]
    assert (needs.at_once, train.slots, needs.machine(train).launch) == (2, 1, ("{python}",))


def test_ranks_of_a_job_share_what_can_be_shared():
    study = recipe("olmo2-190m-lr", "full")
    steps = steps_by_kind(study)
    four = Needs(study, Hardware(4, ("0", "1", "2", "3"), "GPU", UNKNOWN_BYTES))
    sharing = ("train", "quantize", "blocks", "curvature", "slice", "critical")
    expected = dict.fromkeys(sharing, 4) | dict.fromkeys(("step", "methods"), 1)
    assert {kind: four.ranks(steps[kind], 4) for kind in expected} == expected


def test_a_model_that_one_gpu_does_not_hold_is_shared():
    study = recipe("olmo2-190m-lr", "full")
    step = steps_by_kind(study)["step"]
    whole = needs_on(study, 1).hessian_memory(step)
    assert whole is not None
    smaller = Needs(study, Hardware(16, ("0", "1", "2", "3"), "other", int(whole * 0.9)))
    assert smaller.sharding(step) == "fsdp"
    assert smaller.ranks(step, 4) == 4
    assert 1 < smaller.gpus(step) <= 4
    shared = smaller.hessian_memory(step)
    assert shared is not None
    assert shared <= smaller.hardware.gpu_bytes
    assert smaller.gpus(steps_by_kind(study)["quantize"]) == 1


def test_layouts_of_the_hardware_at_hand_are_written_and_nothing_else_changes(tmp_path):
    study = recipe("olmo2-7b-lr", "full")
    for number in (4, 8):
        trainings = needs_on(study, number).trainings
        write_run_configurations(
            tmp_path, study, {name: training.run for name, training in trainings.items()}
        )
        save_study(tmp_path, study)
        for run in study.trained:
            path = tmp_path / run.name / "run.json"
            assert load_run(path) == trainings[run.name].run
            assert json.loads(path.read_text())["fingerprint"] == fingerprint(run)
    four, eight = (needs_on(study, number).trainings["lr3e-4"].run for number in (4, 8))
    assert four != eight
    assert load_study(tmp_path) == study


GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


def driver(*used: float, models: tuple[str, ...] = (), cuda: int = 13000) -> SimpleNamespace:
    """Answers of NVML to a study, for GPUs of a model, with so many GiB in use on each."""

    def memory(number: int, version: int) -> SimpleNamespace:
        total, reserved, taken = 80 * GIB, GIB, round(used[number] * GIB)
        return SimpleNamespace(
            total=total, reserved=reserved, used=taken, free=total - reserved - taken
        )

    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlMemory_v2=pynvml.nvmlMemory_v2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUUID=lambda number: f"GPU-{number}0000000",
        nvmlDeviceGetName=lambda number: (models or (H100,) * len(used))[number],
        nvmlDeviceGetMemoryInfo=memory,
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
    )


@pytest.fixture
def machine(monkeypatch):
    """Makes this a machine with these GPUs and a torch of this CUDA."""

    def make(*used: float, torch_cuda: str | None = "13.0", **answers) -> None:
        monkeypatch.setattr(gpus, "pynvml", driver(*used, **answers))
        monkeypatch.setattr(
            gpus, "_torch_version", lambda: SimpleNamespace(cuda=torch_cuda, __version__="2.13.0")
        )
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


def chosen(device: str = "auto", count: int | None = None, sized_for: str = "cuda") -> Hardware:
    return this_machine(device, count, 16, sized_for=sized_for)


def test_a_study_has_all_idle_gpus_or_as_many_as_asked_for(machine, monkeypatch):
    machine(0, 0, 0, 0)
    assert chosen() == Hardware(16, ("0", "1", "2", "3"), "h100", 79 * GIB)
    assert chosen(count=2).gpus == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-10000000")
    assert chosen().gpus == ("3", "1")
    machine(0, 70, 0, 0)
    # a busy one is passed over where others are left
    assert chosen(count=3).gpus == ("0", "2", "3")


def test_what_a_study_is_sized_for_decides_where_it_runs_unless_it_is_told(machine):
    machine(0)
    assert chosen(sized_for="cpu") == Hardware(16)
    assert chosen("cuda", sized_for="cpu").gpus == ("0",)
    assert chosen("cpu") == Hardware(16)
    assert chosen(sized_for="any").gpus == ("0",)
    machine()
    assert chosen(sized_for="any") == Hardware(16)


@pytest.mark.parametrize(
    ("has", "asked", "words"),
    [
        ({"used": ()}, {}, "has no NVIDIA GPU; give --device cpu"),
        ({"used": (0, 0)}, {"count": 3}, "--gpus 3 asks for more GPUs than the 2 there are; give"),
        ({"used": (0, 60)}, {}, r"GPU 1 \(.*, 64.4 of 84.8 GB in use\) is busy; .*, give --gpus 1"),
        ({"used": (60,)}, {}, "is busy; wait until it is free, end what runs there"),
        ({"used": (0,), "torch_cuda": None}, {}, "2.13.0 is a build without CUDA; .* --device cpu"),
        ({"used": (0,), "cuda": 12040}, {}, "driver 580.65.06 runs CUDA up to 12.4 .* needs 13.0;"),
        ({"used": (0, 0), "models": (H100, "NVIDIA A100")}, {}, "GPUs differ .* choose equal ones"),
        ({"used": (0,)}, {"device": "gpu"}, "--device gpu is unknown; did you mean cuda"),
        ({"used": (0,)}, {"device": "cpu", "count": 1}, "add --device cuda"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_helps(machine, has, asked, words):
    machine(*has.pop("used"), **has)
    with pytest.raises(UserError, match=words):
        chosen(**asked)


@pytest.mark.parametrize("names", ["", "-1", "7", "MIG-12"])
def test_gpus_that_are_hidden_or_unknown_are_refused(machine, monkeypatch, names):
    machine(0, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        chosen()


def test_a_driver_within_the_same_major_version_of_cuda_is_taken(machine):
    machine(0, cuda=13000, torch_cuda="13.2")
    assert chosen().gpus == ("0",)


def test_what_a_study_ran_on_is_read_back(tmp_path):
    two = planned(2, "h200", 5)
    two.record(tmp_path)
    assert Hardware.recorded(tmp_path) == two
    assert str(two) == "2 x h200 of 141 GB"
    assert Hardware.recorded(tmp_path / "absent") == Hardware(1)
    with pytest.raises(UserError, match="--gpu b300 is unknown; take one of h100"):
        planned(2, "b300", 5)


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this machine has a GPU")
def test_where_there_is_no_gpu_cuda_is_one_line_and_code_2(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # set, it hides them, and says so
    words = ("run", "tiny", "--profile", "smoke", "--device", "cuda", "--root", str(tmp_path))
    command = [interpreter(), "-m", "study", *words]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: this machine has no ")
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_needs_are_those_of_transformers_models_and_the_runs_state(study):
    """4 runs in fp32 of 7 checkpoints, LAWA of 5 at each save and at 3 of them measured, 2
    soups, 3 specs by block.
    """
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    shape: dict[str, Any] = {name: getattr(study.runs[0].model, name) for name in names}
    with torch.device("meta"):
        model = Olmo2ForCausalLM(
            Olmo2Config(num_attention_heads=4, tie_word_embeddings=False, **shape)
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    blocks = model.model.layers.modules()
    linear = sum(module.weight.numel() for module in blocks if isinstance(module, torch.nn.Linear))
    state = 4 + 4 + 8 + 5 * 4  # weight, main weight, moments and LAWA's five slots
    assert needed_bytes(study) == {
        "checkpoints": 4 * 7 * parameters * (state + 4),
        "exports": 4 * (7 + 3 + 2) * parameters * 4,
        "quantized weights": 4 * 3 * linear * 4,
        "released models": 0,
    }


@pytest.mark.parametrize("size", [OLMO2_190M, PYTHIA_160M])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_size_of_a_release_is_that_of_a_model_of_ours(size, is_tied):
    """By transformers' model of its config.json, against the shapes that training plans with."""
    model = size.model_copy(update={"tie_word_embeddings": is_tied})
    content = {"model_type": model.family} | hf_settings(model, 2048, 0)
    whole = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    for written, bytes_each in (
        ({"torch_dtype": "bfloat16"}, 2),
        ({"dtype": "float32"}, 4),
        ({}, 4),
    ):
        config = json.dumps(content | written)
        assert released_size.stored_bytes(config) == whole * bytes_each
        assert released_size.multiplied_parameters(config) == multiplied_parameters(model)


def filesystem(monkeypatch, free: int) -> None:
    """Every file system has so many bytes left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_the_line_is_drawn_at_what_is_left_to_write_and_the_reserve(study, tmp_path, monkeypatch):
    needed = sum(needed_bytes(study).values())
    filesystem(monkeypatch, needed + 2 * 10**9)
    check_room(study, tmp_path / "not" / "there" / "yet", reserve_gb=2)
    filesystem(monkeypatch, needed + 2 * 10**9 - 1)
    with pytest.raises(UserError, match=r"tiny will write 1.2 GB more .checkpoints 0.98, exports"):
        check_room(study, tmp_path, reserve_gb=2)


def test_what_lies_there_already_counts_once_and_only_for_its_kind(study, tmp_path, monkeypatch):
    needed = needed_bytes(study)
    run = tmp_path / "tiny" / study.runs[0].name
    for file_name, size in (
        ("checkpoints/step00000064/shard", 1_000_000),
        ("restarts/step00000070/shard", 10 * needed["checkpoints"]),  # they go at the end
        # more than is needed helps no other kind
        ("hf/step00000064/model.safetensors", 10 * needed["exports"]),
        ("hf/step00000064/blocks/gptq-b3-g32/dense/block00000.safetensors", 70_000),
        # a damaged one is written again
        ("quarantine/step00000032/shard", 10 * needed["checkpoints"]),
    ):
        (run / file_name).parent.mkdir(parents=True)
        with (run / file_name).open("wb") as file:
            file.truncate(size)
    left = needed["checkpoints"] - 1_000_000 + needed["quantized weights"] - 70_000
    filesystem(monkeypatch, left)
    check_room(study, tmp_path, reserve_gb=0)
    filesystem(monkeypatch, left - 1)
    with pytest.raises(UserError, match="take a root on another"):
        check_room(study, tmp_path, reserve_gb=0)


def test_the_real_file_system_is_asked(study, tmp_path):
    check_room(study, tmp_path, reserve_gb=0)
    with pytest.raises(UserError, match=r"1,000,000,000.0 GB are reserved"):
        check_room(study, tmp_path, reserve_gb=1e9)


def test_cached_documents_of_tasks_are_enough_without_a_network(tmp_path, monkeypatch):
    """Directories of the cache are named as `datasets` names them."""
    question = '{"specs": ["gptq-b3-g32"], "tasks": "piqa,pubmedqa"}'
    study = recipe("tiny", "smoke", (f"tasks={question}",))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "false")
    check_measurable(study)  # the hub is asked for them
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    for owner, name in (("baber", "piqa"), ("qiaojin", "PubMedQA")):
        with pytest.raises(UserError, match=f"the documents of {name.lower()} are on the Hugging"):
            check_measurable(study)
        (tmp_path / f"{owner}___{camelcase_to_snakecase(name)}").mkdir()
    check_measurable(study)
