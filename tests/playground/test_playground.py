"""The playground: what it asks of the compiler, what it is packed of, and a visit to it in a headless browser."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from kvdsl.compiler import shipped_policies

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import make_playground

ROOT = make_playground.ROOT

POLICY = 'kv 1\n\npolicy Calm {\n  "𝄞 stays."\n  param budget = 8\n  score postion\n}\n'


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    sys.path.insert(0, str(make_playground.SOURCE))
    import page

    yield page
    sys.path.remove(str(make_playground.SOURCE))
    del sys.modules["page"]


def test_findings_have_places_in_utf_16(page: Any) -> None:
    (found,) = json.loads(page.check(POLICY))
    units = POLICY.encode("utf-16-le")
    assert units[2 * found["from"] : 2 * found["to"]].decode("utf-16-le") == "postion"
    assert found | {"from": 0, "to": 0} == {
        "from": 0, "to": 0, "line": 6, "severity": "error", "code": "KV0201", "message": "unknown name `postion`",
        "help": "did you mean `position`?",
    }  # fmt: skip


def test_a_policy_with_errors_has_no_facts_and_no_code(page: Any) -> None:
    assert [json.loads(ask(POLICY)) for ask in (page.explain, page.generate)] == [None, None]
    assert json.loads(page.layout("policy {")) is None


def test_what_is_said_and_made_of_a_policy(page: Any) -> None:
    text = POLICY.replace("postion", "position")
    assert json.loads(page.check(text)) == []
    said = json.loads(page.explain(text))
    assert said["name"] == "Calm"
    assert said["rows"]["keeps"] == ["budget = 8 tokens per KV head, after eviction"]
    assert {"kernels_cpu.cpp", "kernels_triton.py", "kernels_torch.py"} <= json.loads(page.generate(text)).keys()
    assert json.loads(page.layout(text.replace("= 8", "=    8"))) == text


def test_a_word_is_explained_at_its_place(page: Any) -> None:
    text = POLICY.replace("postion", "position")
    said = json.loads(page.hover(text, 5, 10))
    assert (said["from"], said["to"]) == ([5, 8], [5, 16])
    assert "`position`" in said["text"]
    assert json.loads(page.hover(text, 1, 0)) is None


def test_the_language_has_its_words_and_policies(page: Any) -> None:
    known = json.loads(page.language())
    assert "score" in known["keywords"]
    assert "mean" in known["functions"]
    assert "attn" in known["inputs"]
    assert known["policies"].keys() == {path.stem for path in shipped_policies()}


def test_what_is_packed_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kvdsl and of what is pure Python only that; pydantic-core, which is another one in a browser, is this machine's."""
    import pydantic_core

    monkeypatch.setattr(make_playground, "_pydantic_core", lambda: ())
    zipfile.ZipFile(BytesIO(make_playground.python_zip())).extractall(tmp_path)
    (tmp_path / "pydantic_core").symlink_to(Path(pydantic_core.__file__).parent)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import json, page, platform, subprocess, tempfile\n"
        "sys.platform = 'emscripten'  # what Python has loaded by now knows this machine's\n"
        "for text in json.loads(page.language())['policies'].values():\n"
        "    assert all(one['severity'] == 'warning' for one in json.loads(page.check(text)))\n"
        "    assert json.loads(page.explain(text))['rows'] and json.loads(page.generate(text))['cache.py']\n"
        "assert page.hover('kv 1\\n', 0, 0)\n"
    )
    environment = os.environ | {"KVDSL_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


# -- in a browser --------------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = ROOT / "build" / "pictures"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A site with nothing but the playground."""
    missing = [name for name in ("node", "npm") if not shutil.which(name)] + ([] if CHROMIUM else ["chromium"])
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    site = tmp_path_factory.mktemp("site")
    make_playground.make(site / "playground")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/playground/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def seen(address: str) -> Any:
    PICTURES.mkdir(parents=True, exist_ok=True)
    script, playwright = (
        ROOT / "tests" / "playground" / "visit.mjs",
        make_playground.BUILD / "node_modules" / "playwright-core",
    )
    done = subprocess.run(
        ["node", str(script), str(playwright), str(CHROMIUM), address, str(PICTURES)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class TestVisit:
    def test_nothing_fails_and_nothing_is_asked_of_others(self, seen: Any, address: str) -> None:
        assert seen["errors"] == []
        assert seen["requests"]
        assert all(url.startswith((address, "data:", "blob:")) for url in seen["requests"])

    def test_it_begins_with_a_shipped_policy(self, seen: Any) -> None:
        assert seen["first"]["summary"] == "no findings"
        assert "the token with the lowest mean(attn) first" in seen["first"]["explained"]

    def test_an_error_is_marked_named_and_can_be_reached(self, seen: Any) -> None:
        assert seen["wrong"]["summary"] == "1 error"
        assert "unknown function `nrm1`" in seen["wrong"]["list"]
        assert "did you mean `norm1`?" in seen["wrong"]["list"]
        assert seen["wrong"]["marks"] == ["nrm1"]
        assert seen["wrong"]["older"] == "The text has errors: this is the last policy without any."
        assert seen["jumped"]

    def test_once_mended_it_is_gone(self, seen: Any) -> None:
        assert seen["mended"]["summary"] == "no findings" and not seen["mended"]["older"]
        assert seen["mended"]["chosen"] == "", "it is no shipped policy any more"

    def test_words_are_explained(self, seen: Any) -> None:
        assert "the mean; ranges over queries" in seen["hovered"]
        assert "the lowest is evicted first" in seen["explained"]

    def test_what_is_generated(self, seen: Any) -> None:
        assert "static void observe" in seen["generated"]["cpp"]
        assert "triton.jit" in seen["generated"]["triton"]
        assert "def observe(row: View, columns: Columns)" in seen["generated"]["torch"]

    def test_a_link_carries_the_policy(self, seen: Any, address: str) -> None:
        assert seen["link"].startswith(f"{address}#policy=")
        assert "score mean(attn) * norm1(v)" in seen["linked"]["text"]

    def test_a_narrow_screen_is_not_overflown(self, seen: Any) -> None:
        assert seen["linked"]["wide"] <= 390

    def test_nobody_is_kept_out(self, seen: Any) -> None:
        """Contrast in both colours, names of controls, and what else axe-core finds."""
        assert seen["barriers"] == []

    def test_another_policy_can_be_chosen(self, seen: Any) -> None:
        assert "policy SnapKV" in seen["shipped"]

    def test_which_tokens_stay_at_every_moment(self, seen: Any) -> None:
        stays = seen["stays"]
        assert "Rock Crystal" in stays["source"]
        assert "32 of 320 tokens are there" in stays["window"]["said"]
        assert (len(stays["window"]["there"]), stays["window"]["gone"]) == (32, 288)
        assert (len(stays["earlier"]["there"]), stays["earlier"]["gone"]) == (32, 278)
        assert stays["earlier"]["there"][10:] == stays["window"]["there"][:-10], "a window moves with the text"
        assert stays["spoken"].startswith("310 of 320 tokens read")
        assert seen["struck"] == "none", "what has left is faded, and can be read"

    def test_what_is_typed_is_run(self, seen: Any) -> None:
        typed = seen["stays"]["typed"]
        assert typed["name"] == "Typed"
        assert len(typed["there"]) == 32
        assert typed["there"][:-4] != seen["stays"]["earlier"]["there"][:-4]
        assert typed["there"][-4:] == seen["stays"]["earlier"]["there"][-4:]

    def test_another_policy_is_shown_beside_it(self, seen: Any) -> None:
        stays = seen["stays"]
        assert stays["beside"]["name"] == "H2O"
        assert len(stays["beside"]["there"]) == 32
        assert stays["beside"]["there"] != stays["typed"]["there"]

    def test_a_link_carries_both_and_the_moment(self, seen: Any) -> None:
        stays = seen["stays"]
        assert stays["shared"]["mine"] == stays["typed"]
        assert stays["shared"]["beside"] == stays["beside"]
        assert stays["wide"] <= 390

    def test_what_cannot_be_run_says_why(self, seen: Any) -> None:
        assert seen["stays"]["wrong"] == "budget=: write name=number"
        assert "has to give this policy `worth`" in seen["stays"]["refused"]["said"]
        assert seen["stays"]["refused"]["there"] == []
