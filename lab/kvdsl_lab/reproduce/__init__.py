"""`kvdsl reproduce PAPER`: a paper's tables and figures, measured on a model of the user's choice.

One module or package for each paper, `kvdsl_lab.reproduce.NAME`, holds one `PAPER`; a line in `PAPERS` makes it known. It says what is
measured and what it is compared with; running, resuming, saving, tables and pictures are this package's business:

    def _cells(setup: Setup) -> Iterator[Cell]:            # cheap: it is asked for before anything is loaded
        for budget in setup.size(full=(64, 128, 256), quick=(32,)):
            yield Cell(f"budget {budget}", partial(_perplexities, budget=budget))

    def _perplexities(setup: Setup, budget: int) -> list[Row]:
        ids = windows(setup.tokenizer, setup.text, setup.size(1024, 128), setup.size(8, 1))
        return [{"policy": "roco", "budget": budget, "ppl": 12.3}, ...]

    def _draw(figure: Figure, rows: Sequence[Row]) -> None:
        plots.lines(figure.subplots(), rows, x="budget", y="ppl", by="policy")

    def _findings(rows: Sequence[Row]) -> list[Finding]:
        return [Finding("RoCo is below H2O at every budget", holds=True, measured="3 of 3")]

    PAPER = Paper("roco", "On the Efficacy of Eviction Policy ... (Ren and Zhu, 2024)", (
        Experiment("figure5", "Perplexity against the budget", "Figure 5", _cells,
                   says="RoCo is lowest at every budget.", findings=_findings, plot=_draw),
    ))

- A `Cell` is what a killed run loses at most: a few seconds, at most a minute or two. Its name is unique within the experiment, and
  its function is called with the `Setup`; it imports torch and what else it needs when it is called, and gives rows: flat dicts of
  strings, numbers and None, of which all rows of an experiment have the same keys. Round them; JSON has no NaN.
- `Setup` has the sizes' switch (`quick`: toy sizes, all experiments of a paper in about a minute), the model, its tokenizer and the text
  (each loaded at its first use), the seed, and how often a time is taken (`repeats`). Cells may share what is costly through a
  `functools.lru_cache` on a function of the setup, which is hashable.
- `findings` says for each claim of the paper whether it holds of the rows, with the measured figures in words: `holds` is None where the
  sizes leave it open. Nothing is asserted: what does not hold is told.
- `table` may turn the rows into those that a reader sees (`tables.pivot`); the JSON has them as measured.
- `plot` draws into a matplotlib figure without a display; it is imported by then, and only then.

The result is `OUT/NAME.json` (as `run.py` says), `OUT/NAME.md`, `OUT/NAME.tex` and `OUT/NAME/EXPERIMENT.{png,svg}`.
"""

from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Paper, Row, Setup

__all__ = ["PAPERS", "Cell", "Experiment", "Finding", "Paper", "Row", "Setup"]

PAPERS = {
    "roco": "RoCo: scores, scopes and policies, by what they cost in text and perplexity",
    "equip": "EQUIP: new tokens overwrite the evicted ones in place",
    "lazy": "lazy pruning, slack and staged eviction on top of StreamingLLM",
    "vatp": "VATP: attention weighted by the norm of the value that it brings",
    "sparcas": "SparCas: tokens are selected by a few dims of the keys",
}
"""Name -> one line of help. `kvdsl_lab.reproduce.NAME` holds the `PAPER`."""
