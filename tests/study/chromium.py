"""A headless Chromium that is spoken to through a pipe (Chrome DevTools Protocol): what a page
does, and asks for.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.lacking import skip
from tests.waiting import HANG_SECONDS, wait_until

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ),
    *("--remote-debugging-pipe", "--window-size=1500,2000"),
)


def chromium() -> str:
    """The program; without it the test is skipped."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        skip("chromium is not installed; apt-get install chromium")
    return program


class Browser:
    """One page of a browser of its own; use it in a with block."""

    def __init__(self, profile: Path) -> None:
        # chromium reads at descriptor 3 and writes to 4: both are made from numbers that cannot be
        # those
        (read, commands), (answers, write) = os.pipe(), os.pipe()
        inner = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20) for descriptor in (read, write)]
        script = f'exec "$0" "$@" 3<&{inner[0]} 4>&{inner[1]}'
        command = ["bash", "-c", script, chromium(), *FLAGS, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(command, pass_fds=inner, stderr=subprocess.DEVNULL)
        for descriptor in (read, write, *inner):
            os.close(descriptor)
        self._commands, self._answers = commands, answers
        self._left, self._calls, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come meanwhile are kept."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + HANG_SECONDS
        while True:
            answer = self._next(until - time.monotonic())
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._answers], [], [], max(seconds, 0))
            assert ready, f"chromium does not answer within {HANG_SECONDS:g} s"
            got = os.read(self._answers, 1 << 20)
            assert got, "chromium has ended"
            self._left += got
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path, until: str) -> None:
        """Loads a file and waits until the expression holds."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        shown = f"document.readyState === 'complete' && Boolean({until})"

        def is_shown() -> bool:
            assert not self.of("Runtime.exceptionThrown"), self.of("Runtime.exceptionThrown")
            return bool(self.value(shown))

        wait_until(is_shown, f"{until} of {path.name}")

    def of(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of one kind."""
        return [event["params"] for event in self.events if event.get("method") == method]
