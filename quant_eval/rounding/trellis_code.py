"""Trellis codes of sequences of numbers: QTIP's tail-biting bitshift trellis, computed values.

A sequence of T numbers is a circular string of T k bits, k for each number. Number t is a function,
the code, of the window of L bits that ends with its own k bits. Neighbouring windows, the states of
a walk, share L - k bits, their overlap. A Viterbi search finds the walk whose numbers are nearest
to given ones (Tseng et al. 2024, arXiv:2406.11235, sections 2.2 and 3). `trellis.qtip` calls it.

Shapes: N sequences, T numbers of a sequence, S sequences of a batch, V = 2^(L - k) overlaps. A
    state is split into its oldest k bits (K = 2^k), those between (U = 2^(L - 2k)), its newest k
    bits (K). C bytes of a string.
"""

import math

import torch
from torch import Tensor

# The cost of every state of a batch of sequences fits the cache of one core, or of a GPU.
CPU_COSTS, GPU_COSTS = 1 << 18, 1 << 22


class Trellis:
    """The walks over 2^L states with k new bits a step.

    Attributes:
        bits: k.
        values: of all states, fp32 [2^L].

    Example: 16 numbers of 2 bits in 4 bytes; numbers that are a walk keep their string.
        >>> trellis = Trellis(bits=2, log_states=8, device=torch.device("cpu"))
        >>> codes_NC = torch.tensor([[27, 228, 3, 77]], dtype=torch.uint8)
        >>> trellis.encode(trellis.decode(codes_NC)).tolist()
        [[27, 228, 3, 77]]
    """

    def __init__(self, bits: int, log_states: int, device: torch.device) -> None:
        """States have 2k bits or more: fewer would share none with the next but one."""
        assert log_states >= 2 * bits
        self.bits, self._log_states = bits, log_states
        self.values = computed_values(log_states).to(device)
        self._room = torch.empty(0, device=device)  # kept: new pages take longer than the search

    @torch.no_grad()
    def encode(self, numbers_NT: Tensor) -> Tensor:
        """Return the strings of the walks nearest to fp32 sequences, uint8 [N, T k / 8].

        Tail-biting by two searches (arXiv:2406.11235, algorithm 4): one over the sequence rotated
        by T / 2, free at both ends, gives the overlap of the last and the first state; the second,
        over the sequence itself, starts and ends with it.
        """
        middle = numbers_NT.shape[1] // 2
        costs = CPU_COSTS if numbers_NT.device.type == "cpu" else GPU_COSTS
        batches = -(-len(numbers_NT) // max(1, costs >> self._log_states))
        strings = []
        for part_ST in numbers_NT.tensor_split(batches):
            numbers_TS = part_ST.T.contiguous()
            # Rotated, number 0 is in the middle, far from both free ends. Its state without the
            # newest k bits is the overlap with the state before it, the last one of the circle.
            rotated_TS = self.walk(numbers_TS.roll(middle, 0), start=middle)
            states_TS = self.walk(numbers_TS, rotated_TS[0] >> self.bits)
            strings.append(pack(states_TS.T & (2**self.bits - 1), self.bits))
        return torch.cat(strings)

    def decode(self, codes_NC: Tensor) -> Tensor:
        """Return the numbers of strings, fp32 [N, T]."""
        symbols_NT = unpack(codes_NC, self.bits)
        states_NT = torch.zeros_like(symbols_NT)
        for back in range(-(-self._log_states // self.bits)):
            # The window of number t: its own bits are the lowest, those before it higher.
            states_NT += symbols_NT.roll(back, 1) << back * self.bits
        # L need not be a multiple of k: the oldest symbol is cut to the bits that the window has.
        return self.values[states_NT & (2**self._log_states - 1)]

    def walk(self, numbers_TS: Tensor, overlap_S: Tensor | None = None, start: int = 0) -> Tensor:
        """Return the states of the walks nearest to fp32 numbers: Viterbi's search.

        Args:
            numbers_TS: one sequence per column.
            overlap_S: the bits that the first state shares with one before it, and the last with
                one after it; None: any.
            start: the first number whose state is returned.

        Returns:
            int64 [T - start, S].
        """
        costs_TVS = self._costs(numbers_TS, overlap_S)
        if overlap_S is None:
            overlap_S = costs_TVS[-1].argmin(0)
        size, shared = len(overlap_S), self._log_states - self.bits
        costs_TKX = costs_TVS[:-1].view(len(numbers_TS), 2**self.bits, -1)
        square_KV, value_KV = (side.view(2**self.bits, -1) for side in self._sides())
        position_S = torch.arange(size, device=overlap_S.device)
        states = []

        # backwards: the best of the 2^k states that lead to the overlap
        steps = zip(costs_TKX[start:], -2 * numbers_TS[start:], strict=True)
        for before_KX, factor_S in reversed(list(steps)):
            # The overlap before is oldest 2^(L - 2k) + (overlap >> k): a row and, flattened with
            # the sequence, a column of `before_KX`.
            before_S = torch.add(position_S, overlap_S >> self.bits, alpha=size)
            cost_KS = torch.addcmul(
                square_KV.index_select(1, overlap_S),
                value_KV.index_select(1, overlap_S),
                factor_S,
            )
            oldest_S = cost_KS.add_(before_KX.index_select(1, before_S)).argmin(0)
            # A state is its oldest k bits, then the overlap with the state after it.
            states.append(torch.add(overlap_S, oldest_S, alpha=2**shared))
            overlap_S = states[-1] >> self.bits
        return torch.stack(states).flip(0)

    def _costs(self, numbers_TS: Tensor, overlap_S: Tensor | None) -> Tensor:
        """Return the least cost of the first t numbers of a walk that ends with an overlap.

        The cost of a number x and a state of value c is c^2 - 2 c x, the squared error but for x^2.
        The costs of states are not stored: `walk` computes the few again that it compares.

        Returns:
            fp32 [T + 1, V, S], for t = 0 to T.
        """
        (length, size), symbols = numbers_TS.shape, 2**self.bits
        shape = (length + 1, len(self.values) // symbols, size)
        if self._room.numel() < math.prod(shape):
            self._room = numbers_TS.new_empty(math.prod(shape))
        costs_TVS = self._room[: math.prod(shape)].view(shape)
        costs_TVS[0] = 0.0
        if overlap_S is not None:
            # All other beginnings are forbidden.
            costs_TVS[0] = torch.inf
            costs_TVS[0].scatter_(0, overlap_S[None], 0.0)

        # [oldest bits, newest, those between and sequences]: long runs, however few the sequences
        sides = [
            side.view(symbols, -1, symbols).transpose(1, 2).flatten() for side in self._sides()
        ]
        sides_X2 = torch.stack(sides, 1)
        factors_T2S = torch.stack([torch.ones_like(numbers_TS), -2 * numbers_TS], 1)
        cost_XS = numbers_TS.new_empty(len(self.values), size)
        cost_KKUS = cost_XS.view(symbols, symbols, -1, size)
        least_KUS = torch.empty_like(cost_KKUS[0])
        before = costs_TVS[:-1].view(length, symbols, 1, -1, size)
        after = costs_TVS[1:].view(length, -1, symbols, size).transpose(1, 2)
        for factors_2S, before_KUS, after_KUS in zip(factors_T2S, before, after, strict=True):
            # c^2 x 1 + c x (-2 x), for all states in one product.
            torch.mm(sides_X2, factors_2S, out=cost_XS)
            torch.amin(cost_KKUS.add_(before_KUS), 0, out=least_KUS)
            after_KUS.copy_(least_KUS)
        return costs_TVS

    def _sides(self) -> tuple[Tensor, Tensor]:
        return self.values.square(), self.values


def computed_values(log_states: int) -> Tensor:
    """Return the code 1MAD of all states (arXiv:2406.11235, algorithm 1), fp32 [2^L].

    One multiplication and addition modulo 2^32, and the sum of the four bytes of the result, which
    is nearly normal, to mean 0 and variance 1. Integers all the way, so it is the same everywhere.

    Example: of state 0, 76625530 has the bytes 4, 145, 54 and 122: (325 - 510) / 147.8.
        >>> values = computed_values(12)
        >>> round(float(values[0]), 4), round(float(values.std()), 1)
        (-1.2517, 1.0)
    """
    words = (torch.arange(2**log_states) * 34038481 + 76625530) & 0xFFFFFFFF
    bytes_4X = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)])
    deviation = math.sqrt((256**2 - 1) / 12 * 4)  # of the sum of four bytes
    return ((bytes_4X.sum(0) - 510).double() / deviation).float()


def pack(symbols_NT: Tensor, bits: int) -> Tensor:
    """Return symbols of `bits` bits as strings, the highest bit first, uint8 [N, T bits / 8].

    Example: 01 10 11 00.
        >>> pack(torch.tensor([[1, 2, 3, 0]]), bits=2).tolist()
        [[108]]
    """
    shifts = torch.arange(bits, device=symbols_NT.device).flip(0)
    bits_NC8 = (symbols_NT[..., None] >> shifts & 1).reshape(len(symbols_NT), -1, 8)
    places = torch.arange(8, device=symbols_NT.device).flip(0)
    return (bits_NC8 << places).sum(-1).to(torch.uint8)


def unpack(codes_NC: Tensor, bits: int) -> Tensor:
    """Return the symbols of strings, int64 [N, T]; the inverse of `pack`.

    Example:
        >>> unpack(torch.tensor([[108]], dtype=torch.uint8), bits=2).tolist()
        [[1, 2, 3, 0]]
    """
    shifts = torch.arange(8, device=codes_NC.device).flip(0)
    bits_NTK = (codes_NC.long()[..., None] >> shifts & 1).reshape(len(codes_NC), -1, bits)
    return (bits_NTK << torch.arange(bits, device=codes_NC.device).flip(0)).sum(-1)
