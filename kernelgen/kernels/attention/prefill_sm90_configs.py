"""Configs of attention/prefill_sm90: what there is to choose, and what is chosen by head dim and mask."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    consumers       warpgroups that multiply, each with 64 rows of a tile
    block_k         keys of a tile
    stages          slots of the rings of keys and of values
    pingpong        consumers take turns in multiplying, so that one's softmax runs under another's products
    out_over_query  results leave through the queries' memory, which then has to wait for them
    resident        blocks of an SM
    query_stages    2: the next row tile's queries come while this one's are in use, and its first scores are made beside this one's last product
    """

    consumers: int
    block_k: int
    stages: int = 2
    pingpong: bool = True
    out_over_query: bool = False
    query_stages: int = 1
    resident: int = 1

    def __str__(self) -> str:
        words = f"{self.block_q}x{self.block_k} s{self.stages}"
        return words + (" turns" if self.pingpong else "") + (" overq" if self.out_over_query else "") + (f" q{self.query_stages}" if self.query_stages > 1 else "") + (
            f" r{self.resident}" if self.resident > 1 else "")

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


# (largest head dim, configs for masked calls, for unmasked ones), best first; the last one of each is legal wherever the head dim fits.
TABLE: tuple[tuple[int, tuple[Config, ...], tuple[Config, ...]], ...] = (
    (64, (Config(3, 128), Config(2, 128)), (Config(3, 128), Config(2, 128))),
    (128, (Config(2, 128), Config(2, 96)), (Config(2, 176, out_over_query=True), Config(2, 128))),
    (192, (Config(2, 96, out_over_query=True), Config(2, 80, out_over_query=True)),
     (Config(2, 112, out_over_query=True), Config(2, 80, out_over_query=True))),
    (256, (Config(2, 80, out_over_query=True), Config(2, 64, out_over_query=True)),
     (Config(2, 80, out_over_query=True), Config(2, 64, out_over_query=True))),
)
