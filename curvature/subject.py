"""The subject of a measurement: a model and a text, loaded, put on the ranks, and guarded.

Sequences are a function of text and seed, the same for every model and any ranks. A model of empty
tensors is put on its ranks first and filled after that, each rank reading its own rows of its own
parameters: no process holds a whole model of which it needs a part.

Shapes: B sequences, S positions of a sequence.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from base.environment import environment
from base.errors import UserError
from base.gpus import NO_COMPILER, has_compiler
from base.ranks import Ranks
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES, read_whole
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.forward import check_shapes, empty_model, names_in_files
from ckpt_tools.hf.model import identify
from curvature.cost.memory import check_loading
from curvature.dual.blocks import curved_family
from curvature.products.exact import DualHessian
from curvature.products.guard import RELATIVE_CHANGE, check_product, difference_product
from curvature.products.model import CurvedModel
from curvature.products.parameters import Parameters, Probe, copy, local
from curvature.products.sharing import Sharing
from curvature.products.sketch import CountSketch
from curvature.settings import ProductSettings, checked_length
from train.data.batches import batch
from train.data.corpus import check_vocabulary, open_corpus

BYTES_AT_ONCE = 1 << 28  # of a file, in memory


class Batches:
    """Packed sequences of a token file in the order of a seed, none of which comes twice.

    Raises:
        UserError: the text is of another vocabulary or too short, or the sequences are too long for
            the model.
    """

    def __init__(
        self,
        prefix: Path,
        config: PretrainedConfig,
        *,
        sequence_length: int | None,
        seed: int,
        needed: int,
    ) -> None:
        self._corpus, self._seed = open_corpus(prefix, verify_hashes=True), seed
        check_vocabulary(self._corpus, config.vocab_size)
        self.sequence_length = length = checked_length(
            config.max_position_embeddings, sequence_length
        )
        available = self._corpus.num_sequences(length)
        if needed > available:
            raise UserError(
                f"{prefix} holds {available} sequences of {length} tokens, {needed} are needed;"
                " give more text, or ask for fewer or shorter sequences"
            )
        self.described: dict[str, Any] = {
            "prefix": str(prefix),
            "bin_sha256": self._corpus.manifest.sha256,
            "sequence_length": length,
        }

    def number(self, index: int, size: int) -> Tensor:
        """Return batch `index` of the order, cut into batches of `size`, int64 [B, S + 1]."""
        tokens_BS1 = batch(
            self._corpus,
            step=index + 1,
            batch_size=size,
            sequence_length=self.sequence_length,
            seed=self._seed,
        )
        return torch.from_numpy(tokens_BS1)


class WeightFiles:
    """The weights of an HF directory, by the names of the model's parameters.

    Raises:
        UserError: keys or shapes are not those of config.json, or a file is damaged.
    """

    def __init__(self, hf_dir: Path, config: PretrainedConfig) -> None:
        self._config, self._weights = config, HFWeights(hf_dir)
        without_content = empty_model(config)
        check_shapes(without_content, self._weights, hf_dir)
        self._files = names_in_files(without_content)

    @torch.no_grad()
    def empty(self, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return the model with its constants, and with parameters to be filled.

        On a CPU these take no memory until something is written to them.
        """
        model = empty_model(self._config, dtype)
        parameters: dict[Tensor, nn.Parameter] = {}  # one for both places of a tied parameter
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight not in parameters:
                    parameters[weight] = nn.Parameter(torch.empty_like(weight, device=device))
                module.register_parameter(name, parameters[weight])
        # Saved constants are those of the files; other buffers were made with the modules.
        for name, constant in model.named_buffers():
            if name in self._files:
                constant.copy_(read_whole(self._weights, self._files[name]).view_as(constant))
        model.to(device)  # type: ignore[arg-type]
        return model

    @torch.no_grad()
    def fill(self, parameters: Parameters) -> None:
        """Read this rank's rows of every parameter."""
        for name, weight in parameters.weights.items():
            row = parameters.first_row(name)
            for rows, file, start in self.pieces(name, local(weight.detach()), row):
                copy(rows, self._weights.read(file, start, start + len(rows)))

    def pieces(self, name: str, weight: Tensor, row: int = 0) -> Iterator[tuple[Tensor, str, int]]:
        """Yield a few rows of a weight at a time, its name in the files, and their first row there.

        `row` is that of the first row of `weight`, which may be a part.
        """
        file = self._files[name]
        rows_at_once = max(1, BYTES_AT_ONCE // self._weights.tensors[file].row_bytes)
        # A scalar is one row in the files.
        for rows in (weight if weight.dim() else weight.view(1)).split(rows_at_once):
            yield rows, file, row
            row += len(rows)


class CurvatureSubject(NamedTuple):
    """The model and the text of a measurement."""

    identity: dict[str, Any]
    settings: ProductSettings
    model: CurvedModel
    hessian: DualHessian
    batches: Batches
    sharing: Sharing
    guard: dict[str, Any]

    def microbatch(self, index: int) -> Tensor:
        """Return microbatch `index`, int64 [B, S + 1]. No sequence is in two of them."""
        return self.batches.number(index, self.settings.microbatch_sequences)

    def fixed(self, sequences: int) -> list[Tensor]:
        """Return the first sequences of the order, in microbatches."""
        together = self.batches.number(0, sequences)
        return list(torch.split(together, self.settings.microbatch_sequences))

    @property
    def entries(self) -> int:
        """Return the entries of a vector over all parameters that this rank holds."""
        return self.hessian.parameters.size // (
            self.sharing.ranks.size if self.settings.sharding == "fsdp" else 1
        )

    def result(
        self, measured: dict[str, Any], more: dict[str, Any], seconds: dict[str, float]
    ) -> dict[str, Any]:
        """Return the content of result.json. `more` is added to the settings."""
        spec = self.settings.model_dump(mode="json") | {
            "route": "dual",
            "data": self.batches.described,
            "sequence_length": self.batches.sequence_length,
            "finite_difference_relative_change": RELATIVE_CHANGE,
            "ranks": self.sharing.ranks.size,
        }
        size = self.hessian.parameters.size
        return {
            "model": self.identity,
            "spec": spec | more,
            "measured": measured | {"parameters": size, "guard": self.guard},
            "environment": environment() | {"seconds": seconds},
        }


def open_model(
    hf_dir: Path, settings: ProductSettings, data_prefix: Path, ranks: Ranks, *, needed: int
) -> CurvatureSubject:
    """Load and shard a model, and check its products.

    `needed` sequences of the text will be read.

    Raises:
        UserError: model, text, settings and ranks do not fit, or the guard refuses.
    """
    sharded = settings.sharding == "fsdp"
    if ranks.rank == 0 and ranks.device.type == "cuda" and not has_compiler():
        print(NO_COMPILER, file=sys.stderr)

    # refuse what does not fit before the weights are loaded
    identity = identify(hf_dir) if ranks.rank == 0 else {}  # which hashes every file
    config = read_config(hf_dir)
    curved_family(config)
    batches = Batches(
        data_prefix,
        config,
        sequence_length=settings.sequence_length,
        seed=settings.seed,
        needed=needed,
    )
    check_loading(config, settings, ranks)

    files = WeightFiles(hf_dir, config)
    # The guard's reference runs HF's code with sdpa, another attention kernel than the formula that
    # the dual layers spell out. FSDP2 takes from the CPU what it shards: there empty tensors take
    # no memory.
    initial_device = torch.device("cpu") if sharded and ranks.size > 1 else ranks.device
    model = CurvedModel(
        files.empty(initial_device),
        ranks=ranks,
        sharding=settings.sharding,
        dtype=DTYPES[settings.dtype],
        checkpointing=settings.checkpointing,
        vectors=torch.device("cpu") if settings.vectors == "host" else None,
    )
    files.fill(model.parameters)

    # the guard: one product against finite differences
    hessian = DualHessian(model)
    first_BS1 = batches.number(0, settings.microbatch_sequences)
    sketch = CountSketch(model.parameters, Probe(settings.seed, 0))
    guard = check_product(
        hessian.sketched(first_BS1, sketch),
        difference_product(model, first_BS1, sketch),
        sketch,
        settings.dtype,
    )
    return CurvatureSubject(
        identity, settings, model, hessian, batches, Sharing(ranks, sharded), guard
    )
