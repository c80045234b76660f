"""The calls that a service of a model makes, as lines of the command line: what ``kernelgen explain`` and ``prebuild`` take.

Lines, because a report can name them, and because one description (kernelgen/cli/calls.py) then serves a call by hand and a model.
Which kernels they need is not decided here: kernelgen/aot/plan.py asks dispatch, as a live call does.

Where services differ (q, k, v as one product or three, an activation within the product or behind it, where tokens' places come
from), every way is listed: most of them share their kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernelgen.aot.models import Experts, Latent, Model
from kernelgen.dtypes import parse_dtype
from kernelgen.errors import DtypeError, SettingsError
from kernelgen.guard import whole

FP8 = ("e4m3", "e5m2")
# Rows at which a product's config changes lie between powers of two, too, because its tiles fill the SMs in waves: tiles have multiples
# of 8 rows where there are few, of 64 else. (up to, step): with them no config of 6 products on sm_90a was missed (docs/design/aot.md).
_STEPS = ((128, 8), (512, 32), (1 << 31, 64))
_QUERIES_OF_A_BATCH = 8  # prefill in batches of one and of so many requests


@dataclass(frozen=True)
class Service:
    """How a model is served.

    tp, ep      GPUs over which layers are cut, and experts are divided; with both, an expert is cut over the tp / ep that are left
    dtype       of the activations, None = the model's;  kv_dtype: of the cache, None = the same; names, or torch's own dtypes
    max_tokens  most rows of a product: tokens of one step;  max_batch: most requests;  max_length: most keys of a request
    """

    tp: int = 1
    ep: int = 1
    dtype: str | None = None
    kv_dtype: str | None = None
    page_size: int = 16
    kv_layout: str = "NHD"
    max_tokens: int = 8192
    max_batch: int = 256
    max_length: int = 32768

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "page_size", "max_tokens", "max_batch", "max_length"):
            value = whole(getattr(self, name))
            if value is None or value < 1:
                raise SettingsError(f"{name}: got {getattr(self, name)!r}, expected a whole number of at least 1")
            object.__setattr__(self, name, value)
        for name in ("dtype", "kv_dtype"):
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, None if given is None else parse_dtype(str(given)))
            except DtypeError as error:
                raise SettingsError(f"{name}: {error}") from None
        if self.kv_layout not in ("NHD", "HND"):
            raise SettingsError(f"kv_layout: got {self.kv_layout!r}, expected NHD or HND")


def powers(limit: int, low: int = 1) -> tuple[int, ...]:
    """Powers of two from ``low`` up to the first that is not below ``limit``: what a plan rounds lengths to."""
    return tuple(1 << i for i in range((low - 1).bit_length(), (max(limit, low) - 1).bit_length() + 1))


def row_classes(limit: int) -> tuple[int, ...]:
    """Rows that stand for all of 1 .. limit: powers of two, and steps between them that widen with the rows."""
    rows = {n for n in powers(limit) if n < limit} | {limit}
    low = 0
    for high, step in _STEPS:
        rows |= set(range(low + step, min(high, limit) + 1, step))
        low = high
    return tuple(sorted(rows))


def service_calls(model: Model, service: Service) -> tuple[str, ...]:
    """Each line once, in the order of a layer. Raises SettingsError where the model cannot be divided so."""
    m = _divided(model, service)
    made = _Calls(m, service)
    return tuple(dict.fromkeys(made.all()))


def _divided(model: Model, s: Service) -> Model:
    """The shapes on one GPU. Key/value heads that are fewer than the GPUs are on several of them."""
    def share(what: str, count: int, parts: int, by: str) -> int:
        if count % parts:
            raise SettingsError(f"--{by} {parts}: got {count} {what}, expected a multiple of {parts}")
        return count // parts

    experts = model.experts
    if experts is None and s.ep > 1:
        raise SettingsError(f"--ep {s.ep}: got a {model.model_type} model, expected one with experts; leave --ep out")
    if s.ep > 1 and s.tp > s.ep and s.tp % s.ep:
        raise SettingsError(f"--tp {s.tp} --ep {s.ep}: expected a multiple of --ep, or at most as many")
    if experts is not None:
        experts = replace(
            experts, intermediate=share("of an expert's intermediate size", experts.intermediate, max(1, s.tp // s.ep), "tp"),
            shared=None if experts.shared is None else share("of the shared expert's intermediate size", experts.shared, s.tp, "tp"))
        share("experts", experts.count, s.ep, "ep")
    kv_heads = model.kv_heads
    if kv_heads >= s.tp or s.tp % kv_heads:
        kv_heads = share("key/value heads", kv_heads, s.tp, "tp")
    else:
        kv_heads = 1
    return replace(
        model, heads=share("attention heads", model.heads, s.tp, "tp"), kv_heads=kv_heads, vocab=-(-model.vocab // s.tp), experts=experts,
        intermediate=None if model.intermediate is None else share("of the intermediate size", model.intermediate, s.tp, "tp"))


class _Calls:
    """The calls of one GPU. ``m``: its share of the model."""

    def __init__(self, m: Model, s: Service) -> None:
        self.m, self.s, self.hidden = m, s, m.hidden
        self.dtype = s.dtype or m.dtype
        self.kv_dtype = s.kv_dtype or self.dtype
        if self.kv_dtype != self.dtype and self.kv_dtype not in FP8:
            raise SettingsError(f"--kv-dtype {self.kv_dtype}: got it beside {self.dtype}, expected {self.dtype} or {', '.join(FP8)}")
        self.products = row_classes(s.max_tokens)
        self.rows = tuple(sorted({1, 16, s.max_tokens}))  # of kernels whose config does not look at rows, or at few of them

    def all(self) -> Iterator[str]:
        m = self.m
        yield from self.norm(self.hidden)
        yield from self.latent(m.latent) if m.latent else self.attention()
        if m.intermediate is not None:
            yield from self.feed_forward(m.intermediate)
        if m.experts is not None:
            yield from self.experts(m.experts)
        yield from self.linear(m.vocab, self.hidden, plain=True)

    # -- small ops

    def norm(self, width: int, heads: int = 1, *, residual: bool = True) -> Iterator[str]:
        for rows in self.rows:
            line = f"rmsnorm --x {rows * heads},{width} --dtype {self.dtype}"
            yield line
            if residual:
                yield f"{line} --residual"

    def linear(
        self, n: int, k: int, *, bias: bool = False, activation: str = "", plain: bool = False, out_dtype: str = "",
    ) -> Iterator[str]:
        """x @ w.t() with w (N, K). ``plain``: of the model's dtype whatever its weights are."""
        weights = None if plain else self.m.weights
        more = "".join((" --bias" if bias else "", f" --activation {activation}" if activation else ""))
        recipes = {"fp8-block": (("block_128x128", "block_1x128"),), "fp8-tensor": (("tensor", "tensor"), ("row", "row"))}
        for recipe, of_x in recipes.get(weights or "", ()):
            for rows in self.rows:
                yield f"quantize_fp8 --x {rows},{k} --recipe {of_x} --dtype {self.dtype}"
            for rows in self.products:
                yield (f"gemm --mnk {rows},{n},{k} --b-order col --dtype e4m3 --scales {recipe} --out-dtype {self.dtype}{more}")
        if weights in (None, "mxfp4"):
            for rows in self.products:
                yield (f"gemm --mnk {rows},{n},{k} --b-order col --dtype {self.dtype}{more}"
                       f"{f' --out-dtype {out_dtype}' if out_dtype else ''}")

    def feed_forward(self, width: int) -> Iterator[str]:
        _, joined, alone = self.m.activations
        yield from self.linear(2 * width, self.hidden)
        if joined:
            yield from self.linear(2 * width, self.hidden, activation=joined)
        if joined == "swiglu":
            for rows in self.rows:
                yield f"silu_and_mul --x {rows},{2 * width} --dtype {self.dtype}"
        yield from self.linear(width, self.hidden, activation=alone)
        yield from self.linear(width, self.hidden)
        yield from self.linear(self.hidden, width)

    # -- attention

    def attention(self) -> Iterator[str]:
        m, d = self.m, self.m.head_dim
        for heads in (m.heads + 2 * m.kv_heads, m.heads, m.kv_heads):
            yield from self.linear(heads * d, self.hidden, bias=m.qkv_bias)
        if m.qk_norm:
            for heads in (m.heads, m.kv_heads):
                yield from self.norm(d, heads, residual=False)
        yield from self.rope(m.heads, m.kv_heads, d)
        yield from self.append()
        for window in m.windows:
            features = self.features(window)
            yield from self.paged(f"paged_attention --q-heads {m.heads} --kv-heads {m.kv_heads} --head-dim {d} "
                                  f"--kv-layout {self.s.kv_layout}{features}")
            yield from self.ragged(m.kv_heads, d, d, features)
        yield from self.linear(self.hidden, m.heads * d, bias=m.out_bias)

    def features(self, window: int | None) -> str:
        m = self.m
        return "".join((f" --window {window - 1},0" if window else "", " --soft-cap 50" if m.soft_cap else "",
                        " --sinks" if m.sinks else ""))

    def rope(self, heads: int, kv_heads: int, head_dim: int) -> Iterator[str]:
        for rows in self.rows:
            for cached in self.angles():
                for inplace in ("", " --inplace"):
                    yield (f"rope --q {rows},{heads},{head_dim} --kv-heads {kv_heads} --rotary-dim {self.m.rotary_dim}"
                           f"{cached}{inplace} --dtype {self.dtype}")

    def angles(self) -> Iterator[str]:
        """By position, or from a cosine and sine cache."""
        pairs = " --interleaved" if self.m.interleaved else ""
        for dtype in ("", *dict.fromkeys(("fp32", self.dtype))):
            yield f"{pairs} --cos-sin-dtype {dtype}" if dtype else pairs

    def append(self) -> Iterator[str]:
        m, d = self.m, self.m.head_dim
        sizes = f"--kv-heads {m.kv_heads} --head-dim {d}"
        for place in self.places():
            for scales in self.append_scales():
                yield f"append_kv {place} {sizes}{scales}"
                for angles in self.angles():
                    yield f"rope_append_kv {place} --q-heads {m.heads} {sizes} --rotary-dim {m.rotary_dim}{angles}{scales}"

    def places(self) -> Iterator[str]:
        for rows in self.rows:
            for table in ("slots", "blocks", "csr"):
                yield f"--tokens {rows} --page-size {self.s.page_size} --table {table} --dtype {self.dtype} --cache-dtype {self.kv_dtype}"

    def append_scales(self) -> tuple[str, ...]:
        if self.kv_dtype not in FP8:
            return ("",)
        return ("", *(f" --k-scale {kind} --v-scale {kind}" for kind in ("number", "tensor")))

    def paged(self, call: str) -> Iterator[str]:
        """Decode, and prefill of few and of many queries. Lengths on the host, where the chooser sees them, and on the device."""
        s, call = self.s, f"{call} --page-size {self.s.page_size} --dtype {self.dtype} --kv-dtype {self.kv_dtype}"
        scales = ("", " --kv-scales tensor") if self.kv_dtype in FP8 else ("",)
        for more in (f"{scale}{lse}" for scale in scales for lse in ("", " --lse")):
            for table in ("blocks", "csr"):
                for batch in dict.fromkeys((1, min(_QUERIES_OF_A_BATCH, s.max_batch), s.max_batch)):
                    for queries in powers(max(s.max_tokens // batch, 1)):
                        for keys in dict.fromkeys((max(queries, 1), max(queries, s.max_length))):
                            yield f"{call}{more} --table {table} --batch {batch} --q-len {queries} --kv-len {keys}"
                    device = f"{call}{more} --table {table} --batch {batch} --kv-len {s.max_length} --device-kv-lens"
                    yield device
                    yield f"{device} --device-q-lens"
            # A block table of one column, which is what short requests have: every one is a page long.
            for queries in powers(s.page_size):
                yield f"{call}{more} --table contiguous --batch 1 --q-len {min(queries, s.page_size)} --kv-len {s.page_size}"
            yield f"{call}{more} --table contiguous --batch 1 --kv-len {s.page_size} --device-kv-lens"

    def ragged(self, kv_heads: int, head_dim: int, head_dim_v: int, features: str = "") -> Iterator[str]:
        """Prefill of whole requests, without a cache."""
        for tokens in powers(self.s.max_tokens):
            for batch in (1, _QUERIES_OF_A_BATCH):
                if tokens < batch:
                    continue
                for lse in ("", " --lse"):
                    yield (f"attention_varlen --q {tokens},{self.m.heads},{head_dim} --kv-heads {kv_heads} --head-dim-v {head_dim_v} "
                           f"--batch {batch} --causal{features}{lse} --dtype {self.dtype}")

    def latent(self, x: Latent) -> Iterator[str]:
        """MLA: prefill with keys and values of every head, decode over latents with the up-projections absorbed."""
        m, of_kv = self.m, x.kv_rank + x.rope
        head_dim, plain = x.nope + x.rope, f"--dtype {self.dtype}"
        if x.q_rank is None:
            yield from self.linear(m.heads * head_dim, self.hidden)
        else:
            yield from self.linear(x.q_rank, self.hidden)
            yield from self.linear(x.q_rank + of_kv, self.hidden)
            yield from self.norm(x.q_rank, residual=False)
            yield from self.linear(m.heads * head_dim, x.q_rank)
        yield from self.linear(of_kv, self.hidden)
        yield from self.norm(x.kv_rank, residual=False)
        yield from self.rope(m.heads, 1, x.rope)
        yield from self.linear(m.heads * (x.nope + x.value), x.kv_rank)
        yield from self.ragged(m.heads, head_dim, x.value)
        for rows in self.products:
            yield f"gemm --mnk {rows},{x.kv_rank},{x.nope} --batch {m.heads} --batched-b {plain}"
            yield f"gemm --mnk {rows},{x.value},{x.kv_rank} --batch {m.heads} --batched-b --b-order col {plain}"
        for place in self.places():
            for scale in ("",) if self.kv_dtype not in FP8 else ("", " --k-scale number", " --k-scale tensor"):
                yield f"append_mla {place} --head-dim-latent {x.kv_rank} --head-dim-rope {x.rope}{scale}"
        yield from self.paged(f"mla --heads {m.heads} --head-dim-latent {x.kv_rank} --head-dim-rope {x.rope}")
        yield from self.linear(self.hidden, m.heads * x.value)

    # -- mixture of experts

    def experts(self, e: Experts) -> Iterator[str]:
        local = e.count // self.s.ep
        for logits in dict.fromkeys(("fp32", self.dtype)):
            out = logits if logits != self.dtype else ""
            yield from self.linear(e.count, self.hidden, bias=e.router_bias, plain=True, out_dtype=out)
            yield from self.route(e, logits)
        forms: dict[str | None, str] = {
            None: "", "fp8-block": " --weight-dtype e4m3 --scales block_128x128", "fp8-tensor": " --weight-dtype e4m3 --scales expert",
            "mxfp4": " --packed mxfp4"}
        weights = forms[self.m.weights]
        shared = ("", f" --shared {e.shared}") if e.shared is not None and self.m.weights is None else ("",)
        maps = ("",) if self.s.ep == 1 else (" --expert-map range", " --expert-map table")
        biases = " --bias13 --bias2" if e.biases else ""
        for rows in self.products:
            for more in (f"{part}{where}" for part in shared for where in maps):
                yield (f"moe --tokens {rows} --hidden {self.hidden} --intermediate {e.intermediate} --experts {local} --k {e.top_k} "
                       f"--activation {e.activation} --gate-up {e.gate_up}{biases}{weights}{more} --dtype {self.dtype}")
        if e.shared is not None:
            yield from self.feed_forward(e.shared)

    def route(self, e: Experts, logits: str) -> Iterator[str]:
        if not e.method:
            return
        words = [f"--k {e.top_k} --method {e.method}"]
        words += ["--no-renormalize"] if not e.renormalize and e.method in ("softmax", "sigmoid") else []
        words += [f"--num-groups {e.groups} --topk-groups {e.kept_groups}"] if e.groups is not None else []
        for bias in dict.fromkeys(("fp32", logits)) if e.select_bias else ("",):
            for rows in self.rows:
                more = f" --bias --bias-dtype {bias}" if bias else ""
                yield f"route --tokens {rows} --experts {e.count} {' '.join(words)}{more} --dtype {logits}"
