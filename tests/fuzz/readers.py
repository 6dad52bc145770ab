"""Every reader of a file or text of unknown origin: a valid input, and how it is read."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from base.digests import sealed
from base.processor import processor
from ckpt_tools.checkpoint import open_weights
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.megatron_shards import ShardedTensors
from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.directory import read_download, read_lineage, write_lineage
from ckpt_tools.hf.forward import empty_model
from ckpt_tools.hf.model import identify, read_hf_config
from ckpt_tools.hf.results import labels, read_result
from ckpt_tools.importing import read_trainable
from ckpt_tools.inspecting import describe
from quant_eval.specs import parse_spec
from quant_eval.tasks import documents
from slurm import cluster
from slurm.cluster import parse_sacct, parse_squeue
from slurm.site import EXAMPLE, load_site
from slurm.status.overview import look
from slurm.status.table import lines_of
from slurm.submission.record import (
    exclude,
    excluded_nodes,
    existing_submission,
    record_end,
    record_start,
)
from slurm.submission.survey import complete_steps, remember_complete
from study.definition import load_study
from study.machine.hardware import Hardware
from study.pipeline.ledger import Ledger
from study.recipes.resolve import resolve
from study.results.table import Row, read_table, write_table
from study.steps import steps_of
from study.trainings import straggler_of, training_of
from tests.fuzz.mutators import (
    mutated_bytes,
    mutated_header,
    mutated_json,
    mutated_json_lines,
    mutated_lines,
)
from tests.sealing import reseal, write_ending
from tests.slurm import studies
from train.data.corpus import open_corpus
from train.data.documents import read_documents
from train.data.manifest import read_manifest
from train.data.tokenizer import load_tokenizer
from train.model.config import parameter_shapes
from train.run.config import RunConfig, dump_run, load_run, with_settings
from train.run.dcp_metadata import read_metadata
from train.run.directory import MODEL_INDEX, RunDirectory, read_checkpoint_record
from train.run.environment import attempts, kinds_of, node_count
from train.run.metrics import read_metrics
from train.run.perturbation import Noise, Qat, Sam

Mutate = Callable[[Random, bytes], bytes]
Make = Callable[[Path, "Sources"], list[Path]]


@dataclass(frozen=True)
class Sources:
    """Directories that other tests use: none of them is written to."""

    hf_dir: Path
    tokenizer_dir: Path
    prefix: Path
    run_dir: Path  # trained on one rank


class Reader(NamedTuple):
    """One reader.

    Attributes:
        make: writes a valid input into an empty directory; returns the files to damage.
        read: reads the directory, and uses what it was given as its callers do.
        mutate: damages one of the files.
    """

    make: Make
    read: Callable[[Path], object]
    mutate: Mutate = mutated_json


READERS: dict[str, Reader] = {}


def _text(name: str, text: str, read: Callable[[str], object]) -> None:
    """Add a reader of text: of an option, or of what a program answered."""

    def make(directory: Path, _sources: Sources) -> list[Path]:
        (directory / "text").write_text(text)
        return [directory / "text"]

    READERS[name] = Reader(
        make,
        lambda directory: read((directory / "text").read_text(errors="surrogateescape")),
        mutated_lines,
    )


def _file(
    name: str,
    content: str,
    read: Callable[[Path], object],
    mutate: Mutate = mutated_json,
    file: str | None = None,
) -> None:
    """Add a reader of one file, by its path."""
    file = file or name

    def make(directory: Path, _sources: Sources) -> list[Path]:
        (directory / file).write_text(content)
        return [directory / file]

    READERS[name] = Reader(make, lambda directory: read(directory / file), mutate)


# --- options ---

SPEC = "gptq-b3-g128"
for spec in (SPEC, "rtn-b4-g32-a8", "atom-b4-g128-keep0.03-a4", "nf4-g64", "int8-t6"):
    _text(f"spec {spec}", spec, lambda text: parse_spec(text).name)


RUN = resolve("tiny", "smoke").trained[0]


def _used(run: RunConfig) -> object:
    return dump_run(run), run.tokens_at(run.total_steps), parameter_shapes(run.model)


for setting in (
    *("seed=7", "model.hidden_size=64", "optimizer.peak_lr=1e-3", "save_steps=[0,36,72]"),
    *("schedule.anneal=null", "zero.stage=1", "precision=bf16", "model.num_hidden_layers=2"),
):
    _text(f"--set {setting}", setting, lambda text: _used(with_settings(RUN, text.split("\n"))))

# --- runs and studies ---

_file("run.json", RUN.model_dump_json(), lambda path: _used(load_run(path)))
for perturbation in (
    Qat(spec="nvfp4-a16", linears=("down_proj",)),
    Noise(spec="rtn-b4-g8-asym", from_step=3),
    Sam(rho=0.05, every_steps=2),
):
    _file(
        f"{perturbation.kind} of run.json",
        studies.changed(RUN, perturbation=perturbation).model_dump_json(),
        lambda path: _used(load_run(path)),
        file="run.json",
    )
_file(
    "study.json",
    json.dumps(sealed(studies.watched_study().model_dump(mode="json"))),
    lambda path: [step.command for step in steps_of(load_study(path.parent))],
)
ROWS = [
    {"step": step, "tokens": 100 * step, "attempt": 1, "time": 1.0, "loss": 5.0, "learning_rate": 1}
    for step in range(1, 5)
]
_file(
    "metrics.jsonl",
    "".join(json.dumps(row) + "\n" for row in ROWS),
    read_metrics,
    mutated_json_lines,
)
ATTEMPT: dict[str, object] = {"host": "a", "slurm_job": "1_0", "began": 1.5}
ATTEMPT |= {"nodes": [{"hosts": ["a"], "gpus": [], "processor": processor().model_dump()}]}
_file(
    "environment.json",
    json.dumps({"attempts": [ATTEMPT, ATTEMPT]}),
    lambda path: [(kinds_of(each), node_count(each)) for each in attempts(path)],
)
_file(
    "hardware.json",
    json.dumps({"cores": 2, "gpus": ["0"], "kind": "h100", "gpu_bytes": 1}),
    lambda path: str(Hardware.recorded(path.parent)),
)


def _training(directory: Path, _sources: Sources) -> list[Path]:
    run = directory / "lr3e-3"
    studies.write_metrics(directory, "lr3e-3", range(1, 6), 1)
    studies.write_ranks(directory, "lr3e-3", 3, 1, [1.0, 1.1, 2.0])
    return [run / "metrics.jsonl", run / "ranks.jsonl"]


def _read_training(directory: Path) -> object:
    run = studies.changed(RUN, name="lr3e-3")
    return training_of(directory, run), straggler_of(RunDirectory(directory / "lr3e-3").ranks)


READERS["tails of metrics"] = Reader(_training, _read_training, mutated_json_lines)

# --- results ---

MEASURED = {
    "cross_entropy": 2.5,
    "kl_divergence": 0.1,
    "intervals": {"kl_divergence": [0.05, 0.15]},
    "per_document": {"document": [0, 1], "tokens": [5, 6], "nll": [1.5, 2.5]},
    "blocks": [{"block": 0, "alone": {"absolute_error": 0.1}}],
    "layers": [{"name": "a", "relative_output_error": 0.1}],
}
RESULT = {
    "model": {"path": "m/hf/step00000004", "weights_digests": {"model.safetensors": "sha256:0"}},
    "spec": {"name": SPEC, "method": "gptq", "evaluation": {"sha256": "ab"}},
    "measured": MEASURED,
    "environment": {"commit": "a"},
}


def _result(path: Path) -> object:
    result = read_result(path)
    return labels([result, result]), result.measured


_file("result.json", json.dumps(sealed(RESULT)), _result)


def _table(directory: Path, _sources: Sources) -> list[Path]:
    columns = {"average": None, "phase": "stable", "peak_lr": 1e-3, "study": "small", "run": "a"}
    rows = [Row.of(columns | {"step": step, "tokens": 100 * step}) for step in range(4)]
    return [write_table(directory, studies.watched_study(), rows)]


READERS["table.parquet"] = Reader(
    _table, lambda path: read_table(path, studies.watched_study()), mutated_bytes
)

# --- HF directories ---


def _copy(source: str, *names: str) -> Make:
    """Return how one of the sources is copied, whose files of these names are damaged."""

    def make(directory: Path, sources: Sources) -> list[Path]:
        shutil.copytree(getattr(sources, source), directory, dirs_exist_ok=True)
        return [directory / name for name in names]

    return make


def _configured(directory: Path) -> object:
    read_hf_config(directory)
    read_trainable(directory)
    return empty_model(read_config(directory))


READERS["config.json"] = Reader(_copy("hf_dir", "config.json"), _configured)


def _weights(directory: Path, sources: Sources) -> list[Path]:
    write_weights(directory, HFWeights(sources.hf_dir), shard_bytes=20_000)
    return [directory / MODEL_INDEX]


def _all_weights(directory: Path) -> object:
    weights = HFWeights(directory)
    return [read_whole(weights, name) for name in weights.tensors]


READERS["index of weights"] = Reader(_weights, _all_weights)
READERS["safetensors"] = Reader(_copy("hf_dir", "model.safetensors"), _all_weights, mutated_header)


def _exported(directory: Path, sources: Sources) -> list[Path]:
    files = _copy("hf_dir", "lineage.json")(directory, sources)
    write_lineage(directory, {"kind": "export", "parity": {"logits": 1e-6}, "run": "a"}, {})
    return files


READERS["lineage.json"] = Reader(
    _exported, lambda path: (read_lineage(path), identify(path), describe(path))
)


def _tokenized(directory: Path) -> object:
    tokenizer, eos = load_tokenizer(directory)
    return tokenizer.encode("a text of words").ids, eos


READERS["tokenizer"] = Reader(
    _copy("tokenizer_dir", "tokenizer_config.json", "tokenizer.json"), _tokenized
)
RECORD = {"bytes": 1, "digest": "sha256:" + "0" * 64}
_file(
    "download.json",
    json.dumps(sealed({"repo": "a/b", "revision": "c", "commit": None, "files": {"a": RECORD}})),
    lambda path: read_download(path.parent),
)
# --- checkpoints ---


STEP = "checkpoints/step00000020"


def _checkpoint(files: str) -> Make:
    def make(directory: Path, sources: Sources) -> list[Path]:
        shutil.copytree(sources.run_dir / STEP, directory / STEP)
        shutil.copy(sources.run_dir / "run.json", directory)
        return sorted((directory / STEP).glob(files))

    return make


def _described(directory: Path) -> object:
    describe(directory / STEP)
    return open_weights(directory / STEP, read_checkpoint_record(directory / STEP))


def _tensors(directory: Path) -> object:
    read_metadata(directory / STEP)
    stored = ShardedTensors(directory / STEP)
    names = [name for name in stored.tensors if not name.startswith("optimizer")]
    return [stored.read(name, 0, stored.tensors[name].shape[0]) for name in names]


READERS["checkpoint.json"] = Reader(_checkpoint("checkpoint.json"), _described)
READERS[".metadata"] = Reader(_checkpoint(".metadata"), _tensors, mutated_bytes)
READERS[".distcp"] = Reader(_checkpoint("__*.distcp"), _tensors, mutated_bytes)

# --- text ---


def _corpus(*suffixes: str) -> Make:
    def make(directory: Path, sources: Sources) -> list[Path]:
        for suffix in ("json", "bin", "idx"):
            shutil.copy(f"{sources.prefix}.{suffix}", directory / f"text.{suffix}")
        return [directory / f"text.{suffix}" for suffix in suffixes]

    return make


def _sequences(directory: Path) -> object:
    """Read without hashes, as of a corpus that is too large to be hashed at every start."""
    corpus = open_corpus(directory / "text")
    read_manifest(directory / "text")
    return corpus.document(0), corpus.num_sequences(32), corpus.bounds_D[-1]


def _resized(directory: Path) -> object:
    """Read with a manifest that states the sizes that the files have now."""
    path = directory / "text.json"
    content = json.loads(path.read_text())
    for suffix in ("bin", "idx"):
        content[suffix]["bytes"] = (directory / f"text.{suffix}").stat().st_size
    reseal(path, content)
    return _sequences(directory)


READERS["manifest"] = Reader(_corpus("json"), _sequences)
READERS["token files"] = Reader(_corpus("bin", "idx"), _resized, mutated_bytes)
_file(
    "jsonl",
    "".join(json.dumps({"text": f"document {number}", "n": number}) + "\n" for number in range(5)),
    lambda path: list(read_documents(path)),
    mutated_json_lines,
    "text.jsonl",
)
_file("txt", "a text\nof lines\n", lambda path: list(read_documents(path)), mutated_bytes, "a.txt")
ITEM = {"query": "a", "choices": ["b", "c"], "gold": 1}
_file(
    "task documents",
    "".join(json.dumps(ITEM | {"query": str(number)}) + "\n" for number in range(4)),
    lambda path: documents._read(path),
    mutated_json_lines,
    "task.jsonl",
)

# --- SLURM ---

SQUEUE = (
    "q|7_0|RUNNING|None|node1|0|0|2031-01-01T08:00:00|\n"
    "q|7_1|FAILED|NonZeroExitCode|node2|1|256|N/A|\n"
    "Welcome!\n"
    "q|7_[2,4-6%2]|PENDING|Resources||0|0|N/A|\nq|8|COMPLETED|None|node1|0|0|N/A|\n"
    "q|9|FAILED|RaisedSignal:9(Killed)|node1|0|0:9|N/A|\n"  # as SLURM 24.11 writes it
)
SACCT = (
    "q|7_0|RUNNING|None|node1|1700000000|0:0|\nq|7_1|CANCELLED by 0|None|node1|1700000001|0:15|\n"
    "q|7_1|FAILED|NonZeroExitCode|None assigned|1700000002|1:0|\n"
    "q|7_[2-4]|PENDING|Priority|None assigned|1700000003|0:0|\n"
)
_text("squeue", SQUEUE, parse_squeue)
_text("sacct", SACCT, parse_sacct)


def _answering(read: Callable[[], object]) -> Callable[[str], object]:
    """Read what SLURM's commands print if they all print this text."""

    def answer(text: str) -> object:
        ended = SimpleNamespace(returncode=0, stdout=text, stderr="")
        with mock.patch.multiple(cluster, _run=lambda *_, **__: ended, TRY_SECONDS=0.0):
            return read()

    return answer


_text("sbatch", "123;cluster\n", _answering(lambda: cluster.submit(Path("a"), "0", "t")))
_text("squeue comments", "q|12|a:b|\nq|13|t|\n", _answering(lambda: cluster.job_of("t")))
_text(
    "scontrol config",
    "MailProg = /bin/mail\nMaxArraySize            = 1001\nMaxJobCount = 10000\n",
    _answering(cluster.max_array_size),
)
_text("SLURM_JOB_NODELIST", "r[1-2]n[09-10,7],login", cluster.expand)
_file("site file", EXAMPLE.read_text(), load_site, mutated_lines, "site.toml")


def _submission(directory: Path, _sources: Sources) -> list[Path]:
    study, study_dir = studies.watched_study(), directory / "small"
    submission = studies.submitted(study_dir, study)
    names = [step.name for step in steps_of(study)][:4]
    studies.make(study_dir, study, names)
    remember_complete(study_dir, set(names))
    record_start(study_dir, ("train", 0), submission.element_ids["train", 0], 1, 5)
    record_end(study_dir, ("train", 0), submission.element_ids["train", 0], "asked")
    studies.write_metrics(study_dir, study.runs[0].name, range(1, 4), 1)
    studies.write_attempts(study_dir, study.runs[0].name, 1)
    exclude(study_dir, {"node7": "broken"})
    write_ending(RunDirectory(study_dir / study.runs[0].name), "preempted", 3, asked_by="user")
    slurm = study_dir / "slurm"
    return [
        *(slurm / "submission.json", slurm / "jobs.jsonl", slurm / "complete.json"),
        *(slurm / "excluded.json", *slurm.glob("starts/*.jsonl"), *study_dir.glob("steps/*.json")),
        RunDirectory(study_dir / study.runs[0].name).status_json,
    ]


def _looked_at(directory: Path) -> object:
    study_dir = directory / "small"
    with mock.patch.object(cluster, "states", return_value={}):
        complete_steps(study_dir, Ledger(study_dir, steps_of(load_study(study_dir))))
        return existing_submission(study_dir), excluded_nodes(study_dir), lines_of(look(study_dir))


def _mutated_record(random: Random, content: bytes) -> bytes:
    lines = content.strip().count(b"\n{") > 0 or content.startswith(b'{"event')
    return (mutated_json_lines if lines else mutated_json)(random, content)


READERS["submission"] = Reader(_submission, _looked_at, _mutated_record)
