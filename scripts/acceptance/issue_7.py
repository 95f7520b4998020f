"""Selection: SparCas and Quest."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from acceptance.registry import Measured, NotMeasured, at_least, criterion, kvdsl_json

LIVE, TOKENS, DIMS = 32768, 512, 16
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


@lru_cache
def _step(live: int, dtype: str, repeats: int = 11) -> dict[str, Any]:
    return kvdsl_json(
        "bench", "decode", "--policy", "sparcas", "--set", f"tokens={TOKENS}", "--set", f"dims={DIMS}", "--live", str(live),
        "--batch", "1", "--kv-heads", "8", "--group", "4", "--head-dim", "128", "--dtype", dtype, "--repeats", str(repeats),
    )  # fmt: skip


def _speed(dtype: str) -> None:
    what = f"at {LIVE} live tokens, (D, T) = ({DIMS}, {TOKENS}), {dtype}"

    @criterion(7, f"our dense step over SparCas' {what}")
    def _() -> Measured:
        found = _step(LIVE, dtype)
        value, bound, ok = at_least(found["vs_dense"], 5)
        return f"{value:.1f} ({found['dense_ms']:.2f} / {found['ms']:.2f} ms)", bound, ok

    @criterion(7, f"torch SDPA over SparCas' step {what}")
    def _() -> Measured:
        found = _step(LIVE, dtype)
        value, bound, ok = at_least(found["vs_sdpa"], 12)
        return f"{value:.1f} ({found['sdpa_ms']:.2f} / {found['ms']:.2f} ms)", bound, ok

    @criterion(7, f"parts of the step {what} (reported)")
    def _() -> Measured:
        parts = _step(LIVE, dtype)["breakdown"]
        return ", ".join(f"{name.removesuffix('_ms')} {ms:.3f}" for name, ms in parts.items()), "ms", len(parts) > 0


for _dtype in ("fp32", "bf16"):
    _speed(_dtype)


@criterion(7, "slope of the cost against length, 4K to 128K, SparCas over dense, fp32")
def _slope() -> Measured:
    rows = [_step(live, "fp32", 11 if live == LIVE else 5) for live in LENGTHS]
    ours, dense = (_least_squares(LENGTHS, [row[name] for row in rows]) for name in ("ms", "dense_ms"))
    shown = "; ".join(f"{row['live'] // 1024}K {row['ms']:.2f} / {row['dense_ms']:.2f}" for row in rows)
    return f"{ours / dense:.3f} (ms: {shown})", "<= 0.2", ours <= 0.2 * dense


def _least_squares(x: tuple[int, ...], y: list[float]) -> float:
    centre, level = sum(x) / len(x), sum(y) / len(y)
    return sum((a - centre) * (b - level) for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)


@lru_cache
def _sketches() -> dict[str, Any]:
    return kvdsl_json(
        "eval", "sketch", "--selectors", "abs_q,mean_k,random_dims,quest", "--length", "640", "--stretches", "2",
    )  # fmt: skip


@criterion(7, "|q| chooses better than mean(K) and random dims on the reference model (reported)")
def _selectors() -> Measured:
    found = {claim: one for claim, one in _sketches()["findings"].items() if "below" in claim}
    return "; ".join(f"{claim}: {one['held']} of {one['pairs']}" for claim, one in found.items()), "reported", True


@criterion(7, "mask difference by |q| over D = 2 .. 64 (reported)")
def _falls() -> Measured:
    found = _sketches()
    shown = " ".join(f"{row['mask_diff']:.4f}" for row in found["rows"] if row["selector"] == "abs_q")
    falls = found["findings"]["abs_q: mask_diff falls with dims"]
    return f"{shown}: falls in {falls['held']} of {falls['pairs']}", "reported", True


@criterion(7, "on a GPU: over the best dense kernel at 32K")
def _gpu() -> Measured:
    raise NotMeasured(
        "an H200 timed its kernels by themselves, as they were (docs/performance/gpus.md); `make gpu` times them beside dense ones"
    )
