"""A model read block by block, and blocks taken apart, against transformers' whole model."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from base.errors import UserError
from tests.published import (
    KINDS,
    change_config,
    logits_by_transformers,
    make_published,
)
from tests.quant_eval.models import ARCHITECTURES, make_model, open_model

TOKENS = torch.randint(1, 320, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def directory(request, tiny):
    return tiny(request.param)


@torch.no_grad()
def run(model, block_output):
    """Logits, with every block computed by `block_output`."""
    x, context = model.embedding()(TOKENS), model.context(TOKENS.shape[1])
    for index in range(model.num_blocks):
        x = block_output(model.block(index), x, context)
    return model.head()(x.float())


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # sums in another order


def taken_apart(block, x, context):
    stream, added = block.after_attention(x, block.attended(x, context))
    return block.after_mlp(added, block.gated(stream))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_are_those_of_the_whole_model(directory, dtype):
    """Bit for bit in fp32; in bf16 the blocks' are, whose norm and head are cast here to fp32."""
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    model = open_model(directory, dtype)
    norm = whole.get_submodule(f"{model.family.decoder}.{model.family.final_norm}")
    norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    norm.float()
    whole.set_output_embeddings(copy.deepcopy(whole.get_output_embeddings()).float())  # untied
    with torch.no_grad():
        expected = whole(TOKENS, use_cache=False).logits
    got = run(model, lambda block, x, context: block(x, context))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_directories_of_others_are_read_as_transformers_reads_them(tmp_path, kind):
    """Whatever else is in their files, and beside them."""
    model = open_model(make_published(tmp_path / "model", kind))
    got = run(model, lambda block, x, context: block(x, context))
    close(got, logits_by_transformers(tmp_path / "model", TOKENS))


def test_a_block_taken_apart_is_the_block(directory):
    model = open_model(directory)
    whole = run(model, lambda block, x, context: block(x, context))
    close(run(model, taken_apart), whole)


def test_each_linear_reads_what_it_reads_in_the_whole_model(directory):
    """Hooks on every linear of transformers' model, and on its blocks, see what the blocks taken
    apart give to the quantizer.
    """
    whole = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
    model, seen = open_model(directory), dict[str, torch.Tensor]()
    prefix = f"{model.family.decoder}.layers."
    for name, part in whole.named_modules():
        if name.startswith(prefix) and isinstance(part, nn.Linear):
            part.register_forward_pre_hook(
                lambda _, given, name=name: seen.update({name: given[0]})
            )
    with torch.no_grad():
        states = whole(TOKENS, use_cache=False, output_hidden_states=True).hidden_states
        expected, context = dict(seen), model.context(TOKENS.shape[1])
        x = model.embedding()(TOKENS)
        for index in range(model.num_blocks):
            assert torch.equal(x, states[index])
            block = model.block(index)
            attended = block.attended(x, context)
            stream, _ = block.after_attention(x, attended)
            reads = (block.attention_input(x), attended, block.mlp_input(stream))
            inputs = (*reads, block.gated(stream))
            for group, given in zip(block.linears(), inputs, strict=True):
                for name, linear in group.items():
                    close(given, expected.pop(name))
                    assert torch.equal(linear.weight, whole.get_submodule(name).weight)
                    own, theirs = linear.bias, whole.get_submodule(name).bias
                    assert (own is None and theirs is None) or torch.equal(own, theirs)
            x = block(x, context)
    assert seen
    assert not expected  # no linear of the blocks is in no group


def test_unknown_architectures_and_kinds_of_layers_are_refused(tmp_path):
    directory = make_model(tmp_path / "model", "smollm3")
    change_config(directory, layer_types=["sliding_attention"] * 3)
    with pytest.raises(UserError, match="layers of sliding_attention but no sliding_window"):
        open_model(directory)
    change_config(directory, layer_types=["chunked_attention"] * 3)
    with pytest.raises(UserError, match="smollm3 with chunked_attention is not supported"):
        open_model(directory)
    change_config(directory, model_type="gpt2")
    with pytest.raises(UserError, match="one of olmo2"):
        open_model(directory)
    windowed = make_model(tmp_path / "llama", "llama", sliding_window=32)
    with pytest.raises(UserError, match="llama with sliding_attention is not supported"):
        open_model(windowed)
