"""The check of a node, run as srun runs it, and what the batch host makes of the reports."""

import json
import subprocess
import sys
import time
from pathlib import Path

from slurm.job import health
from slurm.job.health import check_gpus, check_node, read_reports, write_clock
from tests.runs import PROJECT, execute, write_program


def checked(out_dir: Path, node: str) -> subprocess.CompletedProcess:
    """One node's check in a process of its own."""
    command = [sys.executable, "-m", "slurm.job.health", str(out_dir)]
    return execute(command, variables={"SLURMD_NODENAME": node})


def test_fit_nodes_leave_a_report_of_figures_and_limits(tmp_path):
    write_clock(tmp_path)
    for node in ("node1", "node2"):
        assert checked(tmp_path, node).stdout == f"{node}: healthy\n"
    assert read_reports(tmp_path, ["node1", "node2"]) == {}
    assert json.loads((tmp_path / "node1.json").read_text())["reasons"] == []
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".clock.json", "node1.json", "node2.json"}


def test_every_reason_of_a_bad_node_is_named_and_the_check_itself_ends_well(tmp_path):
    write_clock(tmp_path)
    (tmp_path / ".clock.json").write_text(json.dumps({"time": time.time() + 3600}))
    ended = checked(tmp_path, "node1")
    assert ended.returncode == 0
    reason = read_reports(tmp_path, ["node1"])["node1"]
    assert reason in ended.stdout
    assert "clock behind the batch host's by 3" in reason


def test_memory_and_a_slow_filesystem_are_named(tmp_path, monkeypatch):
    write_clock(tmp_path)
    monkeypatch.setattr(health, "MEMORY_GB", 1e9)
    monkeypatch.setattr(health, "WRITE_SECONDS", 0.0)
    slow, memory = check_node(tmp_path, "node1", gpus=0)
    assert slow.startswith("1 MiB was written, synced and read in ")
    assert memory.startswith("free memory ")
    assert [path.name for path in tmp_path.iterdir()] == [".clock.json"]


def test_a_clock_ahead_is_seen_from_the_batch_host(tmp_path, monkeypatch):
    write_clock(tmp_path)
    checked(tmp_path, "node1")
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 60)  # the batch host's, behind the node's
    assert "clock ahead" in read_reports(tmp_path, ["node1"])["node1"]


def test_nodes_without_a_report_of_this_start_are_bad(tmp_path):
    write_clock(tmp_path)
    checked(tmp_path, "node1")
    write_clock(tmp_path)
    checked(tmp_path, "node2")
    reasons = read_reports(tmp_path, ["node1", "node2", "node3"])
    assert reasons.keys() == {"node1", "node3"}
    assert "earlier" in reasons["node1"]
    assert "no report" in reasons["node3"]


def test_a_root_that_is_not_the_batch_hosts_is_named(tmp_path):
    """Such as the mount point of a file system that is not mounted."""
    assert "is it really shared" in checked(tmp_path, "node1").stdout
    ended = checked(tmp_path / "missing", "node1")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


def test_gpus_that_are_missing_or_do_not_answer_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(check_gpus(8)) == ["GPUs seen: 0, at least 8 expected (CUDA_VISIBLE_DEVICES=)"]
    message = "Unable to determine the device handle for GPU 3"
    write_program(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{message}'\nexit 15\n")
    assert list(check_gpus(8)) == [f"nvidia-smi -L: {message}"]


def test_without_gpus_no_torch_is_imported():
    """It would take seconds on every node."""
    command = [sys.executable, "-X", "importtime", "-c", f"import {health.__name__}"]
    imported = execute(command, cwd=PROJECT).stderr
    assert "slurm.job.health" in imported
    assert "torch" not in imported
