"""kvdsl-lab: the laboratory of kvdsl. Evaluations, benchmarks, the papers' tables and figures, the reference model and the books."""

__version__ = "0.1.0"
