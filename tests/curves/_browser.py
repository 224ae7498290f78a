"""Headless Chromium that a test drives: the DevTools protocol over a pipe, without a library."""

import contextlib
import json
import os
import shutil
import subprocess

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
MISSING = "needs Chromium: apt-get install chromium"
_KEYS = {"Tab": 9, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


class Page:
    """A page, and everything that it wrote to the console."""

    def __init__(self, reads, writes):
        self._reads, self._writes, self._rest, self._count = reads, writes, b"", 0
        self._session, self.events = None, []
        (target,) = [
            one["targetId"]
            for one in self.call("Target.getTargets")["targetInfos"]
            if one["type"] == "page"
        ]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """A command of the protocol; its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self):
        while b"\0" not in self._rest:
            data = os.read(self._reads, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        answer, _, self._rest = self._rest.partition(b"\0")
        return json.loads(answer)

    def open(self, uri):
        """Load a page completely."""
        self.call("Page.navigate", url=uri)
        while not any(one.get("method") == "Page.loadEventFired" for one in self.events):
            self.events.append(self._read())

    def ask(self, script):
        """The value of an expression, after two frames have been drawn."""
        frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        found = self.call(
            "Runtime.evaluate",
            expression=f"{frames}.then(() => ({script}))",
            awaitPromise=True,
            returnByValue=True,
        )
        return found["result"].get("value")

    def press(self, key):
        """Press and release a key, as a keyboard does."""
        text = {"text": key} if len(key) == 1 else {}
        code = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0]))}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    @property
    def console(self):
        """What the page and the browser said about it."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [one["params"] for one in self.events if one.get("method") in kinds]


@contextlib.contextmanager
def browser(folder):
    """A page of a browser that ends with the block."""
    to_it, from_it = os.pipe(), os.pipe()
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
               f"--user-data-dir={folder}", "--window-size=1280,2400", "--remote-debugging-pipe",
               "about:blank"]  # fmt: skip
    # The protocol is on the descriptors 3 and 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_it[0]} 4>&{from_it[1]}', "bash", *command]
    process = subprocess.Popen(
        shell,
        pass_fds=(to_it[0], from_it[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_it[0])
    os.close(from_it[1])
    try:
        page = Page(from_it[0], to_it[1])
        yield page
        page.call("Target.getTargets")
    finally:
        os.close(to_it[1])  # which ends it
        os.close(from_it[0])
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
