"""A Chromium without a window, asked over a pipe in its DevTools protocol; the standard library only."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
_SECONDS = 120.0
# The protocol is spoken on descriptors 3 and 4.
_START = """import os, sys
ends = [os.dup(os.dup(int(end))) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """Returns the path of a Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a page did while it was opened."""

    errors: tuple[str, ...]
    """From its console, and exceptions."""
    requests: tuple[str, ...]
    """Addresses that were asked for, the page's own among them."""
    width: int
    """Width of all that the page holds."""
    answer: Any
    """What the question to the page returned."""


class Chromium:
    """One browser for many looks."""

    def __init__(self, program: str, folder: Path) -> None:
        """Starts it; its files lie in ``folder``."""
        to_browser, self._send_end = os.pipe()
        self._receive_end, from_browser = os.pipe()
        options = (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-extensions", "--hide-scrollbars",
            f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
        )  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_browser), str(from_browser), program, *options],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ask("Browser.close")
        except (OSError, RuntimeError):
            self._process.kill()
        self._process.wait(timeout=_SECONDS)
        os.close(self._send_end)
        os.close(self._receive_end)

    def look(
        self,
        page: Path,
        *,
        width: int,
        dark: bool,
        question: str = "0",
        picture: Path | None = None,
    ) -> Look:
        """Opens ``page`` in a tab of its own, and asks it a question: an expression of JavaScript."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        tab = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable", tab)
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", tab, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", tab, features=[scheme])
        self._events.clear()
        self._ask("Page.navigate", tab, url=page.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        answer = self._evaluate(tab, question)
        wide = self._evaluate(tab, "document.documentElement.scrollWidth")
        if picture is not None:
            shot = self._ask("Page.captureScreenshot", tab, captureBeyondViewport=True)
            picture.write_bytes(base64.b64decode(shot["data"]))
        seen = [(event["method"], event.get("params", {})) for event in self._events]
        self._ask("Target.closeTarget", targetId=target)
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return Look(
            errors=tuple(json.dumps(said) for method, said in seen if method in kinds),
            requests=tuple(said["request"]["url"] for method, said in seen if method == "Network.requestWillBeSent"),
            width=wide,
            answer=answer,
        )

    def _evaluate(self, tab: str, expression: str) -> Any:
        found = self._ask("Runtime.evaluate", tab, expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._send_end, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while (answer := self._next(until)).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _wait_for(self, method: str) -> None:
        until = time.monotonic() + _SECONDS
        while not any(event["method"] == method for event in self._events):
            self._events.append(self._next(until))

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive_end], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._receive_end, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser ended" if ready else f"the browser said nothing for {_SECONDS:.0f} s")
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(first))
