# SPDX-License-Identifier: Apache-2.0
"""Sessions of agents (kvd.Space.session), which requests have in kv_transfer_params:

    "kvd_session": {"name": "agent-7", "keep": "high", "ttl": 300}

name: by default vLLM's session_id. keep: high (the default), or pinned, which any client of vLLM's server can say, so that
it means high unless the extra configuration has "pin": true. ttl: in seconds, by default 300; 0 ends the session. It names the prompt and the answer, as far as they are stored, when the request has ended. The daemon keeps
it: the next request may be served by another vLLM, and this one may have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.request import Request

import kvd

logger = init_logger("vllm." + __name__)

TTL = 300


@dataclass(frozen=True)
class Session:
    name: str
    keep: str
    ttl: int

    @classmethod
    def of(cls, request: Request, pin: bool) -> Session | None:
        """Return what a request says; None if nothing. Wrong values are logged, and mean nothing."""
        given = (request.kv_transfer_params or {}).get("kvd_session")
        if given is None:
            return None
        try:
            unknown = {*given} - {"name", "keep", "ttl"}
            name = given.get("name") or getattr(request, "session_id", None)
            keep, ttl = given.get("keep", "high"), given.get("ttl", TTL)
            if unknown or not isinstance(name, str) or not isinstance(keep, str) or type(ttl) is not int:
                raise ValueError
        except (AttributeError, TypeError, ValueError):
            logger.warning("kvd: request %s: kvd_session has a name, keep and ttl (whole seconds), and is not %r",
                           request.request_id, given)
            return None
        if keep == "pinned" and not pin:
            logger.warning_once("kvd: sessions pin nothing, and have keep = high, without \"pin\": true")
            keep = "high"
        return cls(name, keep, ttl)

    def end(self, space: kvd.Space) -> None:
        """End it now. What the daemon refuses is logged."""
        try:
            space.end_session(self.name)
        except (kvd.Error, ValueError) as error:
            logger.warning("kvd: session %s: %s", self.name, error)

    def tell(self, space: kvd.Space, pins: list[kvd.Pin]) -> None:
        """Tell the daemon, and release the pins. What it refuses is logged; what it may not pin has keep = high."""
        try:
            self._keep(space, pins)
        except (kvd.Error, ValueError) as error:
            logger.warning("kvd: session %s: %s", self.name, error)
        for pin in pins:
            pin.release()

    def _keep(self, space: kvd.Space, pins: list[kvd.Pin]) -> None:
        try:
            space.session(self.name, pins, keep=self.keep, ttl=self.ttl)
        except kvd.QuotaExceeded as error:
            if self.keep != "pinned" or "would pin" not in str(error):      # also refused with keep = high
                raise
            logger.warning("kvd: %s", error)
            space.session(self.name, pins, keep="high", ttl=self.ttl)
