"""The site file: what it may say, what it says of mistakes, and that no text of it runs."""

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from base.errors import UserError
from slurm.site import EXAMPLE, Site, load_site
from slurm.submission.arrays import JobArray
from slurm.submission.script import render
from tests.runs import PROJECT, write_program
from tests.slurm.studies import write_site
from tests.waiting import HANG_SECONDS

MINIMAL = """
root = "/shared/root"
[slurm]
[resources.train]
gpus_per_node = 8
time = "24:00:00"
[resources.export]
ranks_per_node = 1
time = 60
[resources.quantize]
gpus_per_node = 1
time = 60
[resources.curvature]
gpus_per_node = 1
time = 60
[resources.light]
time = 60
[limits]
[environment]
[setup]
[mlflow]
"""
# Every key that holds text, with a value that is fine there.
TEXTS = {
    "root": "/shared/root",
    "group": "name",
    "python": "/shared/python",
    "project": "/shared/project",
    **{
        f"{table}.{key}": "name"
        for table in ("slurm", "resources.train")
        for key in ("account", "partition", "qos")
    },
    **{f"slurm.{key}": "name" for key in ("constraint", "exclude", "reservation", "gres_type")},
    "slurm.gpus": "gres",
    "slurm.extra": ["--exclusive"],
    "slurm.srun_options": ["--mpi=pmix"],
    "resources.train.mem": "5G",
    "resources.train.time": "10:00:00",
    "environment": {"NAME": "value"},
    "setup.modules": ["cuda/12.8"],
    "setup.lines": ["true"],
    "container.kind": "pyxis",
    "container.image": "/x.sqsh",
    "container.mounts": ["/shared"],
    "container.python": "python",
    "nccl.profile": "efa",
    "nccl.interface": "ib0",
    "nccl.family": "ipv6",
    "nccl.address": "{node}-ib",
    "mlflow.tracking_uri": "https://host:5000",
}
HOSTILE = (
    "a b", "a'b", 'a"b', "$(touch {evil})", "`touch {evil}`", "x; touch {evil}", "x\ntouch {evil}", "x\rtouch {evil}",
    "x\\", "../up", "/shared/../../etc", "$HOME", "%j#x", "x\0y", "--wrap=touch {evil}", "-x y", "\u0665\u0666 ",
    "x#SBATCH y",
)  # fmt: skip


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The minimal site with values at dotted keys; None takes the key away."""
    content = tomllib.loads(MINIMAL)
    for key, value in changes.items():
        *tables, name = key.split(".")
        table = content
        for part in tables:
            table = table.setdefault(part, {})
        if value is None:
            del table[name]
        else:
            table[name] = value
    return content


def loaded(tmp_path: Path, changes: dict[str, Any]) -> Site:
    return load_site(write_site(tmp_path / "site.toml", changed(changes)))


def test_a_file_that_is_not_there_points_to_the_example(tmp_path):
    with pytest.raises(UserError, match=re.escape(f"copy {EXAMPLE}")):
        load_site(tmp_path / "no.toml")


def test_example_is_a_site_and_tables_of_kinds_come_first():
    site = load_site(EXAMPLE)
    assert (site.resources_of("train").qos, site.resources_of("light").qos) == ("long", None)
    assert {site.resources_of(kind).partition for kind in ("train", "light")} == {"gpu"}
    assert site.resources_of("train").ranks == 8
    assert site.limits.throttle == {"train": 4, "quantize": 50}


def test_everything_but_root_and_resources_has_a_default(tmp_path):
    site = loaded(tmp_path, {})
    assert site.project == PROJECT
    assert os.access(site.python, os.X_OK)


def test_site_survives_the_submissions_record(tmp_path):
    changes = TEXTS | {"slurm.extra": ["--exclusive"], "resources.light.extra": []}
    del changes["resources.train.partition"]
    site = loaded(tmp_path, changes)
    again = Site.model_validate_json(json.dumps(site.model_dump(mode="json")))
    for kind in ("train", "export", "quantize", "curvature", "light"):
        assert again.resources_of(kind) == site.resources_of(kind)
        assert again.resources_of(kind).partition == "name"
    extras = [again.resources_of(kind).extra for kind in ("train", "light")]
    assert extras == [("--exclusive",), ()]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 5400),
        ("90", 5400),
        ("90:00", 5400),
        ("10:01", 660),  # SLURM counts in minutes and rounds up
        ("24:00:00", 86400),
        ("2-00:00:00", 172800),
        ("1-6", 108000),
        ("1-06:30", 109800),
    ],
)
def test_time_limits(tmp_path, text, seconds):
    site = loaded(tmp_path, {"resources.train.time": text})
    assert site.resources_of("train").time_seconds == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "0:00", "1h", "1:60", "1:60:00", "1-24", "-5", "1:2:3:4", "UNLIMITED", 0, True],
)
def test_what_is_no_time_limit_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"site.toml: 'resources.train.time': "):
        loaded(tmp_path, {"resources.train.time": text})


PYXIS: dict[str, Any] = {"container.kind": "pyxis", "container.image": "x"}
WRONG = [
    ({"slurm.partitoin": "gpu"}, "unknown key 'slurm.partitoin'; did you mean partition"),
    ({"resources.trian": {}}, "unknown key 'resources.trian'"),
    ({"resources.train.gpus_pernode": 8}, "'resources.train.gpus_pernode'"),
    (PYXIS | {"container.mount": []}, "unknown key 'container.mount'"),
    ({"limits.throttle": {"quantise": 3}}, "'limits.throttle.quantise.[key]': Input should be"),
    ({"zzz": 1}, "unknown key 'zzz'"),
    ({"root": None}, "key 'root' is missing; add it"),
    ({"resources.export": None}, "key 'resources.export' is missing"),
    ({"resources.light.time": None}, "key 'resources.light.time' is missing"),
    ({"root": "shared"}, "absolute"),
    ({"slurm.gpus": "gpu"}, "'gpus-per-node' or 'gres'"),
    ({"slurm.extra": "--exclusive"}, "'slurm.extra'"),
    ({"slurm.extra": ["-x"]}, "--name=value"),
    ({"slurm.extra": ["--array=0-5"]}, "--array, which this project sets itself"),
    ({"slurm.extra": ["--depend=afterok:1"]}, "--dependency, which"),
    ({"slurm.extra": ["--exp=NONE"]}, "--export, which"),
    ({"slurm.extra": ["--clusters=b"]}, "would change --clusters, which"),
    ({"slurm.extra": ["--exclude=node1"]}, "would change --exclude, which"),
    ({"slurm.extra": ["--comment=mine"]}, "would change --comment, which"),
    ({"slurm.srun_options": "--mpi=pmix"}, "'slurm.srun_options'"),
    ({"slurm.srun_options": ["mpi=pmix"]}, "'mpi=pmix' is not an option of srun: write --name"),
    ({"slurm.srun_options": ["-N2"]}, "'-N2' is not an option of srun: write --name"),
    ({"resources.train.srun_options": ["--ntasks=2"]}, "would change --ntasks, which"),
    ({"slurm.srun_options": ["--kill"]}, "would change --kill-on-bad-exit, which"),
    ({"slurm.srun_options": ["--container-env=A"]}, "would change --container-env, which"),
    (
        {"resources.train.mem": "5G", "resources.train.extra": ["--mem-per-cpu=1G"]},
        "mem is given beside --mem-per-cpu=1G; leave one of them out",
    ),
    ({"nccl.address": "node"}, "{node}, letters, digits"),
    ({"resources.quantize.nodes": 2}, "quantize runs on one node, not 2"),
    ({"resources.train.nodes": 0}, "greater than or equal to 1"),
    ({"resources.train.nodes": True}, "valid integer"),
    ({"resources.export.ranks_per_node": None}, "state ranks_per_node"),
    ({"resources.train.ranks_per_node": 9}, "9 ranks would share 8 GPUs"),
    ({"resources.train.mem": "5 GB"}, "500G"),
    ({"resources.train.time": "5"}, "time or lower limits.stop_seconds_before_limit"),
    ({"limits.stop_seconds_before_limit": 65536}, "65535"),
    ({"limits.silent_seconds": 10**12}, "less than or equal to 604800"),
    ({"limits.hang_seconds": 10**12}, "less than or equal to 604800"),
    ({"limits.health_seconds": 10**400}, "'limits.health_seconds'"),
    ({"mlflow.every_seconds": 10**12}, "'mlflow.every_seconds': Input should be less than"),
    ({"mlflow.every_seconds": 9}, "greater than or equal to 10"),
    ({"environment": {"HF_TOKEN": "hf_very_secret"}}, "HF_TOKEN looks like a secret"),
    ({"environment": {"DB": "postgresql://me:very_secret@host/db"}}, "DB looks like a secret"),
    ({"environment": {"PGPASSWORD": 5}}, "PGPASSWORD looks like a secret"),
    ({"environment": {"DB_PASS": "very_secret"}}, "DB_PASS looks like a secret"),
    ({"environment": {"NGC_KEY": "very_secret"}}, "NGC_KEY looks like a secret"),
    ({"environment": {"WHERE": "nvapi-very_secret-very_secret"}}, "WHERE looks like a secret"),
    ({"setup.lines": ["export HF_TOKEN=very_secret"]}, "'setup.lines': HF_TOKEN looks like a"),
    ({"setup.lines": ["true", "A=1 DB_PASS='very_secret' x"]}, "DB_PASS looks like a secret"),
    ({"setup.lines": ["curl -H 'Bearer ghp_verysecretverysecret'"]}, "lines looks like a secret"),
    ({"slurm.extra": ["--export-file=glpat-very_secret-very_secret"]}, "extra looks like a secret"),
    ({"environment": {"A-B": "x"}}, "not a variable's name"),
    ({"environment": {"SLURM_RESTART_COUNT": "x"}}, "belongs to bash or to the job script"),
    ({"environment": {"N": 5}}, "put it in quotes"),
    ({"environment": {"MLFLOW_TRACKING_URI": "https://x"}}, "tracking_uri in [mlflow]"),
    ({"mlflow.tracking_uri": "https://me:very_secret@host"}, "MLFLOW_TRACKING_PASSWORD"),
    ({"mlflow.tracking_uri": "postgresql://host/db?password=very_secret"}, "PGPASSWORD"),
    ({"mlflow.tracking_uri": "sqlite:///mlflow.db"}, "sqlite:////ABSOLUTE/PATH"),
    (PYXIS | {"container.python": "a b"}, "'container.python': 'a b'"),
    ({"setup.lines": ["true\nfalse"]}, "more than one line"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_mistakes_are_told_in_one_line_with_file_and_key(tmp_path, changes, message):
    with pytest.raises(UserError) as failure:
        loaded(tmp_path, changes)
    line = str(failure.value)
    assert message in line
    assert line.startswith(f"{tmp_path / 'site.toml'}: ")
    assert "\n" not in line
    assert "very_secret" not in line


def test_names_that_only_look_like_secrets_are_taken(tmp_path):
    names = ("TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "PGPASSFILE", "MAX_TOKENS_PATH", "MONKEY")
    lines = ["export HF_TOKEN=$(cat ~/.token)", "MONKEY=1", "source /opt/keys.sh"]
    lines += ["pip install hf_transfer"]
    site = loaded(tmp_path, {"environment": dict.fromkeys(names, "x"), "setup.lines": lines})
    assert site.environment.keys() == set(names)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("time = 24:00:00", "need quotes"),
        (MINIMAL.replace('"24:00:00"', "12:00:00"), 'put it in quotes: "12:00:00"'),
        ("\xff", "not TOML"),
        ("number = " + "9" * 5000, "not TOML: Exceeds the limit (4300 digits)"),
        ("deep = " + "[" * 100_000, "not TOML: it is nested too deeply"),
    ],
)
def test_what_is_no_toml(tmp_path, content, message):
    (tmp_path / "site.toml").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=re.escape(message)):
        load_site(tmp_path / "site.toml")


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "site.toml").write_text(MINIMAL, encoding="utf-8-sig")
    marked = load_site(tmp_path / "site.toml")
    (tmp_path / "site.toml").write_text(MINIMAL)
    assert marked == load_site(tmp_path / "site.toml")


def string_keys(model: type, prefix: str = "") -> set[str]:
    """Dotted names of all fields of a model, and of the models in it, whose schema holds text."""
    names, schema = set(), model.model_json_schema()  # type: ignore[attr-defined]

    def walk(node: dict[str, Any], name: str) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if "properties" in node:
            for key, inner in node["properties"].items():
                walk(inner, f"{name}.{key}" if name else key)
        elif node.get("type") == "string" or "enum" in node:
            names.add(name)
        for inner in (*node.get("anyOf", ()), node.get("items"), node.get("additionalProperties")):
            walk(inner, name) if isinstance(inner, dict) else None

    walk(schema, prefix)
    return names


def test_no_key_with_text_is_left_out_of_the_hostile_test():
    def one_of_a_kind(keys: Iterable[str]) -> set[str]:
        return {re.sub(r"^resources\.\w+\.(?!mem|time)", "slurm.", key) for key in keys}

    tables = {re.sub(r"^resources\.\w+\.", "resources.train.", key) for key in string_keys(Site)}
    assert one_of_a_kind(tables) == one_of_a_kind(TEXTS)


def accepted(tmp_path: Path, changes: dict[str, Any]) -> Site | None:
    try:
        return loaded(tmp_path, changes)
    except UserError:
        return None


@pytest.mark.parametrize("key", TEXTS)
def test_hostile_text_is_refused_or_literal_and_never_runs(tmp_path, key):
    evil, out, taken = tmp_path / "evil", tmp_path / "out", set()
    stub = write_program(tmp_path / "python", f'#!/bin/bash\nprintf %s "${{NAME-}}" >{out}\n')
    paths = PYXIS | {"root": str(tmp_path), "python": str(stub), "project": str(tmp_path)}
    texts = {hostile.format(evil=evil) for hostile in HOSTILE}
    for text in texts:
        value: Any = text
        if isinstance(TEXTS[key], list | dict):
            value = [text] if isinstance(TEXTS[key], list) else {"NAME": text}
        site = accepted(tmp_path, paths | {key: value})
        if site is None:
            continue
        taken.add(text)
        if key == "environment":
            script = render(JobArray("train", "train", (("a",),)), site, tmp_path / "tiny")
            environment = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"}
            environment |= {"PATH": os.environ["PATH"]}
            subprocess.run(
                ["bash", "-c", script], env=environment, check=True, timeout=HANG_SECONDS
            )
            assert out.read_text() == text
    of_one_line = {text for text in texts if not set(text) & set("\n\r\0")}
    # Variables are quoted, set-up lines are the site's own code; no other key takes any of it.
    assert taken == (of_one_line if key in ("environment", "setup.lines") else set())
    assert not evil.exists()


def test_every_variable_of_bash_is_set_or_refused(tmp_path):
    """Some, such as GROUPS, bash lets nobody set, and says nothing."""
    bare = {"PATH": "/usr/bin:/bin"}
    known = subprocess.run(
        ["bash", "-c", "compgen -v"], capture_output=True, text=True, env=bare
    ).stdout.split()
    taken = {name for name in known if accepted(tmp_path, {"environment": {name: bare["PATH"]}})}
    assert "PATH" in taken
    for name in taken:
        command = f"export {name}={bare['PATH']}; printenv {name}"
        shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=bare)
        assert shown.stdout.strip() == bare["PATH"], name
