"""The papers' tables and figures, and pictures of what policies do."""

from __future__ import annotations

import json
import tempfile

from acceptance.registry import REPO, Measured, NotMeasured, criterion, kvdsl_json

PAPERS = ("roco", "vatp", "sparcas", "equip", "lazy")
MINUTES = 20

# -- papers ------------------------------------------------------------------------------------------------------------


@criterion(9, "all quick runs together, minutes")
def _minutes() -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        runs = [kvdsl_json("reproduce", paper, "--quick", "--out", folder) for paper in PAPERS]
    minutes = sum(found["seconds"] for found in runs) / 60
    return round(minutes, 1), f"< {MINUTES}", minutes < MINUTES


def _claims(paper: str) -> None:
    @criterion(9, f"{paper}: the paper's claims on the reference model, at full sizes (committed result)")
    def _() -> Measured:
        path = REPO / "results" / f"{paper}.json"
        if not path.exists():
            raise NotMeasured(f"run kvdsl reproduce {paper}, and commit results/{paper}.*")
        found = json.loads(path.read_text(encoding="utf-8"))
        claims = [one["holds"] for part in found["experiments"] for one in part["findings"]]
        held, failed = claims.count(True), claims.count(False)
        told = f"{held} hold, {failed} do not, {claims.count(None)} open"
        return told, "each is stated, at full sizes", bool(claims) and found["finished"] and not found["setup"]["quick"]


for _paper in PAPERS:
    _claims(_paper)

# -- measurements ------------------------------------------------------------------------------------------------------


@criterion(9, "MAS is the most consistent score on the reference model (3 budgets, 128 tokens)")
def _mas() -> Measured:
    found = kvdsl_json("eval", "consistency", "--length", "128", "--stretches", "1", "--budgets", "0.3,0.45,0.6")
    others = [f"mas above {name}" for name in ("ltas", "aas", "aqas")]
    value = ", ".join(f"{claim}: {found['findings'][claim]['held']} of 3" for claim in others)
    return value, "all", all(found["findings"][claim]["holds"] for claim in others)


# -- pictures ----------------------------------------------------------------------------------------------------------


# -- others' tasks and packages ----------------------------------------------------------------------------------------


def _peers(what: str, name: str) -> None:
    @criterion(9, f"{what} against kvpress at the same policy, budget, model and run (committed result)")
    def _() -> Measured:
        path = REPO / "benchmarks" / "results" / "cpu" / name
        if not path.exists():
            raise NotMeasured(f"make peers, and commit build/{name} as {path.relative_to(REPO)}")
        found = json.loads(path.read_text(encoding="utf-8"))
        compared = [row for row in found["rows"] if row["by"] == "kvpress" and "tpot_vs_kvdsl" in row]
        told = (REPO / "docs" / "performance" / "peers.md").read_text(encoding="utf-8")
        unnamed = [one for one in found["beaten"] if f"`{one}`" not in told]
        value = f"kvpress takes less in {len(found['beaten'])} of {len(compared)}; of {len(unnamed)} no cause is named"
        return value, "0, or docs/performance/peers.md names the cause", bool(compared) and not unnamed


_peers("TPOT", "peers.json")
_peers("peak memory", "peers_memory.json")
