"""SparCas: how well a few dims of the keys tell which tokens matter, what that costs in quality, and what it saves.

The paper's token budgets are a sixteenth of its 32K tokens, and so is ours of a stretch of text; its 16 dims are an eighth of a head's
128, of the reference model's 64 they are a quarter, for which reason 8 stand beside them.
"""

from kvdsl_lab.reproduce.experiment import Paper
from kvdsl_lab.reproduce.sparcas.selectors import FIGURE1C, FIGURE6B, FIGURE7, FIGURE8, TABLE2A, TABLE2B
from kvdsl_lab.reproduce.sparcas.step import FIGURE5
from kvdsl_lab.reproduce.sparcas.tasks import FIGURE3, TABLE1, TABLE3, TABLE5

PAPER = Paper(
    "sparcas", "SparCas: A Dimension-First Cascade for Efficient Long-Context LLM Inference",
    (FIGURE1C, FIGURE3, TABLE1, FIGURE5, FIGURE6B, TABLE2A, TABLE2B, TABLE3, FIGURE7, FIGURE8, TABLE5),
)  # fmt: skip
