"""Verdicts: what a backend or kernel says when asked whether it can run a problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """``ok`` or the reason against, which names the offending value and the limit. ``reason`` may also comment a yes."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def yes(comment: str = "") -> Verdict:
    return Verdict(True, comment)


def no(reason: str) -> Verdict:
    return Verdict(False, reason)


def first_no(*checks: tuple[bool, str]) -> Verdict:
    """The first failing (condition, reason) as a verdict, else yes. Reasons are cheap f-strings: build them eagerly."""
    for passed, reason in checks:
        if not passed:
            return Verdict(False, reason)
    return Verdict(True)
