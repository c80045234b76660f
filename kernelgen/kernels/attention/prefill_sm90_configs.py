"""Configs of attention/prefill_sm90: what there is to choose, and what is chosen by head dim and mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    consumers       warpgroups that multiply, each with 64 rows of a tile
    block_k         keys of a tile
    stages          slots of the rings of keys and of values
    value_stages    slots of the ring of values where they are not as many; 0: as of keys
    early_keys      keys are given back before the softmax: a weight of inf, which has scores made again, reads them from memory
    pingpong        consumers take turns in multiplying, so that one's softmax runs under another's products
    out_over_query  results leave through the queries' memory, which then has to wait for them
    out_parts       2: results leave in two parts through memory of their own for one: where both do not fit, and queries shall not wait
    resident        blocks of an SM
    diagonal        where rows end to see keys by position: 1 a consumer leaves out tiles that none of its own rows sees, 2 and makes half
                    of the scores of the last one where they see no more; 0 neither
    multicast       1: two blocks, of neighbouring row tiles of a head whose rows all see the same keys, share tiles of keys and values, of
                    which each loads half; 0: none do
    section         MiB of keys and values whose heads' tiles are dealt out together, so that L2 holds them
    pack_gqa        a tile has rows of all query heads which share keys: few queries fill it, and keys are read once for the group
    splits          blocks that divide a row tile's keys; their results are merged by a second kernel. 1: one block has all
    """

    consumers: int
    block_k: int
    stages: int = 2
    pingpong: bool = True
    out_over_query: bool = False
    resident: int = 1
    value_stages: int = 0
    early_keys: bool = False
    diagonal: int = 0
    out_parts: int = 1
    multicast: int = 0
    section: int = 32
    pack_gqa: bool = False
    splits: int = 1
    # Of configs that were stored before these fields went (they were no faster): what they meant by what is left.
    REMOVED: ClassVar[dict[str, int]] = {"query_stages": 1, "polynomial": 0, "uniform": 0, "longest_first": 0}

    def __str__(self) -> str:
        words = f"{self.block_q}x{self.block_k} s{self.stages}" + (f"+{self.value_stages}" if self.value_stages else "")
        words += (" early" if self.early_keys else "") + (f" diag{self.diagonal}" if self.diagonal else "")
        words += f" share{self.multicast}" if self.multicast else ""
        words += (" gqa" if self.pack_gqa else "") + (f" split{self.splits}" if self.splits > 1 else "")
        words += f" {self.section}MiB" if self.section != Config.section else ""
        words += " turns" if self.pingpong else ""
        words += " overq" if self.out_over_query else f" out{self.out_parts}" if self.out_parts > 1 else ""
        return words + (f" r{self.resident}" if self.resident > 1 else "")

    @property
    def value_ring(self) -> int:
        return self.value_stages or self.stages

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return 1 + self.multicast

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def registers(self) -> int:
        """Of a consumer's thread: Sm90Shape::kConsumerRegisters."""
        launch = min(65536 // (self.threads * self.resident) // 8 * 8, 240)
        return min(240, (launch * (self.consumers + 1) - (32 if self.consumers == 3 else 24)) // self.consumers // 8 * 8)

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)


@dataclass(frozen=True)
class Row:
    """``configs``, best first, of head dims up to ``head_dim`` (the larger of D and Dv), of calls with a mask or without one, of up to
    ``keys`` keys (None: any number), and ``idle``: only if tiles of 128 rows would leave half of the SMs without one. The last config of a
    head dim's last row is legal wherever the head dim fits."""

    head_dim: int
    masked: bool
    keys: int | None
    configs: tuple[Config, ...]
    idle: bool = False


# Factors are times of what was in use before (the second or a later config of the row) over those of the first, H200, bf16, 2026-12-01,
# tools/bench/results/h200_prefill_variants.json, unless it says otherwise. Head dims in between were not timed.
#
# D 64, causal. Three blocks of 64 rows on an SM hide each other's beginnings and ends, which are most of a short problem's time:
# 1.16 - 1.38 up to 1k keys, 0.98 at 2k. Four stages and diagonal=1: 1.06 at 4k, 1.04 at 8k, 1.02 at 16k (diagonal=2, whose loop has local
# memory: 1.07, 1.035, 1.01). Without a mask four stages: 1.06, 1.05, 1.04, 1.025, 1.02, 1.01 from 512 to 16k keys.
# D 128, causal: diagonal=2 1.02 - 1.006 up to 2k, 0.995 at 4k; heads dealt out by 64 MiB 1.013 at 8k, 1.008 at 16k. A tile of 64 rows where
# SMs would be idle: 1.125 at 1 x 512. Narrower and wider tiles of keys were slower (tried/h200_prefill_sm90_configs.json).
# D 192/128, causal: early_keys and diagonal=2 1.018 at 4k, with 64 MiB 1.045 at 8k.
# D 256: results in two parts and early_keys 1.012, 1.025, 1.005 at 1k, 4k, 8k, with a multicast 1.007 at 16k; causal, with diagonal=1,
# 1.07, 1.03 at 1k, 4k, with 64 MiB 1.063, 1.072 at 8k, 16k. Over pages, where early_keys spill, rings of three and two stages: 1.01 with 16
# rows, 1.07 with 64 (h200_paged_prefill.json).
_LARGEST = (Config(2, 128), Config(2, 96))
_SINGLE = (Config(1, 128, 3, pingpong=False), *_LARGEST)
_OVER = tuple(Config(2, block_k, out_over_query=True) for block_k in (128, 112, 80))
_WIDE = (Config(2, 80, out_over_query=True), Config(2, 64, out_over_query=True))
_RINGS = Config(2, 64, 3, value_stages=2, out_over_query=True)
_APART = Config(2, 64, early_keys=True, out_parts=2)
_HALVES = Config(2, 128, early_keys=True, diagonal=2, out_over_query=True)
TABLE: tuple[Row, ...] = (
    Row(64, True, 1024, (Config(1, 64, 3, pingpong=False, resident=3), *_LARGEST)),
    Row(64, True, None, (Config(3, 128, 4, diagonal=1), Config(3, 128), *_LARGEST)),
    Row(64, False, 256, _LARGEST),
    Row(64, False, None, (Config(3, 128, 4), Config(3, 128), *_LARGEST)),
    Row(128, True, None, _SINGLE, idle=True),
    Row(128, False, None, _SINGLE, idle=True),
    Row(128, True, 2048, (Config(2, 128, diagonal=2), *_LARGEST)),
    Row(128, True, 4096, _LARGEST),
    Row(128, True, None, (Config(2, 128, section=64), *_LARGEST)),
    Row(128, False, None, _LARGEST),
    Row(192, True, 4096, (_HALVES, *_OVER)),
    Row(192, True, None, (replace(_HALVES, section=64), *_OVER)),
    Row(192, False, None, _OVER),
    Row(256, True, 4096, (replace(_APART, diagonal=1), _RINGS, *reversed(_WIDE))),
    Row(256, True, None, (replace(_APART, diagonal=1, section=64), _RINGS, *reversed(_WIDE))),
    Row(256, False, 8192, (_APART, *_WIDE)),
    Row(256, False, None, (replace(_APART, multicast=1), _APART, *_WIDE)),
)
