"""MoeProblem and RouteProblem: a mixture-of-experts layer and its router, as CONTRACTS describes the calls, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.problems.common import flag_words


@dataclass(frozen=True)
class RouteProblem:
    """Router logits (tokens, experts) to k experts and their weights for each token.

    method       "softmax", "topk_softmax", "sigmoid", "deepseek_v3" or "llama4"
    bias         a selection bias is given, of ``bias_dtype``
    num_groups, topk_groups   grouped selection; None = one group
    counts       how often each expert is chosen is added up
    alignment    as in AttentionProblem, over logits and bias
    """

    tokens: int
    experts: int
    k: int
    dtype: str
    method: str = "softmax"
    renormalize: bool = True
    bias: bool = False
    num_groups: int | None = None
    topk_groups: int | None = None
    requires_grad: bool = False
    alignment: int = 16
    bias_dtype: str | None = None
    counts: bool = False

    op = "route"

    @property
    def grouped(self) -> bool:
        """Whether groups of experts are left out: with all of them kept they decide nothing."""
        return self.num_groups is not None and self.num_groups != self.topk_groups

    def __str__(self) -> str:
        words = flag_words(renormalize=self.renormalize, bias=self.bias, counts=self.counts, grad=self.requires_grad)
        if self.num_groups is not None:
            words += f" groups={self.topk_groups}/{self.num_groups}"
        return f"route[t={self.tokens} e={self.experts} k={self.k} {self.dtype} {self.method}{words}]"


@dataclass(frozen=True)
class PackedForm:
    """How a packed weight lies in memory: as in GemmProblem."""

    format: str
    group_size: int
    scale_dtype: str
    zero_points: bool

    def __str__(self) -> str:
        return f"{self.format}/{self.group_size}"


@dataclass(frozen=True)
class MoeProblem:
    """One mixture-of-experts layer.

    tokens, hidden   x and out are (tokens, hidden)
    experts          experts whose weights are here (local ones, with an expert map)
    intermediate     I: w13 is (experts, 2 I, hidden), or (experts, I, hidden) for an ungated activation
    k                slots of each token
    weight_dtype     element type of w13 and w2;  scales: None, "tensor", "expert", "channel", "block_128x128" (fp8 recipe), or those
                     of w13 and of w2 with a slash between them
    packed           forms of w13 and w2, where they are packed; ``weight_dtype`` is then the format of w13
    gate_up          "gate_first", "up_first" or "interleaved"; only gated activations look at it
    limit            the activation clamps its inputs (always for swiglu_oai)
    shared           intermediate size of the shared expert, None without one
    expert_map       None, "table" (of every global expert) or "range" (of the local ones)
    alignment        as in AttentionProblem, over x, w13, w2, out, shared
    bias13_dtype, bias2_dtype, slot_dtype, id_dtype   of the biases, of ``weights`` and of ``ids``
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    k: int
    x_dtype: str
    weight_dtype: str
    out_dtype: str
    activation: str = "swiglu"
    gated: bool = True
    gate_up: str = "gate_first"
    limit: bool = False
    bias13: bool = False
    bias2: bool = False
    scales: str | None = None
    shared: int | None = None
    expert_map: str | None = None
    weights_on_input: bool = False
    deterministic: bool = True
    requires_grad: bool = False
    alignment: int = 16
    packed: tuple[PackedForm, PackedForm] | None = None
    bias13_dtype: str | None = None
    bias2_dtype: str | None = None
    slot_dtype: str = "fp32"
    id_dtype: str = "int32"

    op = "moe"

    @property
    def slots(self) -> int:
        return self.tokens * self.k

    @property
    def wide(self) -> int:
        """Rows of w13 per expert."""
        return 2 * self.intermediate if self.gated else self.intermediate

    def __str__(self) -> str:
        words = flag_words(
            limit=self.limit, bias13=self.bias13, bias2=self.bias2, weights_on_input=self.weights_on_input,
            nondeterministic=not self.deterministic, grad=self.requires_grad,
        )
        packed = None if self.packed is None else ",".join(dict.fromkeys(map(str, self.packed)))
        for label, value in (("scales", self.scales), ("packed", packed), ("shared", self.shared), ("map", self.expert_map)):
            if value is not None:
                words += f" {label}={value}"
        if self.gated and self.gate_up != "gate_first":
            words += f" {self.gate_up}"
        if self.alignment < 16:
            words += f" align={self.alignment}"
        if self.out_dtype != self.x_dtype:
            words += f" out={self.out_dtype}"
        dtype = self.x_dtype if self.x_dtype == self.weight_dtype else f"{self.x_dtype}x{self.weight_dtype}"
        return (f"moe[t={self.tokens} h={self.hidden} i={self.intermediate} e={self.experts} k={self.k} {dtype} "
                f"{self.activation}{words}]")


@dataclass(frozen=True)
class MoeSortProblem:
    """The slots (tokens, k) grouped by expert, in the order of (token, slot) within one.

    id_dtype    "int32" or "int64"
    expert_map  as in MoeProblem
    """

    tokens: int
    k: int
    experts: int
    id_dtype: str = "int32"
    expert_map: str | None = None
    requires_grad: bool = False

    op = "moe_sort"

    @property
    def slots(self) -> int:
        return self.tokens * self.k

    def __str__(self) -> str:
        words = f" map={self.expert_map}" if self.expert_map else ""
        words += f" weights={self.weight_dtype}" if self.weight_dtype else ""
        return f"moe_sort[t={self.tokens} k={self.k} e={self.experts} {self.id_dtype}{words}{flag_words(grad=self.requires_grad)}]"

    @property
    def weight_dtype(self) -> str | None:
        """Of the slots' weights, that rows get; None: they get none."""
        return None


@dataclass(frozen=True)
class WeightedSortProblem(MoeSortProblem):
    """Whose rows get the weights of their slots, of ``slot_dtype``, and which clears an output where the tensors have one: for a product
    that adds rows to those of tokens. A step of a composition, never a call of its own.
    """

    slot_dtype: str = "fp32"

    @property
    def weight_dtype(self) -> str | None:
        return self.slot_dtype


@dataclass(frozen=True)
class MoePermuteProblem:
    """x (tokens, width) copied to the rows of its k slots.

    weight_dtype  None, or of the weights (tokens, k) that multiply each copy
    scales        None, or float32 scales of each token that move along; x are codes then, and weights multiply the scales
    alignment     as in AttentionProblem, over x and rows
    """

    tokens: int
    k: int
    width: int
    dtype: str
    weight_dtype: str | None = None
    scales: int | None = None
    alignment: int = 16
    requires_grad: bool = False

    op = "moe_permute"

    @property
    def copies(self) -> bool:
        """Elements stay what they are."""
        return self.weight_dtype is None or self.scales is not None

    def __str__(self) -> str:
        words = f" weights={self.weight_dtype}" if self.weight_dtype else ""
        words += f" scales={self.scales}" if self.scales is not None else ""
        words += f" align={self.alignment}" if self.alignment < 16 else ""
        return f"moe_permute[t={self.tokens} k={self.k} w={self.width} {self.dtype}{words}{flag_words(grad=self.requires_grad)}]"


@dataclass(frozen=True)
class MoeUnpermuteProblem:
    """out (tokens, width) = the sum of each token's rows, in the order of its slots, times their weights; then an addend.

    weight_dtype  None: every weight is 1
    addend        None, or its dtype
    alignment     as in AttentionProblem, over rows, out, addend
    """

    tokens: int
    k: int
    width: int
    dtype: str
    out_dtype: str
    weight_dtype: str | None = "fp32"
    addend: str | None = None
    alignment: int = 16
    requires_grad: bool = False

    op = "moe_unpermute"

    def __str__(self) -> str:
        words = f" weights={self.weight_dtype}" if self.weight_dtype else ""
        words += f" addend={self.addend}" if self.addend else ""
        words += f" align={self.alignment}" if self.alignment < 16 else ""
        dtype = self.dtype if self.dtype == self.out_dtype else f"{self.dtype}->{self.out_dtype}"
        return f"moe_unpermute[t={self.tokens} k={self.k} w={self.width} {dtype}{words}{flag_words(grad=self.requires_grad)}]"
