"""Chromium and Firefox without a screen, told what to do by what they bring themselves."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time

import pytest


def _program(*names):
    found = next(filter(None, map(shutil.which, names)), None)
    return found or pytest.skip(f"needs {names[0]}")


class Chromium:
    """By the DevTools protocol through pipes: 3 to read commands from, 4 to write to."""

    def __init__(self, profile):
        command = [_program("chromium", "google-chrome"), "--headless=new", "--no-sandbox"]
        command += ["--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        read, self._commands = os.pipe()
        answers, write = os.pipe()
        shell = f'exec "$@" 3<&{read} 4>&{write}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read), os.close(write)
        self._answers = os.fdopen(answers, "rb")
        self._count, self.errors, self._session = 0, [], {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        found = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            text = b""
            while not text.endswith(b"\0"):
                text += self._answers.read(1) or pytest.fail("Chromium has ended")
            told = json.loads(text[:-1])
            if told.get("id") == self._count:
                assert "error" not in told, told
                return told["result"]
            if told["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(told["params"])
            elif told["method"] == "Runtime.consoleAPICalled":
                self.errors.append(told["params"]["args"])

    def open(self, url):
        self.send("Page.navigate", url=url)
        while not self.run(f"location.href === {url!r} && document.readyState === 'complete'"):
            time.sleep(0.05)

    def run(self, expression):
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


class Firefox:
    """By Marionette: a number of bytes, a colon, and JSON, both ways."""

    errors = ()

    def __init__(self, profile):
        command = [_program("firefox", "firefox-esr"), "--headless", "--marionette"]
        (profile / "user.js").write_text('user_pref("marionette.port", 0);\n')
        command += ["--no-remote", "--profile", str(profile)]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, start_new_session=True, **quiet)
        port, ends = profile / "MarionetteActivePort", time.monotonic() + 60
        while not (port.is_file() and port.read_text()):
            assert time.monotonic() < ends, "Firefox does not answer"
            time.sleep(0.1)
        self._socket = socket.create_connection(("127.0.0.1", int(port.read_text())))
        self._count, self._stream = 0, self._socket.makefile("rb")
        self._read()
        self.send("WebDriver:NewSession", strictFileInteractability=False)

    def _read(self):
        length = b""
        while not length.endswith(b":"):
            length += self._stream.read(1) or pytest.fail("Firefox has ended")
        return json.loads(self._stream.read(int(length[:-1])))

    def send(self, method, **params):
        self._count += 1
        message = json.dumps([0, self._count, method, params])
        self._socket.sendall(f"{len(message)}:{message}".encode())
        _, _, error, result = self._read()
        assert error is None, error
        return result

    def open(self, url):
        self.send("WebDriver:Navigate", url=url)

    def run(self, expression):
        script = "Promise.resolve(window.eval(arguments[0])).then(arguments[1]);"
        found = self.send("WebDriver:ExecuteAsyncScript", script=script, args=[expression])
        return found["value"]


@contextlib.contextmanager
def started(kind, profile):
    browser = kind(profile)
    try:
        yield browser
    finally:
        os.killpg(browser.process.pid, signal.SIGKILL)
        browser.process.wait()
