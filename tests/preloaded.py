"""Imports of a fork server of tests, made before it forks: what most commands import.

Of the project all but `__main__` modules, which a command runs itself, and `train.megatron`, which
puts functions of its own in the place of torch's.
"""

import gc
import importlib
import os
import subprocess
import sys
import warnings
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

from base.cli import quick_imports

IMPORTED = (
    "compressed_tensors",
    "matplotlib.backends.backend_pdf",
    "mlflow.store.tracking.sqlalchemy_store",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.tensor.experimental",  # by megatron-core, as are the next two
    "torch.nn.attention.varlen",
    "torch.utils.cpp_extension",
    "transformers.models.auto.modeling_auto",
    "transformers.models.olmo2.modeling_olmo2",
    "ckpt_tools.averaging",
    "ckpt_tools.export",
    "ckpt_tools.released.download",
    "curvature.measurement",
    "quant_eval.measuring.measurement",
    "quant_eval.tasks.scoring",
    "slurm.job.element",
    "study.report.report",
    "study.results.collect",
    "study.tracking.importer",
    "train.data.prepare",
    "train.loop",
)

BUNDLE = "import vl_convert; print(vl_convert.javascript_bundle(), end='')"

# Every report would bundle its JavaScript anew, for seconds. In a process of its own, because a fork
# of one that has started V8 hangs.
bundling = subprocess.Popen([sys.executable, "-c", BUNDLE], stdout=subprocess.PIPE, text=True)

with quick_imports():
    import torch._inductor.compile_fx

    for name in IMPORTED:
        importlib.import_module(name)
    # As train.megatron.cpu does, and with the warnings that it filters. Functions that ask CUDA for
    # anything are called later, when it has put others in their place.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile, compiler = lambda function: function, torch.compile  # type: ignore[assignment,misc]
        import megatron.core  # noqa: F401

        torch.compile = compiler

page: Any = importlib.import_module("study.report.page")
javascript, _ = bundling.communicate()
assert bundling.returncode == 0
page.library = lambda: javascript

# torchrun's agents record the name of the calling function with every event, of which a test reads
# none: to find it takes 0.2 s, in which all sources on the stack are looked up.
rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
rendezvous.get_method_name = lambda depth=2: ""

gc.freeze()  # a collection in a fork would copy every page of what is imported here
