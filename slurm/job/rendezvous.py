"""The rendezvous of a training over several nodes: torchrun on each, at a port that is free.

`python -m slurm.job.rendezvous HEAD ADDRESS TORCHRUN_ARGUMENT...` is what srun starts on every
node. It tells torchrun what differs from node to node: the node's own address, and which of them
keeps the rendezvous. torchrun would take the full name of the host for the address, which compute
nodes often cannot resolve, and would guess the keeper by comparing names.
"""

import os
import socket
import sys


def free_port() -> int:
    """Return a port of this node that nobody has; another one at every call."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def torchrun_of_nodes(address: str, nodes: int, ranks: int, start: str) -> tuple[str, ...]:
    """Return the words that start a program on ranks of every node; called on the first node.

    Args:
        address: of a node, with "{node}" for its name.
        nodes: of the job.
        ranks: on each.
        start: of the element.
    """
    head, port = os.environ["SLURMD_NODENAME"], free_port()
    endpoint = f"{address.replace('{node}', head)}:{port}"
    return (
        *("{python}", "-m", "slurm.job.rendezvous", head, address),
        *("--nnodes", str(nodes), "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-id", f"{start}.{port}", "--rdzv-endpoint", endpoint),
    )


def main() -> None:
    """Become torchrun."""
    head, address, *arguments = sys.argv[1:]
    node = os.environ["SLURMD_NODENAME"]
    own = ["--local-addr", address.replace("{node}", node)]
    own += ["--rdzv-conf", f"is_host={str(node == head).lower()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *own, *arguments]
    os.execv(command[0], command)  # noqa: S606  signals of srun are torchrun's


if __name__ == "__main__":
    main()
