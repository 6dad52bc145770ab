"""The stand-in against torch's FakeTensorMode, which knows CUDA's rules but no values."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.rehearsal.stand_in import GPU, CapturedError, OnGPU, gpu

# operations of a tensor [4, 4] on the GPU and of one on the CPU
MIXES = {
    "add": lambda there, here: there + here,
    "add a number": lambda there, here: there + here[0, 0],
    "add to a number": lambda there, here: here[0, 0] + there,
    "add in place": lambda there, here: there.add_(here),
    "add in place to the other": lambda there, here: here.add_(there),
    "multiply matrices": lambda there, here: there @ here,
    "linear": lambda there, here: F.linear(there, here),
    "where": lambda there, here: torch.where(here > 0, there, 0.0),
    "masked_fill": lambda there, here: there.masked_fill(here > 0, 0.0),
    "concatenate": lambda there, here: torch.cat([there, here]),
    "stack": lambda there, here: torch.stack([there, here]),
    "gather": lambda there, here: there.gather(1, here.long()),
    "embedding": lambda there, here: F.embedding(here.long(), there),
    "softmax and add": lambda there, here: there.softmax(-1) + here.softmax(-1),
    "copy to the other": lambda there, here: here.copy_(there),
    "index_select": lambda there, here: there.index_select(0, here[0].long()),
    "index_copy": lambda there, here: there.index_copy(0, torch.arange(4, device=GPU), here),
    "index_add": lambda there, here: here.index_add(0, torch.arange(4), there),
    "move and add": lambda there, here: there + here.to(GPU),
    "move back and add": lambda there, here: there.cpu() + here,
    "one like it": lambda there, here: torch.zeros_like(there) + here,
    "a new one": lambda there, here: there.new_zeros(4, 4) + here,
    "one of its device": lambda there, here: torch.ones(4, device=there.device) * there,
}
# what FakeTensorMode cannot say without CUDA, and whether it is refused: copies cross, as do
# indices to the GPU
UNLINKED = {
    "copy": (lambda there, here: there.copy_(here), False),
    "set rows": (lambda there, here: there.__setitem__(slice(2), here[:2]), False),
    "index": (lambda there, here: there[here[0].long()], False),
    "index the other": (lambda there, here: here[there[0].long()], True),
}


def refused(mix) -> bool:
    """Return whether the operation is refused, on tensors that the mode that is active makes."""
    there, here = torch.zeros(4, 4, device=GPU), torch.zeros(4, 4)
    try:
        mix(there, here)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("name", MIXES)
def test_it_refuses_what_torch_says_that_cuda_refuses(name):
    with gpu():
        refusal = refused(MIXES[name])
    with FakeTensorMode():
        expected = refused(MIXES[name])
    assert refusal == expected


@pytest.mark.parametrize("name", UNLINKED)
def test_it_refuses_what_cuda_refuses_where_torch_cannot_say(name):
    mix, expected = UNLINKED[name]
    with gpu():
        assert refused(mix) == expected


def test_the_mixes_are_of_both_kinds():
    with gpu():
        refusals = [refused(mix) for mix in MIXES.values()]
    assert sum(refusals) >= 8
    assert len(refusals) - sum(refusals) >= 6


def test_a_gradient_is_that_of_the_cpu():
    def gradient(device: torch.device) -> list[float]:
        x = torch.linspace(-1, 1, 12).view(3, 4).to(device).requires_grad_()
        (x.softmax(-1) @ x.T).square().sum().backward()
        assert x.grad is not None
        assert x.grad.device == device
        return x.grad.flatten().tolist()

    with gpu():
        assert gradient(GPU) == gradient(torch.device("cpu"))


def test_what_was_moved_is_a_copy_and_a_view_is_none():
    with gpu():
        here = torch.zeros(4)
        there = here.to(GPU)
        there[1:3].add_(1)
        assert isinstance(there, OnGPU)
        assert there.tolist() == [0, 1, 1, 0]
        assert here.tolist() == [0, 0, 0, 0]


def test_values_do_not_leave_it_unasked():
    with gpu():
        there = torch.ones(2, device=GPU)
        assert type(there.cpu()) is Tensor
        assert float(there.sum()) == 2
        with pytest.raises((RuntimeError, TypeError)):
            there.numpy()


def test_a_graph_computes_when_it_is_replayed_and_on_the_values_of_then():
    with gpu():
        x, twice = torch.ones(2, device=GPU), torch.zeros(2, device=GPU)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mul(x, 2, out=twice)
            x.add_(1)
        assert (x.tolist(), twice.tolist()) == ([1, 1], [0, 0])
        graph.replay()
        assert (x.tolist(), twice.tolist()) == ([2, 2], [2, 2])
        x.fill_(5)
        graph.replay()
        assert (x.tolist(), twice.tolist()) == ([6, 6], [10, 10])


def test_a_graph_computes_new_tensors_and_gradients_again():
    with gpu():
        x = torch.ones(3, device=GPU)
        weight = torch.full((3,), 2.0, device=GPU, requires_grad=True)
        total = torch.zeros(3, device=GPU)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            zeros = torch.zeros(3, device=GPU)
            loss = (zeros.add_(x) * weight.square()).sum()
            loss.backward()
            assert weight.grad is not None
            total.add_(weight.grad)
        assert total.tolist() == [0, 0, 0]
        for factor in (1, 5):
            x.fill_(factor)
            graph.replay()
            assert float(loss.detach()) == 12 * factor
        assert total.tolist() == [24, 24, 24]  # 4 x, of both


@pytest.mark.parametrize(
    "waits", [lambda x: x.sum().item(), lambda x: x.add_(torch.ones(2).to(GPU))]
)
def test_a_graph_that_waits_for_the_host_is_refused(waits):
    with gpu():
        x = torch.ones(2, device=GPU)
        with pytest.raises(CapturedError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            waits(x)
