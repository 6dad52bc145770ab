"""A plain loop of torch: transformers' models with a run's initial weights, and torch's AdamW."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, Olmo2Config, Olmo2ForCausalLM

from train.data.batches import Batch
from train.model.config import hf_settings
from train.model.initialization import initial_parameter
from train.run.config import RunConfig


def plain_model(run: RunConfig) -> Olmo2ForCausalLM:
    """The OLMo2 of `make_run`, whose settings are written out."""
    model = Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=run.model.num_hidden_layers,
            num_attention_heads=4,
            num_key_value_heads=run.model.num_key_value_heads,
            max_position_embeddings=32,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            initial = run.scaling_of(name).initial
            weight.copy_(initial_parameter(name, run.model, run.seed, initial))
    return model


def model_of_family(run: RunConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The model of any family, with the settings that its exports have."""
    settings = hf_settings(run.model, run.data.sequence_length, 0)
    config = AutoConfig.for_model(run.model.family, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for name, weight in named_as_in_files(model).items():
            initial = run.scaling_of(name).initial
            weight.copy_(initial_parameter(name, run.model, run.seed, initial))
    return model


def named_as_in_files(model: Any) -> dict[str, Tensor]:
    """The parameters by name: in memory transformers calls gpt_neox's head otherwise."""
    head = "embed_out" if model.config.model_type == "gpt_neox" else "lm_head"
    return {name.replace("lm_head", head): weight for name, weight in model.named_parameters()}


def losses_of_labels(logits_BSV: Tensor, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and squared log-normalizer of every label, [B, S]."""
    labels_BS = tokens_BS[:, 1:]
    losses = cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none")
    return losses.view(labels_BS.shape), logits_BSV.logsumexp(-1).square()


def figures_of(model: Any, logits_BSV: Tensor, batch: Batch) -> dict[str, float]:
    """An engine's figures of a batch with z-loss, after which the weights have their gradients."""
    counted_BS = batch.counted_BS
    losses_BS, squares_BS = losses_of_labels(logits_BSV, batch.tokens_BS)
    ((losses_BS + 1e-5 * squares_BS)[counted_BS].sum() / counted_BS.numel()).backward()
    return {
        "counted_fraction": counted_BS.double().mean().item(),
        "loss": losses_BS[counted_BS].mean().item(),
        "z_loss": 1e-5 * squares_BS[counted_BS].mean().item(),
        "grad_norm": torch.nn.utils.get_total_norm(
            [weight.grad for weight in model.parameters() if weight.grad is not None]
        ).item(),
    }


def differentiate(model: Any, tokens_BS: Tensor, clip: float = 1.0) -> float:
    """Set the clipped gradients of cross-entropy and z-loss; return the former before the update."""
    logits = model(tokens_BS[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten())
    model.zero_grad()
    (loss + 1e-5 * logits.logsumexp(-1).square().mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    return loss.item()


def adamw(
    named: Mapping[str, Tensor], undecayed: tuple[str, ...] = ("embed_tokens",)
) -> torch.optim.AdamW:
    """AdamW with the run's defaults; names with a part among `undecayed` are not decayed."""
    spared = [name for name in named if any(part in name for part in undecayed)]
    decayed = [weight for name, weight in named.items() if name not in spared]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [named[name] for name in spared], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Make one update at a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
