"""The rendezvous of a training over several nodes: torchrun on each, at a port that is free.

`python -m slurm.job.rendezvous TORCHRUN_ARGUMENT...` is what srun starts on every node. The nodes
are known, so the rendezvous is torchrun's static one: each takes its rank from SLURM, and node 0
keeps the store. (In the dynamic one, c10d, all nodes change one record in turns, each with looks at
its own stack: 64 that come at once, on two cores, did not meet in 150 s; here it took 30 s.)
"""

import os
import socket
import sys


def free_port() -> int:
    """Return a free port of this node, a different one at every call."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        # Port 0 lets the kernel choose; once the socket is closed, torchrun can bind it.
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def torchrun_of_nodes(address: str, nodes: int, ranks: int, start: str) -> tuple[str, ...]:
    """Return the words that start a program on ranks of every node; called on the first node.

    "{node}" in the address stands for a node's name.
    """
    head, port = address.replace("{node}", os.environ["SLURMD_NODENAME"]), str(free_port())
    return (
        *("{python}", "-m", "slurm.job.rendezvous"),
        *("--nnodes", str(nodes), "--nproc-per-node", str(ranks)),
        # The port in the id tells the attempts of one start apart.
        *("--master-addr", head, "--master-port", port, "--rdzv-id", f"{start}.{port}"),
    )


def main() -> None:
    """Become torchrun, with the rank that SLURM gave this node."""
    rank = ["--node-rank", os.environ["SLURM_NODEID"]]
    command = [sys.executable, "-m", "torch.distributed.run", *rank, *sys.argv[1:]]
    os.execv(command[0], command)  # noqa: S606  signals of srun are torchrun's


if __name__ == "__main__":
    main()
