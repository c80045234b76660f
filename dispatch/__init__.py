"""Dispatch: problem and target in, Decision out. Candidates -> verdicts -> scores; rules are rows of data.

Imported as ``kernelgen.dispatch``.
"""

from kernelgen.dispatch.decision import Candidate, Decision
from kernelgen.dispatch.select import choose, prepare

__all__ = ["Candidate", "Decision", "choose", "prepare"]
