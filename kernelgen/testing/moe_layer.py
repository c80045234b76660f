"""One check of moe through the public call, for tests of every device: the float64 oracle, and a plain evaluation by torch."""

from __future__ import annotations

from typing import Any

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.ops.weights import PackedWeight
from kernelgen.reference.activation import is_gated
from kernelgen.reference.gemm import as_weight
from kernelgen.reference.moe import local_ids
from kernelgen.testing.data import poisoned_empty, random_tensor
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

F32 = torch.float32


def layer(
    tokens: int, experts: int, k: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16, *, seed: int = 1,
    activation: str = "swiglu", biases: torch.dtype | None = None, device: torch.device | str = "cpu", scale: float = 1.0,
) -> dict[str, Any]:
    """Arguments of moe: random weights that keep the size of x, and routing by random logits."""
    wide = 2 * inner if is_gated(activation) else inner
    weights, ids = ref.route(random_tensor((tokens, experts), seed=seed), k)
    made: dict[str, Any] = dict(
        x=random_tensor((tokens, hidden), dtype, seed=seed + 1, device=device, scale=scale),
        w13=random_tensor((experts, wide, hidden), dtype, seed=seed + 2, device=device, scale=hidden**-0.5),
        w2=random_tensor((experts, hidden, inner), dtype, seed=seed + 3, device=device, scale=inner**-0.5),
        weights=weights.float().to(device), ids=ids.to(device), activation=activation)
    if biases is not None:
        made |= dict(bias13=random_tensor((experts, wide), biases, seed=seed + 4, device=device),
                     bias2=random_tensor((experts, hidden), biases, seed=seed + 5, device=device))
    return made


def quantize_experts(c: dict[str, Any], recipe13: str, recipe2: str, dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Any]:
    """The same layer with fp8 weights; recipes are "tensor", "expert", "channel" or "block_128x128"."""
    changed = dict(c)
    for name, scale_name, recipe in (("w13", "scale13", recipe13), ("w2", "scale2", recipe2)):
        w = c[name].cpu()
        if recipe == "expert":
            parts = [ref.quantize_fp8(e, "tensor", dtype=dtype, compute_dtype=F32) for e in w]
            codes, scale = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
        else:
            codes, scale = ref.quantize_fp8(w, {"channel": "row"}.get(recipe, recipe), dtype=dtype, compute_dtype=F32)
        changed[name], changed[scale_name] = codes.to(c["x"].device), scale.float().to(c["x"].device)
    return changed


def pack_experts(c: dict[str, Any], form: str, **options: Any) -> dict[str, Any]:
    return c | {name: kernelgen.pack_weight(c[name].cpu(), form, **options).to(c["x"].device) for name in ("w13", "w2")}


def oracle(c: dict[str, Any]) -> dict[str, Any]:
    """Arguments on the CPU, as the oracle takes them."""
    def moved(v: Any) -> Any:
        if isinstance(v, (PackedWeight, ref.PackedWeight)):
            return ref.PackedWeight(v.format, v.shape, v.group_size, v.codes.cpu(), v.scale.cpu(), None if v.zero is None else v.zero.cpu())
        if isinstance(v, tuple):
            return tuple(map(moved, v))
        return v.cpu() if isinstance(v, torch.Tensor) else v

    return {name: moved(value) for name, value in c.items()}


def _rounded(rows: torch.Tensor, recipe: str | None, dtype: torch.dtype) -> torch.Tensor:
    """Through fp8 and back, as the kernels round what they multiply with fp8 weights."""
    if recipe is None or not rows.numel():
        return rows
    codes, scale = ref.quantize_fp8(rows, recipe, dtype=dtype, compute_dtype=F32)
    full = scale if recipe == "row" else scale.repeat_interleave(128, -1)[:, : rows.shape[1]]
    return codes.float() * full


def plain(c: dict[str, Any], *, added: bool = False) -> torch.Tensor:
    """The layer by torch in float32 with the roundings of a kernel: x and the hidden rows to fp8 beside fp8 weights, the hidden rows
    and the experts' results to x's dtype. (Where the first product writes codes itself, hidden rows have one rounding less.)
    ``added``: slots' results times their weights are rounded and added in x's dtype, to what the shared expert makes.
    """
    c = oracle(c)
    x, weights, dtype = c["x"], c["weights"].float(), c["x"].dtype
    experts = local_ids(c["ids"], c["w13"].shape[0], c.get("expert_map"))
    on_input, code = c.get("weights_on_input", False), None
    recipes: list[str | None] = [None, None]
    matrices = []
    for i, name in enumerate(("w13", "w2")):
        w, scale = c[name], c.get("scale13" if i == 0 else "scale2")
        if isinstance(w, torch.Tensor) and w.dtype.itemsize == 1:
            code = w.dtype
            blocks = scale is not None and scale.dim() == 3 and scale.shape[1:] == (-(-w.shape[1] // 128), -(-w.shape[2] // 128))
            recipes[i] = "block_1x128" if blocks else "row"
        matrices.append(as_weight(name, w, scale, F32))
    options = {name: c[name] for name in ("alpha", "limit", "gate_up") if c.get(name) is not None}

    def expert(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, bias13: Any, bias2: Any) -> torch.Tensor:
        hidden = rows @ first.t()
        hidden = hidden if bias13 is None else hidden + bias13.float()
        hidden = ref.apply_activation(hidden, c["activation"], **options).to(dtype).float()
        out = _rounded(hidden, recipes[1], code or dtype) @ second.t()
        return (out if bias2 is None else out + bias2.float()).to(dtype).float()

    out = torch.zeros(x.shape, dtype=dtype if added else F32)
    if added and c.get("shared") is not None:
        first, second = (w.float() for w in c["shared"])
        hidden = ref.apply_activation(x.float() @ first.t(), c["activation"], **options).to(dtype).float()
        out = (hidden @ second.t()).to(dtype)
    value = _rounded(x.float(), recipes[0], code or dtype)
    for s in range(experts.shape[1]):
        for e in range(matrices[0].shape[0]):
            token = (experts[:, s] == e).nonzero()[:, 0]
            factor = weights[token, s, None]
            rows = value[token]
            if on_input:
                rows = rows * factor if code is not None else (rows * factor).to(dtype).float()
            biases = (None if c.get(name) is None else c[name][e] for name in ("bias13", "bias2"))
            made = expert(rows, matrices[0][e], matrices[1][e], *biases)
            out.index_add_(0, token, (made if on_input else made * factor).to(out.dtype))
    if c.get("shared") is not None and not added:
        first, second = (w.float() for w in c["shared"])
        recipes = [None, None]
        out += expert(x.float(), first, second, None, None)
    return out.to(dtype)


def check_moe(c: dict[str, Any], *, what: str, seed: int = 1) -> torch.Tensor:
    """Twice into poisoned outputs by generated kernels: against the float64 oracle, and bit for bit against itself; x stays."""
    x, before = c["x"], c["x"].clone()
    results = []
    for _ in range(2):
        out = poisoned_empty(tuple(x.shape), x.dtype, x.device)
        assert kernelgen.moe(**c, out=out, backend="generated") is out, what
        results.append(out)
    results.append(kernelgen.moe(**c, backend="generated"))
    for other in results[1:]:
        assert_bits_equal(other, results[0], what=f"{what}, again")
    assert_bits_equal(x, before, what=f"{what}, x")
    assert_close_to_reference(results[0].cpu(), ref.moe(**oracle(c)), plain(c), what=what, seed=seed)
    return results[0]


def check_added(c: dict[str, Any], *, what: str, seed: int = 1) -> torch.Tensor:
    """The same with contributions added in any order, each rounded to x's dtype: within twice the error of torch's index_add_ in it."""
    x, before = c["x"], c["x"].clone()
    exact, near = ref.moe(**oracle(c)), plain(c, added=True)
    out = x
    for i in range(3):
        out = poisoned_empty(tuple(x.shape), x.dtype, x.device)
        assert kernelgen.moe(**c, out=out, deterministic=False, backend="generated") is out, what
        assert_close_to_reference(out.cpu(), exact, near, what=f"{what}, added, call {i}", seed=seed)
    assert_bits_equal(x, before, what=f"{what}, x")
    return out
