"""An HTTP endpoint of SGLang's or OpenAI's kind: its state, and many requests at a time."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

LOCAL = ("127.0.0.1", "localhost", "::1")


class EndpointFailed(RuntimeError):
    """No answer, or one that is an error; the message is one line."""


class Endpoint:
    """``url`` with or without ``/v1``.

    Args:
        key: sent as a bearer token.
        timeout_s: most seconds of one request.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 7200) -> None:
        self.url, self.timeout_s = url.rstrip("/").removesuffix("/v1"), timeout_s
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        local = urllib.parse.urlsplit(self.url).hostname in LOCAL
        self._http = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))

    def info(self) -> dict:
        """What /server_info of an SGLang server tells."""
        info = self.send("/server_info", timeout_s=60)
        if not isinstance(info, dict) or "internal_states" not in info:
            raise EndpointFailed(f"{self.url}/server_info: expected SGLang's, with internal_states; got {str(info)[:100]}")
        return info

    def send(self, path: str, body: dict | None = None, timeout_s: float | None = None):
        """The JSON that a GET answers, or a POST of ``body``.

        Raises:
            EndpointFailed
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            with self._http.open(request, timeout=timeout_s or self.timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            reason = " ".join(error.read().decode(errors="replace").split())[:300]
            raise EndpointFailed(f"{self.url}{path}: answered {error.code}: {reason}") from None
        except (OSError, ValueError) as error:
            raise EndpointFailed(f"{self.url}{path}: {error}") from None

    def send_all(self, path: str, bodies: Sequence[dict], concurrency: int, done: Callable[[int, dict], None]) -> None:
        """POSTs all, ``concurrency`` at a time, and hands over each number and answer as it comes, in the caller's thread.

        Raises:
            EndpointFailed: some requests failed; the others were handed over.
        """
        failures = []
        with ThreadPoolExecutor(concurrency) as pool:
            futures = {pool.submit(self.send, path, body): number for number, body in enumerate(bodies)}
            for future in as_completed(futures):
                try:
                    done(futures[future], future.result())
                except EndpointFailed as error:
                    failures.append(str(error))
        if failures:
            raise EndpointFailed(f"{len(failures)} of {len(bodies)} requests failed, the first: {failures[0]}")


def text_of(reply: dict) -> str:
    """The text of an answer of either API."""
    choice = reply["choices"][0]
    return (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
