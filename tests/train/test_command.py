"""The exit code 2 of a refusal amid collectives."""

import subprocess

from tests.interpreter import interpreter
from tests.runs import environment, error_line, execute

REFUSED_IN_A_COLLECTIVE = """
import sys
import torch, typer
import torch.distributed as dist
from base.cli import run_command
from base.errors import UserError

rank, store = int(sys.argv.pop(1)), sys.argv.pop(1)
app = typer.Typer()
slow_to_free = [[] for _ in range(3_000_000)]  # the interpreter takes its time to go down

@app.command()
def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.barrier()
    tensors = [torch.zeros(20_000) for _ in range(300)]
    if rank == 1:
        [dist.all_reduce(tensor) for tensor in tensors]
        return
    while tensors:  # the last reference is the gloo thread's
        tensor = tensors.pop()
        tensor.held_by_python = True
        dist.all_reduce(tensor, async_op=True)
    del tensor
    raise UserError("refused")

run_command(app, "example")
"""


def test_a_refusal_beside_running_collectives_ends_with_exit_code_2(tmp_path):
    command = [interpreter(), "-c", REFUSED_IN_A_COLLECTIVE]
    store = str(tmp_path / "store")
    other = subprocess.Popen([*command, "1", store], env=environment(), stderr=subprocess.DEVNULL)
    try:
        assert error_line(execute([*command, "0", store])) == "error: refused"
    finally:
        other.kill()
        other.wait()
