"""What each instruction of PTX is in C++: one row for each form of its name.

A pattern is the name with places: ``<T>`` any type, ``<T=s32|u32>`` one of these, ``<m=rn|ftz>`` modifiers that change nothing here, any number
of them, ``<x?=a|b>`` one of these or none (in code: whether it is there; of ``r`` and ``v`` which), ``<~=::a>`` without a dot. Operands, by position:

    =T    a register that is written, of the type of place T         T     an operand read as that type; s32, u64, pred ...: as that one
    =D    one or two registers, "d|p"                                =L    registers, in braces or alone
    =V    registers in braces                                        =&    the same, as pointers
    V:T   operands in braces, each read as type T                    L:T   the same, or one alone
    A     an address in brackets                                     M     [tensor map, {coordinates}]
    I     registers in braces, by their numbers in a register file   N     a number          *     any further ones, unused

Code names operands by position and places by name: types in capitals are C++ types, ``{line}``, ``{bytes}`` of all elements, ``{file}``.
Code that is an expression is written to operand 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    pattern: str
    operands: str
    code: str


_FLOATS, _PAIRS, _WHOLE = "f32|f64|f16|bf16", "f16x2|bf16x2", "s16|s32|s64|u16|u32|u64"
_BITS = "b16|b32|b64"
_ORDERINGS = "eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan"
_ORDER = "<m=volatile|weak|relaxed|acquire|release|acq_rel|mmio|cta|cluster|gpu|sys>"
_CACHE = "<m=nc|ca|cg|cs|lu|cv|wb|wt|unified|L1::\\w+|L2::\\w+>"

ARITHMETIC = (
    Row(f"add<m=rn|ftz|sat>.<T={_WHOLE}>", "=T T T", "{1} + {2}"), Row(f"sub<m=rn|ftz>.<T={_WHOLE}>", "=T T T", "{1} - {2}"),
    Row(f"add<m=rn|ftz|noftz>.<T={_FLOATS}|{_PAIRS}>", "=T T T", "{1} + {2}"), Row(f"sub<m=rn|ftz|noftz>.<T={_FLOATS}|{_PAIRS}>", "=T T T", "{1} - {2}"),
    Row(f"mul<m=rn|ftz|noftz>.<T={_FLOATS}|{_PAIRS}>", "=T T T", "{1} * {2}"), Row(f"mul.lo.<T={_WHOLE}>", "=T T T", "{1} * {2}"),
    Row("<x=add|sub|mul><m=ftz>.<r=rz|rm|rp><m=ftz>.<T=f32>", "=T T T", "narrowed<float, {r}>(apply_{x}<double>({1}, {2}))"),
    Row("<x=add|sub|mul><m=rn|ftz>.sat.<T=f32|f16>", "=T T T", "saturated<float>(apply_{x}<{T}>({1}, {2}))"),
    Row(f"mul.hi.<T={_WHOLE}>", "=T T T", "high_product({1}, {2})"), Row(f"mul.wide.<T={_WHOLE}>", "=W T T", "static_cast<{W}>({1}) * static_cast<{W}>({2})"),
    Row(f"mad.lo.<T={_WHOLE}>", "=T T T T", "{1} * {2} + {3}"), Row(f"mad.hi.<T={_WHOLE}>", "=T T T T", "high_product({1}, {2}) + {3}"),
    Row(f"mad.wide.<T={_WHOLE}>", "=W T T W", "static_cast<{W}>({1}) * static_cast<{W}>({2}) + {3}"),
    Row(f"<x=fma|mad><m=rn|ftz|noftz>.<T={_FLOATS}|{_PAIRS}>", "=T T T T", "fused<{T}>({1}, {2}, {3})"),
    Row(f"fma<m=rn|ftz>.relu.<T=f16|bf16|{_PAIRS}>", "=T T T T", "at_least_zero(fused<{T}>({1}, {2}, {3}))"),
    Row("fma.<r=rz|rm|rp><m=ftz>.<T=f32>", "=T T T T", "narrowed<float, {r}>(std::fma<double, double, double>({1}, {2}, {3}))"),
    Row("fma.<r=rn|rz|rm|rp><m=ftz>.sat.<T=f32>", "=T T T T", "saturated(narrowed<float, {r}>(std::fma<double, double, double>({1}, {2}, {3})))"),
    Row(f"div.<T={_WHOLE}>", "=T T T", "quotient({1}, {2}, {line})"),
    Row(f"rem.<T={_WHOLE}>", "=T T T", "{1} - quotient({1}, {2}, {line}) * {2}"), Row("div<m=rn|full|approx|ftz>.<T=f32|f64>", "=T T T", "{1} / {2}"),
    Row(f"neg<m=ftz>.<T={_WHOLE}|{_FLOATS}|{_PAIRS}>", "=T T", "negative({1})"), Row(f"abs<m=ftz>.<T={_WHOLE}|{_FLOATS}|{_PAIRS}>", "=T T", "absolute({1})"),
    Row(f"min<m=ftz>.<T={_WHOLE}|{_FLOATS}|{_PAIRS}>", "=T T T", "smaller<{T}>({1}, {2})"),
    Row(f"max<m=ftz>.<T={_WHOLE}|{_FLOATS}|{_PAIRS}>", "=T T T", "larger<{T}>({1}, {2})"),
    Row(f"min<m=ftz>.NaN.<T={_FLOATS}|{_PAIRS}>", "=T T T", "smaller_nan<{T}>({1}, {2})"),
    Row(f"max<m=ftz>.NaN.<T={_FLOATS}|{_PAIRS}>", "=T T T", "larger_nan<{T}>({1}, {2})"),
    Row("max.relu.<T=s32>", "=T T T", "larger<{T}>(larger<{T}>({1}, {2}), 0)"), Row("min.relu.<T=s32>", "=T T T", "larger<{T}>(smaller<{T}>({1}, {2}), 0)"),
    Row("rcp<m=rn|approx|ftz>.<T=f32|f64>", "=T T", "1 / {1}"), Row("sqrt<m=rn|approx|ftz>.<T=f32|f64>", "=T T", "std::sqrt({1})"),
    Row("rsqrt<m=approx|ftz>.<T=f32|f64>", "=T T", "1 / std::sqrt({1})"), Row("ex2<m=approx|ftz>.<T=f32|f16|bf16>", "=T T", "std::exp2(static_cast<float>({1}))"),
    Row(f"ex2<m=approx|ftz>.<T={_PAIRS}>", "=T T", "each({1}, [](float x) {{ return std::exp2(x); }})"),
    Row("lg2<m=approx|ftz>.<T=f32>", "=T T", "std::log2({1})"), Row("tanh<m=approx>.<T=f32|f16|bf16>", "=T T", "std::tanh(static_cast<float>({1}))"),
    Row(f"tanh<m=approx>.<T={_PAIRS}>", "=T T", "each({1}, [](float x) {{ return std::tanh(x); }})"),
    Row("sin<m=approx|ftz>.<T=f32>", "=T T", "std::sin({1})"), Row("cos<m=approx|ftz>.<T=f32>", "=T T", "std::cos({1})"),
    Row("copysign.<T=f32|f64>", "=T T T", "std::copysign({2}, {1})"),
    Row("testp.<x=finite|infinite|number|notanumber>.<T=f32|f64>", "=pred T", "test_{x}({1})"),
    Row("sad.<T=s32|u32>", "=T T T T", "({1} < {2} ? {2} - {1} : {1} - {2}) + {3}"),
    Row("add.cc.<T=u32|s32|u64|s64>", "=T T T", "added({1}, {2}, false, carry)"), Row("addc.cc.<T=u32|s32|u64|s64>", "=T T T", "added({1}, {2}, carry, carry)"),
    Row("addc.<T=u32|s32|u64|s64>", "=T T T", "{1} + {2} + carry"),
)
BITS = (
    *(Row(f"{name}.<T=pred>", "=T T T", code) for name, code in (("and", "{1} && {2}"), ("or", "{1} || {2}"), ("xor", "{1} != {2}"))),
    Row("not.pred", "=pred pred", "!{1}"), Row(f"not.<T={_BITS}>", "=T T", "~{1}"), Row("cnot.<T=b32|b64>", "=T T", "{1} == 0"),
    Row(f"and.<T={_BITS}>", "=T T T", "{1} & {2}"), Row(f"or.<T={_BITS}>", "=T T T", "{1} | {2}"), Row(f"xor.<T={_BITS}>", "=T T T", "{1} ^ {2}"),
    Row(f"shl.<T={_BITS}>", "=T T u32", "shifted_left<{T}>({1}, {2})"), Row(f"shr.<T={_BITS}|{_WHOLE}>", "=T T u32", "shifted_right<{T}>({1}, {2})"),
    Row("shf.l.<x=wrap|clamp>.b32", "=u32 u32 u32 u32", "funnel({1}, {2}, {3}, true, is_{x})"),
    Row("shf.r.<x=wrap|clamp>.b32", "=u32 u32 u32 u32", "funnel({1}, {2}, {3}, false, is_{x})"),
    Row("lop3.b32", "=u32 u32 u32 u32 N", "logic3({1}, {2}, {3}, {4})"), Row("prmt.b32", "=u32 u32 u32 u32", "permuted({1}, {2}, {3})"),
    Row("bfe.<T=u32|s32|u64|s64>", "=T T u32 u32", "extracted<{T}>({1}, {2}, {3})"), Row("bfi.<T=b32|b64>", "=T T T u32 u32", "inserted<{T}>({1}, {2}, {3}, {4})"),
    Row("popc.b32", "=u32 u32", "__builtin_popcount({1})"), Row("popc.b64", "=u32 u64", "__builtin_popcountll({1})"),
    Row("clz.<T=b32|b64>", "=u32 T", "leading_zeros<{T}>({1})"), Row("brev.<T=b32|b64>", "=T T", "reversed<{T}>({1})"),
    Row("bfind<m=shiftamt>.<T=u32|u64>", "=u32 T", "{1} == 0 ? ~0u : 8 * sizeof({T}) - 1 - leading_zeros<{T}>({1})"),
)
COMPARISONS = (
    Row(f"setp.<c={_ORDERINGS}><m=ftz>.<T>", "=D T T", "predicate({0}, is_{c}<{T}>({1}, {2}));"),
    Row(f"setp.<c={_ORDERINGS}>.<x=and|or|xor><m=ftz>.<T>", "=D T T pred", "predicate_{x}({0}, is_{c}<{T}>({1}, {2}), {3});"),
    Row(f"set.<c={_ORDERINGS}><m=ftz>.<D=u32|s32|f32>.<T>", "=D T T", "set({0}, static_cast<{D}>(is_{c}<{T}>({1}, {2}) ? all_ones<{D}> : {D}(0)));"),
    Row("selp.<T>", "=T T T pred", "{3} ? {1} : {2}"), Row("slct<m=ftz>.<T>.s32", "=T T T s32", "{3} >= 0 ? {1} : {2}"),
    Row("slct<m=ftz>.<T>.f32", "=T T T f32", "{3} >= 0 ? {1} : {2}"),
)
CONVERSIONS = (
    Row("cvt<r?=rn|rz><x?=relu><m=satfinite|ftz>.bf16x2.f32", "=bf16x2 f32 f32", "packed<bf16, {r}, {x}>({1}, {2})"),
    Row("cvt<r?=rn|rz><x?=relu><m=satfinite|ftz>.f16x2.f32", "=f16x2 f32 f32", "packed<f16, {r}, {x}>({1}, {2})"),
    Row("cvt.rn.satfinite.<x=e4m3|e5m2>x2.f32", "=u16 f32 f32", "packed_fp8({1}, {2}, fp8_{x})"),
    Row("cvt.rn.satfinite.<x=e4m3|e5m2>x2.f16x2", "=u16 f16x2", "packed_fp8({1}.hi, {1}.lo, fp8_{x})"),
    Row("cvt.rn.f16x2.<x=e4m3|e5m2>x2", "=f16x2 u16", "unpacked_fp8<f16>({1}, bits_{x})"),
    Row("cvt.<m=rna|rn|rz>.tf32.f32", "=f32 f32", "tf32({1})"), Row("cvt<m=rna|rn|rz|satfinite>.tf32.f32", "=f32 f32", "tf32({1})"),
    Row("cvt<r?=rn|rz|rm|rp|rna|rni|rzi|rmi|rpi><m=ftz><s?=sat>.<D>.<S>", "=D S", "convert<{D}, {S}, {r}, {s}>({1})"),
    Row("cvta.to.shared<~=::cta|::cluster>.<T=u64>", "=T T", "shared_of_generic({1}, {line})"),
    Row("cvta.shared<~=::cta|::cluster>.<T=u64>", "=T T", "generic_of_shared({1}, {line})"),
    Row("cvta<m=to>.<q=global|local|param|const>.<T=u64>", "=T T", "{1}"),
    Row("isspacep.shared<~=::cta>", "=pred u64", "is_shared({1})"), Row("isspacep.global", "=pred u64", "!is_shared({1})"),
)
MOVES = (
    Row("mov.<T>", "=T T", "{1}"), Row("mov.<T=b16|b32|b64|b128>", "=V T", "split<{T}>({1}, {0});"), Row("mov.<T=b16|b32|b64|b128>", "=T V", "joined<{T}>({1})"),
    Row(f"ld{_ORDER}.shared<~=::cta|::cluster>{_CACHE}<v?=v2|v4|v8>.<T>", "=L A", "load<{T}>(shared_at({1}, {bytes}, {line}), {0});"),
    Row(f"ld{_ORDER}<q?=global|param|param::entry|local|const>{_CACHE}<v?=v2|v4|v8>.<T>", "=L A *", "load<{T}>(pointer_at({1}, {bytes}, {line}), {0});"),
    Row(f"st{_ORDER}.shared<~=::cta|::cluster>{_CACHE}<v?=v2|v4|v8>.<T>", "A L", "store<{T}>(shared_at({0}, {bytes}, {line}), {1});"),
    Row(f"st{_ORDER}<q?=global|local>{_CACHE}<v?=v2|v4|v8>.<T>", "A L *", "store<{T}>(pointer_at({0}, {bytes}, {line}), {1});"),
    Row("mapa<m=shared::cluster>.<T=u32|u64>", "=T u64 u32", "mapped({1}, {2}, {line})"),
    Row("<x=prefetch|prefetchu|applypriority|discard><any>", "A *", ""), Row("createpolicy<any>.b64", "=u64 *", "uint64_t(0)"),
)
_CHANGES = {"add": "x + {v}", "min": "smaller<{T}>(x, {v})", "max": "larger<{T}>(x, {v})", "and": "x & {v}", "or": "x | {v}", "xor": "x ^ {v}",
            "exch": "{v}", "inc": "x >= {v} ? {T}(0) : {T}(x + 1)", "dec": "x == 0 || x > {v} ? {v} : {T}(x - 1)"}
_CHANGED = {"shared": ".shared<~=::cta|::cluster>", "pointer": "<q?=global>"}


def _atomics() -> tuple[Row, ...]:
    rows = []
    for place, space in _CHANGED.items():
        for name, code in _CHANGES.items():
            at, value = f"{place}_at({{0}}, sizeof({{T}}), {{line}})", code.replace("{v}", "{1}")
            later = at.replace("{0}", "{1}"), code.replace("{v}", "{2}")
            rows.append(Row(f"red{_ORDER}{space}{_ORDER}.{name}<m=noftz>.<T>", "A T *", f"changed<{{T}}>({at}, [&]({{T}} x) {{{{ return static_cast<{{T}}>({value}); }}}});"))
            rows.append(Row(f"atom{_ORDER}{space}{_ORDER}.{name}<m=noftz>.<T>", "=T A T *",
                            f"changed<{{T}}>({later[0]}, [&]({{T}} x) {{{{ return static_cast<{{T}}>({later[1]}); }}}})"))
        rows.append(Row(f"atom{_ORDER}{space}{_ORDER}.cas.<T>", "=T A T T",
                        f"changed<{{T}}>({place}_at({{1}}, sizeof({{T}}), {{line}}), [&]({{T}} x) {{{{ return x == {{2}} ? {{3}} : x; }}}})"))
    return tuple(rows)


_SCOPE = "<m=release|acquire|relaxed|cta|cluster|shared|shared::cta|shared::cluster>"
ASYNCHRONOUS = (
    Row("cp.async.<q=ca|cg>.shared<~=::cta>.global<m=L2::\\w+>", "A A N", "copy_async({0}, {1}, {2}, {2}, {line});"),
    Row("cp.async.<q=ca|cg>.shared<~=::cta>.global<m=L2::\\w+>", "A A N s32 *", "copy_async({0}, {1}, {2}, {3}, {line});"),
    Row("cp.async.commit_group", "", "emulator::commit();"), Row("cp.async.wait_group", "N", "emulator::wait_groups({0});"),
    Row("cp.async.wait_all", "", "wait_all_copies();"),
    Row("cp.async.mbarrier.arrive<x?=noinc><m=shared|shared::cta>.b64", "A", "barrier_arrive_by_copies({0}, {x}, {line});"),
    Row("cp.async.bulk.tensor.<n=1|2|3|4|5>d.shared::<q=cta|cluster>.global<m=tile>.mbarrier::complete_tx::bytes<m=L2::cache_hint>", "A M A *",
        "tensor_load<{n}>({0}, {1}, {2}, 0, {line});"),
    Row("cp.async.bulk.tensor.<n=1|2|3|4|5>d.shared::<q=cta|cluster>.global<m=tile>.mbarrier::complete_tx::bytes.multicast::cluster<m=L2::cache_hint>",
        "A M A u16 *", "tensor_load<{n}>({0}, {1}, {2}, {3}, {line});"),
    Row("cp.async.bulk.tensor.<n=1|2|3|4|5>d.global.shared::cta<m=tile>.bulk_group<m=L2::cache_hint>", "M A *", "tensor_store<{n}>({0}, {1}, {line});"),
    Row("cp.async.bulk.prefetch<any>", "*", ""),
    Row("cp.async.bulk.shared::<q=cta|cluster>.global.mbarrier::complete_tx::bytes<m=L2::cache_hint>", "A A u32 A *", "bulk_load({0}, {1}, {2}, {3}, 0, {line});"),
    Row("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster<m=L2::cache_hint>", "A A u32 A u16 *",
        "bulk_load({0}, {1}, {2}, {3}, {4}, {line});"),
    Row("cp.async.bulk.global.shared::cta.bulk_group<m=L2::cache_hint>", "A A u32 *",
        "bulk_store({0}, {1}, {2}, {line}, [](unsigned char* to, const unsigned char* from, uint32_t n) {{ std::memcpy(to, from, n); }});"),
    Row("cp.reduce.async.bulk.global.shared::cta.bulk_group<m=L2::cache_hint>.add<m=noftz>.<T=f32|f64|f16|bf16|u32|s32|u64>", "A A u32 *",
        "bulk_store({0}, {1}, {2}, {line}, bulk_add<{T}>);"),
    Row("cp.async.bulk.commit_group", "", "kernelgen::tma_store_commit();"), Row("cp.async.bulk.wait_group<m=read>", "N", "emulator::wait_stores({0});"),
    Row("mbarrier.init<m=shared|shared::cta>.b64", "A u32", "barrier_init({0}, {1}, {line});"), Row("mbarrier.inval<any>", "A", ""),
    Row(f"mbarrier.arrive{_SCOPE}.b64", "=u64 A", "barrier_arrive_state({1}, 0, 1, {line})"),
    Row(f"mbarrier.arrive{_SCOPE}.b64", "=u64 A u32", "barrier_arrive_state({1}, 0, {2}, {line})"),
    Row(f"mbarrier.arrive.expect_tx{_SCOPE}.b64", "=u64 A u32", "barrier_arrive_state({1}, {2}, 1, {line})"),
    Row(f"mbarrier.expect_tx{_SCOPE}.b64", "A u32", "barrier_expect({0}, {1}, {line});"), Row(f"mbarrier.complete_tx{_SCOPE}.b64", "A u32", "barrier_expect({0}, -{1}, {line});"),
    Row(f"mbarrier.<q=test_wait|try_wait>.parity{_SCOPE}.b64", "=pred A u32 *", "barrier_passed({1}, {2}, {line})"),
    Row(f"mbarrier.<q=test_wait|try_wait>{_SCOPE}.b64", "=pred A u64 *", "barrier_passed({1}, {2}, {line})"),
)
_ALL = "0xffffffffu"
WARPS = (
    Row("shfl.sync.<x=up|down|bfly|idx>.b32", "=D u32 u32 u32 u32", "shuffle({x}, {1}, {2}, {3}, {4}, {line}, {0});"),
    Row("vote.sync.ballot.b32", "=u32 pred u32", "ballot({2}, {1}, {line})"), Row("vote.sync.any.pred", "=pred pred u32", "ballot({2}, {1}, {line}) != 0"),
    Row("vote.sync.all.pred", "=pred pred u32", "ballot({2}, !{1}, {line}) == 0"),
    Row("vote.sync.uni.pred", "=pred pred u32", "alike(ballot({2}, {1}, {line}), {2})"),
    Row("match.any.sync.<T=b32|b64>", "=u32 T u32", "matching<{T}>({2}, {1}, {line})"),
    Row("match.all.sync.<T=b32|b64>", "=D T u32", "match_all<{T}>({2}, {1}, {line}, {0});"),
    *(Row(f"redux.sync.{name}.<T=s32|u32|b32>", "=T T u32", f"reduced<{{T}}>({{2}}, {{1}}, {{line}}, []({{T}} x, {{T}} y) {{{{ return static_cast<{{T}}>({code}); }}}})")
      for name, code in (("add", "x + y"), ("min", "x < y ? x : y"), ("max", "x < y ? y : x"), ("and", "x & y"), ("or", "x | y"), ("xor", "x ^ y"))),
    Row("elect.sync", "=D u32", "elect({0}, {1}, {line});"), Row("activemask.b32", "=u32", _ALL), Row("bar.warp.sync", "u32", "meet({0}, {line});"),
    Row("<q=bar|barrier><m=cta>.sync<m=aligned>", "u32", "block_sync({0}, {line});"),
    Row("<q=bar|barrier><m=cta>.sync<m=aligned>", "u32 u32", "barrier_sync({0}, {1}, {line});"),
    Row("<q=bar|barrier><m=cta>.arrive<m=aligned>", "u32 u32", "barrier_arrive_named({0}, {1}, {line});"),
    Row("<q=bar|barrier><m=cta>.red.popc<m=aligned>.u32", "=u32 u32 pred", "block_count({2}, {line})"),
    Row("<q=bar|barrier><m=cta>.red.or<m=aligned>.pred", "=pred u32 pred", "block_count({2}, {line}) != 0"),
    Row("<q=bar|barrier><m=cta>.red.and<m=aligned>.pred", "=pred u32 pred", "block_count(!{2}, {line}) == 0"),
    Row("barrier.cluster.arrive<m=release|relaxed|aligned>", "", "cluster_arrive();"), Row("barrier.cluster.wait<m=acquire|aligned>", "", "cluster_wait({line});"),
    Row("<q=fence|membar><any>", "*", ""), Row("griddepcontrol<any>", "", ""), Row("setmaxnreg<any>", "N", ""),
    Row("nanosleep.u32", "u32", "emulator::yield();"), Row("trap", "", "fault({line}, \"a trap\");"), Row("brkpt", "", "fault({line}, \"a break point\");"),
    Row("<q=ret|exit>", "", "return;"), Row("bra<m=uni>", "label", "goto {0};"), Row("pmevent<any>", "N", ""),
)
_X = {"1": 1, "2": 2, "4": 4}
_MMA = (("m16n8k16", 16, "f16|bf16"), ("m16n8k8", 8, "f16|bf16|tf32"), ("m16n8k4", 4, "tf32"), ("m16n8k32", 32, "e4m3|e5m2"))
MATRICES = (
    Row("ldmatrix.sync.aligned.m8n8.x<n=1|2|4><x?=trans>.shared<~=::cta>.b16", "=& A", "load_matrices<{n}>({x}, {line}, {1}, {{{{{0}}}}});"),
    Row("stmatrix.sync.aligned.m8n8.x<n=1|2|4><x?=trans>.shared<~=::cta>.b16", "A V:u32", "store_matrices<{n}>({x}, {line}, {0}, {{{{{1}}}}});"),
    *(Row(f"mma.sync.aligned.{shape}.row.col.f32.<A={types}>.<B={types}>.f32", "=& V:u32 V:u32 V:u32",
          f"multiply<{{A}}, {{B}}, {k}>({{line}}, pointers({{0}}), values({{1}}), values({{2}}), values({{3}}));") for shape, k, types in _MMA),
    *(Row(f"mma.sync.aligned.{shape}.row.col.f16.<A=f16>.<B=f16>.f16", "=& V:u32 V:u32 V:u32",
          f"multiply<{{A}}, {{B}}, {k}>({{line}}, pointers({{0}}), values({{1}}), values({{2}}), values({{3}}));") for shape, k, _ in _MMA[:2]),
    Row("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "=& V:u64 V:u64 V:u64", "multiply_f64({line}, {{{{{0}}}}}, {1}, {2}, {{{{{3}}}}});"),
    Row("wgmma.fence.sync.aligned", "", ""), Row("wgmma.commit_group.sync.aligned", "", "kernelgen::wgmma_commit();"),
    Row("wgmma.wait_group.sync.aligned", "N", "emulator::wait_products({0});"),
    Row("wgmma.mma_async.sync.aligned.m64n<n=\\d+>k16.f32.<A=f16|bf16>.<B=f16|bf16>", "I u64 u64 pred N N N N",
        "{{ static const uint16_t sums[] = {{{0}}}; static const Form form{{sums, nullptr, ({4}) * ({5}), {line}}}; "
        "issue<{A}, {B}, {n}, true, {6} != 0, {7} != 0>(form, {file}, {1}, {2}, {3}); }}"),
    Row("wgmma.mma_async.sync.aligned.m64n<n=\\d+>k16.f32.<A=f16|bf16>.<B=f16|bf16>", "I I u64 pred N N N",
        "{{ static const uint16_t sums[] = {{{0}}}, rows[] = {{{1}}}; static const Form form{{sums, rows, ({4}) * ({5}), {line}}}; "
        "issue<{A}, {B}, {n}, false, false, {6} != 0>(form, {file}, 0, {2}, {3}); }}"),
    Row("wgmma.mma_async.sync.aligned.m64n<n=\\d+>k<k=8|32>.f32.<A=tf32|e4m3|e5m2>.<B=tf32|e4m3|e5m2>", "I u64 u64 pred N N",
        "{{ static const uint16_t sums[] = {{{0}}}; static const Form form{{sums, nullptr, ({4}) * ({5}), {line}}}; "
        "issue<{A}, {B}, {n}, true, false, false>(form, {file}, {1}, {2}, {3}); }}"),
    Row("wgmma.mma_async.sync.aligned.m64n<n=\\d+>k<k=8|32>.f32.<A=tf32|e4m3|e5m2>.<B=tf32|e4m3|e5m2>", "I I u64 pred N N",
        "{{ static const uint16_t sums[] = {{{0}}}, rows[] = {{{1}}}; static const Form form{{sums, rows, ({4}) * ({5}), {line}}}; "
        "issue<{A}, {B}, {n}, false, false, false>(form, {file}, 0, {2}, {3}); }}"),
)
ROWS = (*ARITHMETIC, *BITS, *COMPARISONS, *CONVERSIONS, *MOVES, *_atomics(), *ASYNCHRONOUS, *WARPS, *MATRICES)
