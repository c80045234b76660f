"""kernelgen over several ranks: expert parallelism and context-parallel attention. torch.distributed is the transport.

    import torch.distributed as dist, kernelgen
    dist.init_process_group("nccl")
    out = kernelgen.distributed.moe(x, w13, w2, weights, ids, num_experts=128)      # w13 and w2: this rank's experts
    out = kernelgen.distributed.ring_attention(q, k, v, causal=True)                # this rank's part of the sequence

Every rank of the group must make the same calls in the same order. ``import kernelgen`` does not import this module.
"""

from __future__ import annotations

from kernelgen.distributed.experts import expert_range as expert_range
from kernelgen.distributed.experts import moe as moe
from kernelgen.distributed.ring import ring_attention as ring_attention

context_attention = ring_attention

__all__ = ["context_attention", "expert_range", "moe", "ring_attention"]
