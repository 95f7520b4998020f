"""A policy's source, stated in a fixed form in the last paragraph of its docstring.

    paper: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction ..."
    year: 2025, arXiv 2504.15364
    reach: exact
    kvpress: KeyDiffPress
    checked: formula, kvpress
    code: differs: each query head chooses

`paper: no paper` means that there is none. `reach` compares the policy with the paper's formula: `exact`, or `approximate:` and how.
`code` compares it with the authors' code at its defaults (`AGREEMENTS`); without it they were not compared. `method` names the
published method if it is not the policy's name; several policies may implement one. A value continues on the next line unless that
starts with a key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvdsl.errors import KvdslError

CHECKS = {
    "language": "by tests in the language, next to it",
    "formula": "by brute force of its formula (`tests/interp/test_papers.py`, `tests/gallery/test_formulas.py`)",
    "kvpress": "by the kept sets of kvpress's press (`tests/integrations/test_presses.py`)",
}
"""How a policy can be checked, by the word of `checked`."""

NOT_COMPARED = "not compared"
AGREEMENTS = {
    "same": "it keeps, or attends to, the same tokens",
    "same with": "it does so under the following conditions",
    "differs:": "it does not, in the following way",
    "none released": "there is no public code",
    NOT_COMPARED: "not compared",
}
"""The first words of `code`. `same`, `none released` and `not compared` stand alone."""

_KEYS = ("paper", "year", "method", "reach", "kvpress", "checked", "code")
_NEEDED = ("paper", "reach", "checked")
_NO_PAPER = "no paper"
_LINE = re.compile(rf"({'|'.join(_KEYS)}):\s+(.*)")
_YEAR = re.compile(r"(\d{4})(?:, arXiv (\d{4}\.\d{5}))?")
_APPROXIMATE = "approximate: "
_AGREEMENT = re.compile(rf"same|same with \S.*|differs: \S.*|none released|{NOT_COMPARED}")


@dataclass(frozen=True)
class Provenance:
    """The source of a policy.

    Attributes:
        paper: authors and title; None without a paper.
        year: of the paper, or of the code; None if it was never published.
        methods: the published methods that it implements, by name.
        arxiv: the paper's number there, if it is known.
        how: how it differs from the method; None if it is exact.
        presses: the equivalent classes of kvpress.
        checks: words of `CHECKS`.
        code: the comparison with the authors' code, in the form of `AGREEMENTS`.
    """

    paper: str | None
    year: int | None
    arxiv: str | None
    methods: tuple[str, ...]
    how: str | None
    presses: tuple[str, ...]
    checks: tuple[str, ...]
    code: str = NOT_COMPARED

    @property
    def exact(self) -> bool:
        """Whether it is exactly the method."""
        return self.how is None


def prose(doc: str) -> str:
    """Return a docstring without its source."""
    text, _ = _parted(doc)
    return text


def fields(doc: str) -> dict[str, str]:
    """Return the source's fields as written; empty if a docstring states none."""
    found: dict[str, str] = {}
    key = "paper"
    for line in _parted(doc)[1].splitlines():
        begun = _LINE.fullmatch(line.strip())
        if begun is not None:
            key, value = begun.groups()
            found[key] = value
        else:
            found[key] += f" {line.strip()}"
    return found


def provenance(name: str, doc: str) -> Provenance | None:
    """Return the source of a policy of this name; None if it states none.

    Raises:
        KvdslError: if a field is missing or malformed.
    """
    found = fields(doc)
    if not found:
        return None
    missing = [key for key in _NEEDED if key not in found]
    if missing:
        raise KvdslError(f"{name} states its source, but has no `{missing[0]}:`")
    year = _YEAR.fullmatch(found.get("year", ""))
    if year is None and "year" in found:
        raise KvdslError(f"{name}: `year: {found['year']}` is not of the form `2025` or `2025, arXiv 2504.15364`")
    reach = found["reach"]
    if reach != "exact" and not reach.startswith(_APPROXIMATE):
        raise KvdslError(f"{name}: `reach: {reach}` is neither `exact` nor `{_APPROXIMATE}` with how")
    checks = _listed(found["checked"])
    unknown = [check for check in checks if check not in CHECKS]
    if unknown:
        raise KvdslError(f"{name}: there is no check `{unknown[0]}`; there are {', '.join(CHECKS)}")
    code = found.get("code", NOT_COMPARED)
    if _AGREEMENT.fullmatch(code) is None:
        raise KvdslError(f"{name}: `code: {code}` has none of the forms {', '.join(f'`{form}`' for form in AGREEMENTS)}")
    return Provenance(
        paper=None if found["paper"].startswith(_NO_PAPER) else found["paper"],
        year=None if year is None else int(year[1]),
        arxiv=None if year is None else year[2],
        methods=_listed(found.get("method", name)),
        how=None if reach == "exact" else reach.removeprefix(_APPROXIMATE),
        presses=_listed(found.get("kvpress", "")),
        checks=checks,
        code=code,
    )


def _parted(doc: str) -> tuple[str, str]:
    """Return a docstring's prose, and its last paragraph if that has the form of a source."""
    *before, last = re.split(r"\n\s*\n", doc.strip())
    return ("\n\n".join(before), last) if before and last.strip().startswith("paper: ") else (doc.strip(), "")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
