"""route and moe: kernelgen beside compositions of torch's operators. A few tokens are bound by the bytes of the experts they touch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import kernelgen
from kernelgen.bench.suites import MOE_SHAPES, MoeCase, RouteCase
from kernelgen.bench.workloads.base import Candidate, Workload, normal
from kernelgen.dtypes import DTYPES
from kernelgen.ops.weights import PackedWeight
from kernelgen.testing.tolerance import Comparison, compare

_SAMPLE_TOKENS = 4  # each is multiplied by its experts in float64


class RouteOperands(NamedTuple):
    logits: torch.Tensor
    bias: torch.Tensor
    out: torch.Tensor


class RouteWorkload(Workload):
    def __init__(self, case: RouteCase, device: str) -> None:
        self.case, self.device, self.problem, self.flops = case, device, str(case), 0.0
        self.traffic = case.tokens * (case.experts * DTYPES[case.dtype].bytes + 8 * case.k)
        self.set_bytes = case.tokens * case.experts * DTYPES[case.dtype].bytes
        self._options: dict[str, Any] = dict(method=case.method)
        if case.method == "deepseek_v3":
            self._options |= dict(num_groups=8, topk_groups=4, scaling=2.5)

    def operands(self, generator: torch.Generator) -> RouteOperands:
        c = self.case
        logits = normal((c.tokens, c.experts), DTYPES[c.dtype].torch, generator)
        return RouteOperands(logits, 0.1 * normal((c.experts,), torch.float32, generator), logits.new_empty(c.tokens, c.k))

    def _arguments(self, o: RouteOperands) -> dict[str, Any]:
        return self._options | (dict(bias=o.bias) if self.case.method == "deepseek_v3" else {})

    def candidates(self) -> list[Candidate]:
        def ours(o: RouteOperands) -> torch.Tensor:
            return kernelgen.route(o.logits, self.case.k, backend="generated", **self._arguments(o))[0]

        return [Candidate("kernelgen", ours, peer=False), Candidate("torch", self._torch)]

    def _torch(self, o: RouteOperands) -> torch.Tensor:
        """As the gates of transformers do it."""
        c, x = self.case, o.logits.float()
        if c.method != "deepseek_v3":
            top = x.topk(c.k, 1)
            return top.values.softmax(1)
        scores = x.sigmoid()
        biased = scores + o.bias
        groups = biased.view(c.tokens, 8, -1).topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(groups).scatter_(1, groups.topk(4, 1).indices, 1).bool().repeat_interleave(c.experts // 8, 1)
        chosen = biased.masked_fill(~kept, -torch.inf).topk(c.k, 1).indices
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(1, keepdim=True) + 1e-20) * 2.5

    def check(self, operands: RouteOperands, result: torch.Tensor) -> Comparison:
        from kernelgen import reference

        o = RouteOperands(operands.logits[-512:], operands.bias, operands.out)
        exact, plain = (reference.route(o.logits, self.case.k, compute_dtype=d, **self._arguments(o))[0]
                        for d in (torch.float64, torch.float32))
        # Weights best first: two experts that change places have equal ones.
        return compare(result[-512:].sort(1).values, exact.sort(1).values, plain.sort(1).values, what=self.problem)

    def decision(self, operands: RouteOperands) -> Any:
        return kernelgen.explain("route", operands.logits, self.case.k, backend="generated", **self._arguments(operands))


class MoeOperands(NamedTuple):
    """w13 and w2 may be packed. Scales and biases are empty where there are none."""

    x: torch.Tensor
    w13: Any
    w2: Any
    weights: torch.Tensor
    ids: torch.Tensor
    scale13: torch.Tensor
    scale2: torch.Tensor
    bias13: torch.Tensor
    bias2: torch.Tensor
    out: torch.Tensor


def _packed(w: torch.Tensor) -> PackedWeight:
    """One expert after the other: packing works in float64."""
    parts = [kernelgen.pack_weight(e, "mxfp4") for e in w]
    return PackedWeight("mxfp4", tuple(w.shape), 32, torch.stack([p.codes for p in parts]), torch.stack([p.scale for p in parts]))


class MoeWorkload(Workload):
    def __init__(self, case: MoeCase, device: str) -> None:
        self.case, self.device, self.problem = case, device, str(case)
        s = self.shape = MOE_SHAPES[case.model]
        self.flops = 6.0 * case.tokens * s.k * s.hidden * s.inner
        element = {"bf16": 2.0, "fp8-block": 1 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32}[case.recipe]
        touched = s.experts * (1 - (1 - s.k / s.experts) ** case.tokens)  # on average, by random routing
        experts = 3 * s.hidden * s.inner * element
        self.traffic = int(touched * experts + 4 * case.tokens * s.hidden)
        self.set_bytes = int((touched if device == "cuda" else s.experts) * experts)
        self.experts: tuple[Any, ...] = ()  # those of the first set; may be given
        self._expected: tuple[MoeOperands, torch.Tensor, torch.Tensor] | None = None  # of the operands that were checked last

    def operands(self, generator: torch.Generator) -> MoeOperands:
        """Tokens and their routing; on a GPU beside the experts of the first set: others are touched then, and L2 holds few of them."""
        c, s = self.case, self.shape
        x = normal((c.tokens, s.hidden), torch.bfloat16, generator)
        weights, ids = kernelgen.route(normal((c.tokens, s.experts), torch.float32, generator), s.k)
        experts = self.experts or self._new_experts(generator)
        if self.device == "cuda":
            self.experts = experts
        w13, w2, scale13, scale2, bias13, bias2 = experts
        return MoeOperands(x, w13, w2, weights, ids, scale13, scale2, bias13, bias2, torch.empty_like(x))

    def _new_experts(self, generator: torch.Generator) -> tuple[Any, ...]:
        """w13, w2, scales, biases."""
        c, s, bf16 = self.case, self.shape, torch.bfloat16
        w13 = normal((s.experts, 2 * s.inner, s.hidden), bf16, generator).mul_(s.hidden**-0.5)
        w2 = normal((s.experts, s.hidden, s.inner), bf16, generator).mul_(s.inner**-0.5)
        none = w13.new_empty(0)
        experts: list[Any] = [w13, w2]
        scales = biases = [none, none]
        if c.recipe == "fp8-block":
            experts, scales = map(list, zip(*(kernelgen.quantize_fp8(w, "block_128x128") for w in (w13, w2))))
        elif c.recipe == "mxfp4":
            experts = [_packed(w) for w in (w13, w2)]
        if s.activation == "swiglu_oai":
            biases = [normal(tuple(w.shape[:2]), bf16, generator) for w in (w13, w2)]
        return (*experts, *scales, *biases)

    def _options(self, o: MoeOperands) -> dict[str, Any]:
        s = self.shape
        sides = {name: t if t.numel() else None for name, t in o._asdict().items() if name.startswith(("scale", "bias"))}
        return dict(activation=s.activation, gate_up="interleaved" if s.activation == "swiglu_oai" else "gate_first") | sides

    def candidates(self) -> list[Candidate]:
        def ours(o: MoeOperands) -> torch.Tensor:
            return kernelgen.moe(*o[:5], out=o.out, backend="generated", **self._options(o))

        missing = "" if self.case.recipe == "bf16" else f"torch has no {self.case.recipe} experts here"
        grouped = missing or ("" if self.device == "cuda" else "torch._grouped_mm needs a GPU")
        return [Candidate("kernelgen", ours, peer=False), Candidate("torch._grouped_mm", self._grouped, missing=grouped),
                Candidate("torch loop", self._loop, missing=missing)]

    def _grouped(self, o: MoeOperands) -> torch.Tensor:
        """Sort, gather, two grouped products, weighted sum: what torch 2.11 offers."""
        k, experts = self.shape.k, self.shape.experts
        ids, order = o.ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(experts, dtype=ids.dtype, device=ids.device), right=True, out_int32=True)
        gate, up = torch._grouped_mm(o.x[order // k], o.w13.mT, offs=ends).chunk(2, 1)
        rows = torch._grouped_mm(F.silu(gate) * up, o.w2.mT, offs=ends)
        back = torch.empty_like(rows)
        back[order] = rows
        return (back.view(*o.ids.shape, -1) * o.weights.unsqueeze(-1)).sum(1).to(o.x.dtype)

    def _loop(self, o: MoeOperands) -> torch.Tensor:
        """Expert by expert, as transformers does it in eager mode."""
        out = torch.zeros(o.x.shape, dtype=torch.float32, device=o.x.device)
        for e in o.ids.unique().tolist():
            token, slot = (o.ids == e).nonzero(as_tuple=True)
            gate, up = (o.x[token] @ o.w13[e].t()).chunk(2, 1)
            out.index_add_(0, token, (F.silu(gate) * up) @ o.w2[e].t() * o.weights[token, slot, None])
        return out.to(o.x.dtype)

    def check(self, operands: MoeOperands, result: torch.Tensor) -> Comparison:
        """The last tokens, on their experts alone."""
        if self._expected is None or self._expected[0] is not operands:
            self._expected = (operands, *self._references(operands))
        _, exact, plain = self._expected
        return compare(result[-_SAMPLE_TOKENS:].cpu(), exact, plain, what=self.problem)

    def _references(self, o: MoeOperands) -> tuple[torch.Tensor, torch.Tensor]:
        from kernelgen import reference
        from kernelgen.testing.moe_layer import plain

        used, ids = o.ids[-_SAMPLE_TOKENS:].unique(return_inverse=True)
        pick = used.tolist()
        experts = [self._some(w, pick) for w in (o.w13, o.w2)]
        some = {name: None if t is None else t[pick] for name, t in self._options(o).items() if isinstance(t, torch.Tensor) or t is None}
        c = dict(x=o.x[-_SAMPLE_TOKENS:], w13=experts[0], w2=experts[1], weights=o.weights[-_SAMPLE_TOKENS:], ids=ids)
        c = c | {name: v for name, v in self._options(o).items() if isinstance(v, str)} | some
        return reference.moe(**c).cpu(), plain(c)

    @staticmethod
    def _some(w: Any, pick: list[int]) -> torch.Tensor:
        """Some experts; what mxfp4 means is bf16, exactly."""
        if isinstance(w, torch.Tensor):
            return w.view(torch.uint8)[pick].view(w.dtype) if w.dtype.itemsize == 1 else w[pick]
        codes, scale = w.codes[pick].int(), torch.exp2(w.scale[pick].float() - 127)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
        signed = torch.cat([values, -values])[torch.stack([codes & 15, codes >> 4], -1).flatten(-2)]
        return (signed.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2).bfloat16()

    def decision(self, operands: MoeOperands) -> Any:
        o = operands
        return kernelgen.explain("moe", *o[:5], out=o.out, backend="generated", **self._options(o))
