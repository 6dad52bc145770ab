"""`-m tests.curvature.architectures.on_ranks OUT NAME...`: sharded products of variants."""

import json
import sys
from pathlib import Path
from typing import Any

from base.ranks import Ranks, start
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel, Sharding
from curvature.products.parameters import Probe
from tests.curvature.architectures.variants import VARIANTS
from tests.curvature.conftest import dots_of, random_tokens, tiny_model


def products(names: list[str], ranks: Ranks, sharding: Sharding) -> dict[str, Any]:
    """Loss, slope and v_t'(Hv)_t of every tensor, streamed and of the whole product, by variant."""
    results: dict[str, Any] = {}
    for name in names:
        hessian = DualHessian(
            CurvedModel(tiny_model(**VARIANTS[name]), ranks=ranks, sharding=sharding)
        )
        tokens_BS1, v_p = random_tokens(batch=3), hessian.parameters.probe(Probe(0, 0))
        quadratic, product = hessian.quadratic(tokens_BS1, v_p), hessian.product(tokens_BS1, v_p)
        dots = {"streamed": quadratic.dots, "whole": dots_of(hessian.parameters, v_p, product.hv_p)}
        results[name] = {"loss": quadratic.loss, "slope": quadratic.slope, "dots": dots}
    return results


if __name__ == "__main__":
    started = start("cpu")
    out, *chosen = sys.argv[1:]
    (Path(out) / f"{started.rank}.json").write_text(json.dumps(products(chosen, started, "fsdp")))
