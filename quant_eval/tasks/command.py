"""`python -m quant_eval tasks`: what quantization costs on downstream tasks."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ckpt_tools.hf_directory import result_directories, write_result
from train.command import explain_validation, one_process_only

FOLDER = "tasks"  # below the directory of the losses of the same spec


def tasks(
    hf_dirs: Annotated[list[Path], typer.Argument(help="HF directories, measured one after the other.")],
    spec: Annotated[list[str], typer.Option(help="What to quantize with, such as gptq-b3-g128. Repeatable.")],
    calibration: Annotated[Path, typer.Option(help="Token file PREFIX the Hessians are estimated on.")],
    chosen: Annotated[
        str, typer.Option("--tasks", help="Names with commas between; paper: the twelve of arXiv:2510.06213.")
    ] = "paper",
    num_fewshot: Annotated[int, typer.Option(help="Examples before each question.")] = 5,
    limit: Annotated[
        int | None, typer.Option(help="First items of each task, of mmlu of each subject.", show_default="all")
    ] = None,
    task_files: Annotated[
        Path | None,
        typer.Option(
            help="Directory with TASK.jsonl, and TASK.fewshot.jsonl for the examples; mmlu/SUBJECT.jsonl for mmlu. "
            "Documents have the fields of the task's dataset.",
            show_default="the Hugging Face hub",
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Of result.json, one per --spec, in the same order.", show_default="HF_DIR/quant/SPEC/tasks"),
    ] = None,
    calibration_sequences: Annotated[int, typer.Option(help="Sequences drawn for calibration, none twice.")] = 128,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a calibration sequence.", show_default="2048, or the model's context if less"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the calibration draw, the examples and the bootstrap.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass; moves results by rounding only.")] = 8,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16, for the full and the quantized model alike.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    scratch: Annotated[
        Path | None, typer.Option(help="Directory for activations too many for memory.", show_default="memory")
    ] = None,
    bootstrap_samples: Annotated[int, typer.Option(help="Resamplings of the items behind the intervals.")] = 1000,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
) -> None:
    """Writes tasks/result.json: accuracy before and after quantization, per task, per item and as their mean.

    Example: python -m quant_eval tasks run/hf/step00012000 --spec gptq-b3-g128 --calibration data/train
    --tasks arc_easy,piqa
    """
    # torch and lm-eval load in seconds: not for --help or a misspelt spec
    from ckpt_tools.hf_model import read_hf_config
    from quant_eval.families import ARCHITECTURES
    from quant_eval.settings import CalibrationSettings, ComputeSettings
    from quant_eval.specs import parse_spec
    from quant_eval.tasks.settings import TaskSettings
    from quant_eval.tasks.table import choose_tasks

    specs = [parse_spec(text) for text in spec]
    outs = result_directories(hf_dirs, "quant", [one.name for one in specs], out)
    one_process_only("quant_eval")
    for hf_dir in hf_dirs:  # not after minutes on the ones before it
        read_hf_config(hf_dir, ARCHITECTURES)
    try:
        settings = TaskSettings(
            tasks=choose_tasks(chosen),
            num_fewshot=num_fewshot,
            limit=limit,
            task_files=task_files,
            seed=seed,
            bootstrap_samples=bootstrap_samples,
            level=level,
            compute=ComputeSettings(dtype=dtype, batch_size=batch_size, device=device, scratch=scratch),  # type: ignore[arg-type]
        )
        calibrated = CalibrationSettings(
            prefix=calibration, sequences=calibration_sequences, sequence_length=sequence_length, seed=seed
        )
    except ValidationError as error:
        raise explain_validation("command line", error) from None

    from quant_eval.tasks.loading import load_tasks
    from quant_eval.tasks.measurement import measure

    loaded = load_tasks(settings)
    for hf_dir, directories in zip(hf_dirs, outs, strict=True):
        results = measure(hf_dir, specs, calibrated, loaded, settings)
        for directory, result in zip(directories, results, strict=True):
            write_result(directory if out else directory / FOLDER, result)
