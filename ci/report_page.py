"""Open a report's page in a real browser: measure, use it as a person does, and take pictures to look at.

    python ci/report_page.py REPORT [--pictures FOLDER] [--chromium COMMAND]

Needs Chromium (Debian's package `chromium`) and nothing else: the script speaks the DevTools protocol over
two pipes. It prints what it measured, and exits with 1 if the page is slow (a second for the median of five),
logs an error, asks the network for anything, or does not answer a click, a key or the search. It does all of
this once more with a report whose texts hold markup and scripts. The pictures are for people: light, dark and
on paper, wide and as wide as a phone. No test runs this, because CI has no browser: the tests read the HTML,
and see neither what the script does nor what the page looks like.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvconform.report import document, page

MOST_SECONDS, RUNS, DEADLINE = 1.0, 5, 60.0
FLAGS = """--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
--disable-component-update --disable-sync --remote-debugging-pipe""".split()
SIZES = {"wide": (1200, 900), "phone": (390, 844)}
LOOKS = {
    "light": {"features": [{"name": "prefers-color-scheme", "value": "light"}]},
    "dark": {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
    "print": {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]},
}
MARKUP = (
    "\"'><script>window.broken=1</script><img src=x onerror=window.broken=1></script><script>window.broken=1"
    "</script><a href='javascript:window.broken=1'><!--<style>*{display:none}</style>\u202e\u2028"
)
ENUMERATED = {"outcome", "case_outcome", "level", "features", "declaration_rule"}  # keys without free text


class Browser:
    """Chromium, driven through its pipes: messages are JSON, each ends with a zero byte."""

    def __init__(self, send: int, receive: int):
        self.send, self.receive = os.fdopen(send, "wb", 0), os.fdopen(receive, "rb", 0)
        self.number, self.session, self.events, self.rest = 0, "", list[dict[str, Any]](), b""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.send.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.receive], [], [], DEADLINE)
            if not ready:
                raise SystemExit(f"chromium has sent nothing for {DEADLINE:.0f} s")
            part = self.receive.read(1 << 16)
            if not part:
                raise SystemExit("chromium ended")
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.read())

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise SystemExit(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, address: str) -> float:
        """Return the seconds from the call to the end of the first frame after the load."""
        self.call("Page.navigate", url="about:blank")
        self.wait_for("Page.loadEventFired")
        self.events.clear()
        started = time.perf_counter()
        self.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired")
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.perf_counter() - started

    def key(self, name: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **more
            )


@contextmanager
def browser(command: str) -> Iterator[Browser]:
    """A browser with a page and a folder of its own; both go whatever happens."""
    profile = tempfile.mkdtemp(prefix="kvconform-browser-")
    (to_read, to_send), (to_receive, to_write) = os.pipe(), os.pipe()
    shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", command, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_read, to_write),
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": profile},
        start_new_session=True,  # its many processes end together
    )
    os.close(to_read)
    os.close(to_write)
    one = Browser(to_send, to_receive)
    try:
        target = one.call("Target.createTarget", url="about:blank")["targetId"]
        one.session = one.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            one.call(f"{domain}.enable")
        yield one
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE)
        one.send.close()
        one.receive.close()
        shutil.rmtree(profile, ignore_errors=True)


def faults(one: Browser, address: str) -> list[str]:
    """What the browser noticed while the page was open: errors, dialogs, and requests for other addresses."""
    found = []
    for event in one.events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            found.append(f"exception: {params['exceptionDetails'].get('exception', {}).get('description')}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            found.append(f"error: {params['entry']['text']}")
        elif method == "Page.javascriptDialogOpening":
            found.append(f"dialog: {params['message']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"].partition("#")[0]
            found += [f"request: {url}"] if url not in (address, "about:blank") else []
    return found


def use(one: Browser, report: document.Report) -> list[str]:
    """Search, filter, and open a result and a cause as a person does. Returns what did not work."""
    wrong = []

    def expect(what: str, expression: str) -> None:
        if one.evaluate(expression) is not True:
            wrong.append(f"{what}: {expression}")

    count, first = len(report.results), report.results[0]
    shown = "document.getElementById('found').textContent"
    expect("all results are found", f"{shown} === '{count} of {count} results'")
    one.evaluate(f"document.forms[0].elements.text.value = {json.dumps(first.id)}")
    one.evaluate("document.forms[0].dispatchEvent(new Event('input'))")
    expect(
        "the search", f"new Promise((r) => setTimeout(r, 300)).then(() => {shown} === '1 of {count} results')"
    )
    one.evaluate("document.querySelector('.result summary').focus()")
    one.key("Enter", 13, "\r")
    expect("Enter opens a result", "document.querySelector('.result').open")
    opened = "document.querySelector('.result .sections') !== null"
    expect("it has sections", f"new Promise((r) => setTimeout(r, 100)).then(() => {opened})")
    one.evaluate("document.forms[0].reset()")
    one.evaluate("document.querySelector('a.square').click()")
    expect(
        "a square filters", f"new Promise((r) => setTimeout(r, 100)).then(() => !{shown}.startsWith('0 '))"
    )
    expect("the heading has the focus", "document.activeElement.id === 'results'")
    if report.verdict.causes:
        one.evaluate("document.querySelector('.cause summary').click()")
        expect("a cause opens", "document.querySelector('.cause').open")
    expect("nothing is wider than the page", "document.documentElement.scrollWidth <= innerWidth")
    return wrong


def take_pictures(one: Browser, address: str, folder: Path) -> list[str]:
    """Write a picture for each size and look. Returns in which the page is too wide."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong = []
    for size, (width, height) in SIZES.items():
        for look, media in LOOKS.items():
            one.call("Emulation.setEmulatedMedia", **({"media": ""} | media))
            one.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=size == "phone",
            )
            one.open(address)
            one.evaluate("document.querySelectorAll('.cause').forEach((cause, n) => (cause.open = n < 1))")
            data = one.call("Page.captureScreenshot", captureBeyondViewport=True, clip=whole(one))["data"]
            file = folder / f"{size}-{look}.png"
            file.write_bytes(base64.b64decode(data))
            print(f"picture  {file}")
        if one.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wrong.append(f"the page is wider than {size}")
    return wrong


def hostile(report: document.Report) -> document.Report:
    """Return a report with the first results of this one, and markup in all their texts."""

    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: spoil(each, name) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [spoil(each, key) for each in value]
        return value + MARKUP if isinstance(value, str) and value and key not in ENUMERATED else value

    results = msgspec.convert(
        spoil(msgspec.to_builtins(report.results[:200])), tuple[document.CaseResult, ...]
    )
    spoiled = msgspec.structs.replace(
        report, results=results, troubles=(MARKUP,), environment={MARKUP: MARKUP}
    )
    return msgspec.structs.replace(spoiled, verdict=document.recompute_verdict(spoiled))


def whole(one: Browser) -> dict[str, float]:
    size = one.call("Page.getLayoutMetrics")["cssContentSize"]
    return {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--chromium", default="chromium")
    options = parser.parse_args()
    if shutil.which(options.chromium) is None:
        print(f"there is no {options.chromium} here; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    report = document.read(options.report)
    with tempfile.TemporaryDirectory() as folder, browser(options.chromium) as one:
        file = page.write(report, Path(folder) / page.FILE)
        address = file.as_uri()
        seconds = [one.open(address) for _ in range(RUNS)]
        print(f"results  {len(report.results)}, page of {file.stat().st_size / 1e6:.2f} MB")
        print(f"opens in {', '.join(f'{each:.2f}' for each in seconds)} s")
        wrong = use(one, report)
        if statistics.median(seconds) > MOST_SECONDS:
            wrong.append(f"the page opens in {statistics.median(seconds):.2f} s")
        wrong += faults(one, address)
        spoiled = hostile(report)
        page.write(spoiled, file)
        one.open(address)
        wrong += [f"hostile texts: {each}" for each in [*use(one, spoiled), *faults(one, address)]]
        elements = "document.querySelectorAll('script, style, img, a[href^=javascript]').length"
        if one.evaluate(f"window.broken === undefined && {elements} === 3") is not True:
            wrong.append("a hostile text has become a part of the page")
        page.write(report, file)
        if options.pictures:
            wrong += take_pictures(one, address, options.pictures)
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
