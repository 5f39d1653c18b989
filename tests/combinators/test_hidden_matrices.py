"""Which parameters of real models are matrices of hidden layers."""

import re

import pytest
import torch

import functional_optim as fo
from functional_optim.combinators.hidden_matrices import is_hidden_matrix


def by_library(text):
    """Names after the name of a library, which begins a line."""
    return {x[0]: x[1].split() for x in re.findall(r"^(\w+):((?:.|\n )*)", text, re.MULTILINE)}


HIDDEN = by_library("""
nanoGPT: transformer.h.0.attn.c_attn.weight transformer.h.11.attn.c_proj.weight
    transformer.h.0.mlp.c_fc.weight
torchtitan: layers.0.attention.wq.weight layers.0.attention.wo.weight
    layers.31.feed_forward.w2.weight layers.3.moe.shared_experts.w1.weight
    layers.3.moe.router.gate.weight
transformers: model.layers.0.self_attn.q_proj.weight model.layers.0.mlp.down_proj.weight
    bert.encoder.layer.0.attention.output.dense.weight bert.encoder.layer.0.output.dense.weight
    encoder.block.0.layer.0.SelfAttention.q.weight model.decoder.layers.0.fc1.weight
    gpt_neox.layers.0.attention.query_key_value.weight
timm: blocks.0.attn.qkv.weight blocks.0.mlp.fc2.weight blocks.0.mlp_tokens.fc1.weight
    stages.0.blocks.0.mlp.fc1.weight
torch: encoder.layers.0.self_attn.in_proj_weight decoder.layers.0.multihead_attn.in_proj_weight
    decoder.layers.0.multihead_attn.out_proj.weight decoder.layers.0.linear1.weight rnn.weight_ih_l0
    0.weight
torchvision: conv1.weight layer1.0.conv2.weight layer4.0.downsample.0.weight
    encoder.layers.encoder_layer_0.mlp.0.weight features.1.0.block.0.weight
words: layers.3.moe.shared.w1.weight shared.0.weight shared1.weight ensemble.0.weight
    assembly.weight
    layers.0.attn.heads.weight layers.2.out_head.weight blocks.0.output.weight blocks.0.fc.weight
""")
"""Names of matrices in models of several libraries."""

OTHERS = by_library("""
nanoGPT: transformer.wte.weight transformer.wpe.weight lm_head.weight
torchtitan: tok_embeddings.weight output.weight
transformers: model.embed_tokens.weight bert.embeddings.word_embeddings.weight
    bert.embeddings.token_type_embeddings.weight cls.predictions.decoder.weight classifier.weight
    model.classifier.dense.weight score.weight qa_outputs.weight lm_head.weight
    gpt_neox.embed_in.weight embed_out.weight
    encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight shared.weight
    model.shared.weight
peft: base_model.model.classifier.modules_to_save.default.weight
    base_model.model.score.modules_to_save.default.weight
timm: patch_embed.proj.weight pos_embed cls_token register_tokens head.weight head.fc.weight
torchvision: fc.weight classifier.6.weight heads.head.weight encoder.pos_embedding
    features.1.0.attn.relative_position_bias_table
wrapped: module.fc.weight _orig_mod.output.weight model.model.head.weight net.lm_head.weight
    model.mlm_head.decoder.weight
words: token.weight position.weight rel_pos_emb.weight layers.0.norm1.weight
""")
"""Names of other parameters."""


@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 3, 3)])
@pytest.mark.parametrize("library", sorted({*HIDDEN, *OTHERS}))
def test_hidden_matrices_are_told_by_their_names(library, shape):
    leaf = torch.empty(shape, device="meta")
    hidden, others = HIDDEN.get(library, []), OTHERS.get(library, [])
    assert [path for path in hidden if not is_hidden_matrix(path, leaf)] == []
    assert [path for path in others if is_hidden_matrix(path, leaf)] == []


@pytest.mark.parametrize("shape", [(), (8,), (1, 8), (8, 1), (8, 1, 1), (1, 1, 8), (0, 1)])
def test_no_parameter_with_one_long_dimension_is_a_matrix(shape):
    assert not is_hidden_matrix("layers.0.up.weight", torch.empty(shape, device="meta"))


def tree(**more):
    names = ("up.weight", "down.weight", "head.weight")
    return {name: torch.ones(4, 4) for name in names} | {"up.bias": torch.ones(4)} | more


def trained_by_muon(params=None, **claims):
    params = tree() if params is None else params
    state = fo.muon_adamw(**claims).init(params)
    return {path for path, x in state.slots["momentum_buffer"].items() if x is not None}


def test_claims_come_before_names():
    assert trained_by_muon() == {"up.weight", "down.weight"}
    assert trained_by_muon(muon="head") == {"up.weight", "down.weight", "head.weight"}
    assert trained_by_muon(adamw=["up.*"]) == {"down.weight"}
    assert trained_by_muon(muon=("head.weight",), adamw="up") == {"down.weight", "head.weight"}
    assert trained_by_muon(muon="up") == {"up.weight", "down.weight"}  # of a branch its matrices


def test_views_may_be_a_compiled_model():
    """Which has no length."""
    assert fo.muon_adamw(views=torch.compile(torch.nn.Linear(2, 2)))
