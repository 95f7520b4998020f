"""A headless Chromium that does what a reader's hands would do, through its WebDriver (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key under which the protocol hands out elements."""
KEYS = {"left": "\ue012", "right": "\ue014", "home": "\ue011", "end": "\ue010"}


CONTRAST = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
};
const over = (top, below) => below.map((under, i) => i < 3 ? top[i] * top[3] + under * (1 - top[3]) : 1);
const layers = (node) => {
  const style = getComputedStyle(node);
  const gradient = /rgba?\\([^)]*\\)/.exec(style.backgroundImage);
  return [rgba(style.backgroundColor), ...(gradient ? [rgba(gradient[0])] : [])];
};
const behind = (node) => layers(node).reduce((below, top) => over(top, below), node.parentElement ? behind(node.parentElement) : page);
const page = rgba(getComputedStyle(document.documentElement).colorScheme && matchMedia('(prefers-color-scheme: dark)').matches
  ? getComputedStyle(Object.assign(document.body.appendChild(document.createElement('i')), {style: 'color: Canvas'})).color : 'white');
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const least = (selector) => Math.min(...[...document.querySelectorAll(selector)].filter((node) => node.textContent.trim()).map((node) => {
  const ground = behind(node), ink = over(rgba(getComputedStyle(node).color), ground);
  const [low, high] = [light(ground), light(ink)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}))
"""
"""What a page is asked for the contrast of its text: colours that are partly clear lie over each other, down to the page's own."""


class Browser:
    """A session; every method is a command of the protocol."""

    def __init__(self, port: int, profile: Path) -> None:
        self._address = f"http://127.0.0.1:{port}/session"
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
            "--window-size=1280,1000", f"--user-data-dir={profile}",
        ]  # fmt: skip
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self._address += "/" + self._send("", {"capabilities": wanted})["sessionId"]

    def _send(self, path: str, body: Any = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=90) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as refusal:
            raise RuntimeError(json.load(refusal)["value"]["message"]) from refusal

    def open(self, page: Path) -> None:
        self._send("/url", {"url": page.as_uri()})

    def find(self, selector: str) -> str:
        found: str = self._send("/element", {"using": "css selector", "value": selector})[ELEMENT]
        return found

    def text(self, selector: str) -> str:
        """What a reader sees of it."""
        found: str = self._send(f"/element/{self.find(selector)}/text", method="GET")
        return found

    def type(self, selector: str, *keys: str) -> None:
        """Press keys, by their name in KEYS, or text."""
        self._send(f"/element/{self.find(selector)}/value", {"text": "".join(KEYS.get(key, key) for key in keys)})

    def point_at(self, selector: str) -> None:
        """Move the mouse over it, wherever on the page it is."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        move = {"type": "pointerMove", "origin": {ELEMENT: self.find(selector)}, "x": 0, "y": 0}
        self._send("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def run(self, script: str) -> Any:
        return self._send("/execute/sync", {"script": script, "args": []})

    @contextmanager
    def sized(self, width: int, height: int) -> Iterator[None]:
        """A window of so many pixels, or a phone's screen."""
        self._devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        try:
            yield
        finally:
            self._devtools("Emulation.clearDeviceMetricsOverride")

    @contextmanager
    def colours(self, scheme: str) -> Iterator[None]:
        """What the system prefers: `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", features=features)
        try:
            yield
        finally:
            self._devtools("Emulation.setEmulatedMedia", features=[])

    def _devtools(self, command: str, **params: Any) -> None:
        self._send("/goog/cdp/execute", {"cmd": command, "params": params})

    def contrast(self, selector: str) -> float:
        """The least contrast of text with what is behind it, by WCAG 2.2, over all that a selector finds and that has text."""
        found: float = self.run(f"{CONTRAST}; return least({json.dumps(selector)})")
        return found

    def complaints(self) -> list[Any]:
        """What the page's console has: errors, and what could not be fetched."""
        found: list[Any] = self._send("/se/log", {"type": "browser"})
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("/screenshot", method="GET")))

    def close(self) -> None:
        self._send("", method="DELETE")


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile."""
    driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        port = next(found[1] for line in driver.stdout if (found := re.search(r"started successfully on port (\d+)", line)))
        session = Browser(int(port), profile)
        try:
            yield session
        finally:
            session.close()
    finally:
        driver.terminate()
        driver.wait()
