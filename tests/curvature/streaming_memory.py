"""`python -m tests.curvature.streaming_memory`: what a product takes above the model, as a share
of its parameters.

21 million parameters in 56 matrices and two tokens: next to the gradients, activations are nothing.
"""

import json

import torch

from base.ranks import start
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from tests.curvature.conftest import random_tokens, tiny_model
from tests.curvature.process_memory import grown_by, return_what_is_freed


def main() -> None:
    """Peaks of the quadratic form of a vector, of a probe that is drawn where it is used, and of
    Hv kept whole.
    """
    return_what_is_freed()
    model = tiny_model(
        torch.float32, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, std=0.02
    )
    hessian = DualHessian(CurvedModel(model, ranks=start("cpu")))
    tokens_BS1, probe = random_tokens(1, length=2), Probe(0, 0)
    v_p = hessian.parameters.probe(probe)
    products = {
        "probed": lambda: hessian.probed(tokens_BS1, probe),
        "quadratic": lambda: hessian.quadratic(tokens_BS1, v_p),
        "product": lambda: hessian.product(tokens_BS1, v_p),
    }
    peaks = {}
    for name, product in products.items():
        product()  # what is allocated once and for all is not part of it
        peaks[name] = grown_by(product) / (4 * hessian.parameters.size)
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
