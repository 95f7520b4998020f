"""What `kvdsl build --report` reads from machine code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdsl.runtime.gpu.loops import AMD, NVIDIA, code
from kvdsl.runtime.gpu.report import FITTED
from scripts.gpu import fit
from tests.cli.harness import run

pytestmark = pytest.mark.nightly

SOURCE = """
def outer(n):
    # Over all blocks.
    for block in range(n):
        total = step(block)


def step(block):
    return block
"""

OF_NVIDIA = """
        /*0000*/                   S2R R1, SR_TID.X ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
	//## File "{file}", line 5
        /*0020*/                   LDGSTS.E.BYPASS.128 [R9], [R2.64] ;
        /*0030*/              @!P0 LDG.E R3, [R2.64] ;
        /*0040*/              @!P4 BRA `(.L_x_2) ;
        /*0050*/                   MUFU.EX2 R4, R4 ;
        /*0060*/                   MUFU.EX2 R5, R5 ;
.L_x_2:
        /*0070*/                   HMMA.16816.F32.BF16 R4, R4, R8, RZ ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
	//## File "{file}", line 4
        /*0090*/               @P1 BRA `(.L_x_1) ;
        /*00a0*/               @P2 BRA `(.L_x_0) ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
"""

OF_AMD = """
	.file	1 "{folder}" "{name}"
.LBB0_1:
	.loc	1 5 9                           ; kernel.py:5:9
	s_and_saveexec_b64 s[0:1], vcc
	s_cbranch_execz .LBB0_2
	global_load_dwordx4 v[0:3], v[4:5], off
	global_load_ushort v6, v[4:5], off
.LBB0_2:
	s_cbranch_scc0 .LBB0_3
	v_exp_f32_e32 v1, v1
.LBB0_3:
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_barrier
	.loc	1 4 5                           ; kernel.py:4:5
	s_cbranch_vccnz .LBB0_1
	s_endpgm
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "kernel.py"
    file.write_text(SOURCE)
    return file


def test_a_loop_of_nvidias_without_what_a_branch_skips(source: Path) -> None:
    (found,) = code(OF_NVIDIA.replace("{file}", str(source)), NVIDIA).loops
    assert found.name == "outer: Over all blocks"
    assert (found.instructions, found.loads, found.products, found.barriers) == (6, {128: 1, 32: 1}, 1, 1)
    assert found.loaded(128) == 128 * 20


def test_a_loop_of_amds_with_what_some_lane_does(source: Path) -> None:
    (found,) = code(OF_AMD.replace("{folder}", str(source.parent)).replace("{name}", source.name), AMD).loops
    assert found.name == "outer: Over all blocks"
    assert (found.instructions, found.loads, found.products, found.barriers) == (8, {128: 1, 16: 1}, 1, 1)


def test_a_source_that_is_gone_leaves_the_loop_without_a_name() -> None:
    assert [loop.name for loop in code(OF_NVIDIA.replace("{file}", "/nowhere/gone.py"), NVIDIA).loops] == ["?"]


CHAIN = """
        /*0000*/                   LDG.E R2, desc[UR4][R8.64] ;
        /*0010*/                   LDG.E R3, desc[UR4][R10.64] ;
        /*0020*/                   IADD3 R4, R2, R3, RZ ;
        /*0030*/                   LDG.E.128 R12, desc[UR4][R4.64] ;
        /*0040*/                   FADD R5, R15, R15 ;
        /*0050*/                   ATOMG.E.ADD.STRONG.GPU PT, R6, desc[UR4][R20.64], R7 ;
        /*0060*/                   ISETP.NE.AND P0, PT, R6, RZ, PT ;
        /*0070*/               @!P0 BRA `(.L_x_9) ;
        /*0080*/                   LDG.E R9, desc[UR4][R20.64] ;
        /*0090*/                   EXIT ;
.L_x_9:
        /*00a0*/                   BRA `(.L_x_9);
"""
COPIES = """
.L_x_0:
        /*0000*/                   DEPBAR.LE SB0, {left} ;
        /*0010*/                   LDS.128 R4, [R30] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64], P0 ;
        /*0030*/                   LDGDEPBAR ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
"""


def test_round_trips_that_a_warp_waits_for() -> None:
    """Loads side by side are one, what reads a load's result is another, and an atomic's a third; what nobody needs is none."""
    assert code(CHAIN, NVIDIA).chain == 3


@pytest.mark.parametrize(("left", "trips"), [(0, 1.0), (1, 0.5)])
def test_tiles_in_flight_share_a_round_trip(left: int, trips: float) -> None:
    (loop,) = code(COPIES.format(left=left), NVIDIA).loops
    assert loop.trips == trips


def test_the_constants_are_those_of_the_measurements() -> None:
    """And predict what was held out better than the least two rivals: a constant times the bytes, with and without a launch."""
    made = fit.made()
    assert FITTED["cuda:90"] == made.fitted
    assert made.fitted.median < min(rival.median for rival in made.rivals)
    assert made.fitted.worst < min(rival.worst for rival in made.rivals)


@pytest.mark.parametrize(("target", "terabytes"), [("cuda:90", 4.8), ("hip:gfx942", 5.3)])
def test_the_report(capsys: pytest.CaptureFixture[str], target: str, terabytes: float) -> None:
    words = ("build", "full", "--target", target, "--report", "--slots", "1024", "--json")
    rows = run(capsys, *words).json()["rows"]
    (taken,) = (row["taken"] for row in rows if row["kernel"] == "attend")
    loop = taken["loops"][0]
    assert taken["programs"] >= 1 and taken["buffers"]
    assert (taken["us"] is None) == (target != "cuda:90")
    assert (taken["chain"] is None) == (loop["trips"] is None) == (target != "cuda:90")
    assert loop["per_slot"] > 1 and loop["products"] > 0 and "x128" in loop["loads"]
    slots = 64 * 1024  # of 64 heads, with a key and a value of 256 bytes each, and little else
    assert 512 <= loop["read_us"] * 1e6 * terabytes / slots <= 768


def test_the_loop_over_most_slots_waits_for_no_angles(capsys: pytest.CaptureFixture[str]) -> None:
    """Where few keys turn: a warp waits once per iteration for memory, as where none does, and few more instructions are issued."""
    turns, plain = (
        next(row for row in run(capsys, "build", policy, "--target", "cuda:90", "--report", "--json").json()["rows"])
        for policy in ("streaming_llm", "full")
    )
    ours, theirs = (row["taken"]["loops"][0] for row in (turns, plain))
    assert turns["kernel"] == plain["kernel"] == "attend" and turns["spills"] == 0
    assert ours["trips"] == theirs["trips"] == 1 and ours["per_slot"] < 1.1 * theirs["per_slot"]
    assert turns["taken"]["programs"] == plain["taken"]["programs"]


def test_the_report_as_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = run(capsys, "build", "full", "--target", "cuda:90", "--report").out
    assert "times are lower bounds" in told and "attend takes about" in told and "x64x128xbf16" in told and "combine" in told


def test_nothing_is_known_of_the_chip(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "build", "full", "--target", "cuda:75", "--report")
    assert result.code == 2 and "--report knows cuda:80" in result.err
