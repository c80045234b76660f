"""Variants of attention: a user's own function of score and context, and a library of ready ones.

    import torch, kernelgen

    def score(score, ctx):                        # ctx: batch, head, kv_head, q_index, q_pos, k_pos, q_len, kv_len
        return score + ctx.bias[ctx.head, torch.clamp(ctx.q_pos - ctx.k_pos, 0, 63)]

    mine = kernelgen.variant(score, tensors={"bias": bias})
    out = kernelgen.attention(q, k, v, causal=True, variant=mine)
    out = kernelgen.attention(q, k, v, variant=kernelgen.variants.chunked(8192))

The functions are called once, with stand-ins that record what is computed; see docs/design/variants.md.
"""

from kernelgen.reference.masks import Variant
from kernelgen.variants.arguments import argument_words, bind_words
from kernelgen.variants.library import (
    alibi,
    chunked,
    document_mask,
    no_left_keys,
    prefix_lm,
    relative_bias,
    sigmoid,
    t5_bias,
    window,
)
from kernelgen.variants.make import variant
from kernelgen.variants.trace import trace
from kernelgen.variants.traced import TracedVariant

__all__ = [
    "TracedVariant", "Variant", "alibi", "argument_words", "bind_words", "chunked", "document_mask", "no_left_keys", "prefix_lm",
    "relative_bias", "sigmoid", "t5_bias", "trace", "variant", "window",
]
