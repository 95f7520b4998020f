"""EQUIP: what it saves that a new token overwrites the evicted one, where others move the whole cache together.

Layers are of published shapes with random weights, and everything runs where the user is: the paper's servers and GPUs stand beside the
figures for comparison. Not here: several instances side by side.
"""

from kvdsl_lab.reproduce.equip.lengths import FIGURE3, FIGURE10
from kvdsl_lab.reproduce.equip.pruning import TABLE3
from kvdsl_lab.reproduce.equip.races import CORES, FIGURE4, FIGURE7, TABLE1, TABLE2
from kvdsl_lab.reproduce.equip.turning import TABLE6
from kvdsl_lab.reproduce.equip.unrotated import BIASED_SPEED, EQUAL, TABLE4
from kvdsl_lab.reproduce.equip.updates import TABLE5
from kvdsl_lab.reproduce.experiment import Paper

PAPER = Paper(
    "equip", "EQUIP: EQUivariant preserving In-Place updates for Efficient Token Pruning",
    (FIGURE3, FIGURE4, FIGURE7, CORES, FIGURE10, TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, EQUAL, BIASED_SPEED), reads_text=False,
)  # fmt: skip
