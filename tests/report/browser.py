"""A page in a real browser, driven over its debugging socket with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CHROMIUM = shutil.which("chromium")
SECONDS = 300.0


class Page:
    """One tab. `problems` are the errors that the page, or its console, reported."""

    def __init__(self, address: str) -> None:
        host, _, path = address.removeprefix("ws://").partition("/")
        name, _, port = host.partition(":")
        self.socket = socket.create_connection((name, int(port)), timeout=SECONDS)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.stream = self.socket.makefile("rb")
        while self.stream.readline().strip():
            pass
        self.number = 0
        self.problems: list[str] = []
        self.events: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        # Whatever else has the focus on this machine, the page takes itself for the one that has.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        self._send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = self._receive()
            if message.get("id") == self.number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def open(self, address: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self.events:
            self._receive()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        end = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.mouse("mousePressed", x0, y0, button="left", clickCount=1)
        self.mouse("mouseMoved", (x0 + x1) / 2, (y0 + y1) / 2, button="left")
        self.mouse("mouseMoved", x1, y1, button="left")
        self.mouse("mouseReleased", x1, y1, button="left", clickCount=1)

    def key(self, name: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(name)
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name)

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def _send(self, text: str) -> None:
        data = text.encode()
        size = (
            struct.pack("!B", 0x80 | len(data))
            if len(data) < 126
            else struct.pack("!BH", 0x80 | 126, len(data))
        )
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self.socket.sendall(b"\x81" + size + mask + masked)

    def _receive(self) -> dict[str, Any]:
        parts = b""
        while True:
            first, second = self.stream.read(2)
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack("!H", self.stream.read(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self.stream.read(8))
            parts += self.stream.read(length)
            if first & 0x80:
                break
        message: dict[str, Any] = json.loads(parts)
        method, params = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"]))
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"]))
        return message


@contextmanager
def browser() -> Iterator[Page]:
    """A headless Chromium with one tab."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as home:
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += [f"--user-data-dir={home}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            told = Path(home) / "DevToolsActivePort"
            end = time.monotonic() + SECONDS
            while not (told.exists() and told.read_text().strip()):
                assert process.poll() is None and time.monotonic() < end, "chromium did not start"
                time.sleep(0.05)
            port = told.read_text().split()[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                tab = next(tab for tab in json.load(answer) if tab["type"] == "page")
            page = Page(tab["webSocketDebuggerUrl"])
            try:
                yield page
            finally:
                page.stream.close()
                page.socket.close()
        finally:
            process.terminate()
            process.wait(SECONDS)
            for _ in range(100):  # its children may still be writing to their folder
                if not any(Path(home).iterdir()):
                    break
                shutil.rmtree(home, ignore_errors=True)
                Path(home).mkdir(exist_ok=True)
                time.sleep(0.02)
