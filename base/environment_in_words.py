"""The record of `base.environment` in words, for a terminal or a report."""

from typing import Any

MAIN = ("torch", "megatron-core", "transformer-engine")
TITLES = {"cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL", "driver": "driver"}


def in_words(environment: dict[str, Any]) -> str:
    """Return the versions of an environment's main parts, and of which none of them is its own.

    >>> in_words({
    ...     "packages": {"torch": "2.15.0", "megatron-core": "0.19.2"},
    ...     "cuda": "13.0", "origins": {"torch": "system", "cuda": "system"},
    ...     "container": {"kind": "apptainer", "image": "quantdyn.sif"},
    ... })
    'torch 2.15.0 (system), megatron-core 0.19.2, CUDA 13.0 (system), in apptainer quantdyn.sif'
    """
    packages, origins = environment["packages"], environment["origins"]
    versions = {name: packages[name] for name in MAIN if name in packages}
    versions |= {name: environment[name] for name in TITLES if environment.get(name)}

    words = []
    for name, version in versions.items():
        origin = f" ({origins[name]})" if name in origins else ""
        words.append(f"{TITLES.get(name, name)} {version}{origin}")
    container = environment["container"]
    if container:
        words.append(f"in {_container_in_words(container)}")
    return ", ".join(words)


def _container_in_words(container: dict[str, str]) -> str:
    image = " ".join((container.get("kind", "the image"), container.get("image", ""))).strip()
    if "nvidia_pytorch" in container:
        return f"{image} of NVIDIA's PyTorch {container['nvidia_pytorch']}"
    return image


def differences_in_words(environment: dict[str, Any]) -> str:
    """Return how an environment differs from the lock.

    >>> differences_in_words({"differs_from_tested": {"torch": {"tested": "2.14", "here": "2.15"}}})
    'differs from the tested versions: torch 2.15 here, 2.14 tested'
    """
    differs = environment["differs_from_tested"]
    if differs is None:
        return "not compared with the tested versions: there is no requirements.lock"
    if not differs:
        return "as tested"
    pairs = [
        f"{name} {version['here']} here, {version['tested']} tested"
        for name, version in differs.items()
    ]
    return f"differs from the tested versions: {'; '.join(pairs)}"
