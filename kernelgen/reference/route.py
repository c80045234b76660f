"""Routing: from router logits to k experts and their weights for each token."""

from __future__ import annotations

import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference.checks import (
    check_compute_dtype,
    check_float,
    check_option,
    check_rank,
    check_same_device,
    check_shape,
    to_compute,
)

METHODS = ("softmax", "topk_softmax", "sigmoid", "deepseek_v3", "llama4")
# DeepSeek-V3's published gate divides by the sum plus this.
NORM_EPSILON = 1e-20


def route(logits: torch.Tensor, k: int, *, method: str = "softmax", renormalize: bool = True,
          bias: torch.Tensor | None = None, num_groups: int | None = None, topk_groups: int | None = None,
          scaling: float = 1.0, compute_dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits (T, E)`` to ``weights (T, k)`` in the compute dtype and ``ids (T, k)`` int32, best expert first.

    softmax       probabilities over all E, the k largest; divided by their sum if ``renormalize``
    topk_softmax  softmax over the k largest logits (``renormalize`` changes nothing)
    sigmoid       sigmoid scores, the k largest, divided by (sum + 1e-20) if ``renormalize``; ``bias`` as below
    deepseek_v3   sigmoid scores s; experts are chosen by ``s + bias``, weights are the unbiased s, normalised as in
                  "sigmoid"; with ``num_groups`` the groups are ranked by the sum of their two largest ``s + bias``
                  (their one, where a group has one) and only the best ``topk_groups`` take part
    llama4        the k largest logits (Llama 4 has k = 1), weight = sigmoid of the logit, never normalised

    Every weight is finally multiplied by ``scaling``. Equal keys go to the lowest id, in groups as well. The key is
    the logit itself where there is no bias (softmax and sigmoid keep its order, and their rounding would add ties).
    A NaN logit counts as -inf: its probability and sigmoid are 0. Logits of +inf share the softmax equally. A row
    with nothing above -inf gives ids 0 .. k - 1 and equal weights of ``scaling / k``.

    Raises ShapeError for k outside 1 .. E, groups that do not divide E or hold fewer than k experts; SettingsError for
    an unknown method or an argument that it does not take.
    """
    check_compute_dtype(compute_dtype)
    check_option("method", method, METHODS)
    check_float(logits=logits)
    check_rank("logits", logits, (2,), "(T, E)")
    check_same_device(logits=logits, bias=bias)
    experts = logits.shape[1]
    if not 1 <= k <= experts:
        raise ShapeError(f"k: got {k}, expected 1 .. {experts} (the number of experts)")
    if bias is not None:
        if method not in ("sigmoid", "deepseek_v3"):
            raise SettingsError(f"bias: given with method {method!r}, expected 'sigmoid' or 'deepseek_v3'")
        check_shape("bias", bias, (experts,), "(E)")
        check_float(bias=bias)
    _check_groups(method, experts, k, num_groups, topk_groups)

    x = to_compute(logits, compute_dtype)
    x = torch.where(torch.isnan(x), float("-inf"), x)
    key, kept = x, None
    if bias is not None or num_groups is not None:
        key = torch.sigmoid(x) if bias is None else torch.sigmoid(x) + to_compute(bias, compute_dtype)
    if num_groups is not None and topk_groups is not None:
        kept = _kept_experts(key, num_groups, topk_groups)
        # Without a bias the logit ranks as the score does, without the ties that rounding adds.
        key = x if bias is None else key
    ids = _largest(key, k, kept)
    chosen = x.gather(1, ids)
    if method == "softmax":
        weights = _softmax(x).gather(1, ids)
        if renormalize:
            weights = _softmax(chosen)
    elif method == "topk_softmax":
        weights = _softmax(chosen)
    else:
        weights = torch.sigmoid(chosen)
        if renormalize and method != "llama4":
            weights = weights / (weights.sum(1, keepdim=True) + NORM_EPSILON)
    hopeless = (x == float("-inf")).all(1, keepdim=True)
    ids = torch.where(hopeless, torch.arange(k, device=x.device), ids)
    weights = torch.where(hopeless, 1.0 / k, weights)
    return weights * scaling, ids.to(torch.int32)


def _check_groups(method: str, experts: int, k: int, num_groups: int | None, topk_groups: int | None) -> None:
    if (num_groups is None) != (topk_groups is None):
        raise SettingsError(f"got num_groups = {num_groups} and topk_groups = {topk_groups}, expected both or neither")
    if num_groups is None or topk_groups is None:
        return
    if method != "deepseek_v3":
        raise SettingsError(f"num_groups: given with method {method!r}, expected 'deepseek_v3'")
    if num_groups < 1 or experts % num_groups:
        raise ShapeError(f"num_groups: got {num_groups} for {experts} experts, expected a divisor")
    if not 1 <= topk_groups <= num_groups:
        raise ShapeError(f"topk_groups: got {topk_groups}, expected 1 .. {num_groups}")
    room = experts // num_groups * topk_groups
    if k > room:
        raise ShapeError(f"k: got {k}, expected at most {room}, the experts of {topk_groups} kept groups")


def _largest(key: torch.Tensor, k: int, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Ids (T, k) of the largest keys, equal ones by id; only ids that are ``kept``, whatever their key."""
    order = torch.sort(key, dim=1, descending=True, stable=True).indices
    if kept is not None:
        first = torch.sort(kept.gather(1, order).to(torch.int8), dim=1, descending=True, stable=True).indices
        order = order.gather(1, first)
    return order[:, :k]


def _kept_experts(key: torch.Tensor, num_groups: int, topk_groups: int) -> torch.Tensor:
    grouped = key.reshape(key.shape[0], num_groups, key.shape[1] // num_groups)
    ranked = torch.sort(grouped, dim=2, descending=True).values[:, :, :2]
    best = _largest(ranked.sum(2), topk_groups)
    kept = torch.zeros(key.shape[0], num_groups, dtype=torch.bool, device=key.device).scatter_(1, best, True)
    return kept.repeat_interleave(grouped.shape[2], 1)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension; logits of +inf share it equally, a row of -inf alone gives zeros."""
    peak = x.amax(-1, keepdim=True)
    e = torch.where(x == peak, 1.0, torch.exp(x - peak))
    e = torch.where(x == float("-inf"), 0.0, e)
    return e / e.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def check_ids(ids: torch.Tensor) -> None:
    """Raise DtypeError or ShapeError unless ids is ``(T, k)`` of int32 or int64."""
    check_rank("ids", ids, (2,), "(T, k)")
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"ids: got {ids.dtype}, expected int32 or int64")
