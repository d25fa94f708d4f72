"""ResponsesStore: stored responses with a time to live, bounded in entries and bytes.

Owns a ``ResponseLog``; receives ``PutResponse``, ``GetResponse``, ``DeleteResponse`` and answers
each on its reply channel.  The inbox outlives restarts; the contents do not.  Ends when the inbox
ends.
"""

from __future__ import annotations

from typing import assert_never

import trio

from actors.closing import INTERNAL
from actors.core.response_log import ResponseLog
from actors.kit.channels import fail_message, fail_pending, reply
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.supervise import Supervisor
from actors.limits import Limits
from actors.messages import DeleteResponse, GetResponse, PutResponse, StoreMessage

NAME = "store"


class ResponsesStore:
    """``entries`` and ``size_bytes`` are for the status."""

    def __init__(
        self,
        *,
        inbox: trio.MemoryReceiveChannel[StoreMessage],
        limits: Limits,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._inbox = inbox
        self._limits = limits
        self._faults = faults
        self._log = self._new_log()

    @property
    def entries(self) -> int:
        return len(self._log)

    @property
    def size_bytes(self) -> int:
        return self._log.size_bytes

    def _new_log(self) -> ResponseLog:
        return ResponseLog(
            max_entries=self._limits.store_max_entries,
            max_bytes=self._limits.store_max_bytes,
            ttl_s=self._limits.store_ttl_s,
        )

    async def supervised(self, supervisor: Supervisor) -> None:
        """Run until cancelled or until nobody can ask any more."""
        try:
            await supervisor.run(NAME, self.run)
        finally:
            self.close()

    async def run(self) -> None:
        """One incarnation.  Starts empty."""
        self._log = self._new_log()
        with self._inbox.clone() as inbox:
            while True:
                with trio.move_on_at(self._log.next_expiry_s()):
                    try:
                        message = await inbox.receive()
                    except trio.EndOfChannel:
                        return
                    self._handle(message)
                    continue
                self._log.expire(trio.current_time())

    def close(self) -> None:
        """No more requests: whoever still waits for an answer sees its reply channel end."""
        fail_pending(self._inbox, INTERNAL)

    def _handle(self, message: StoreMessage) -> None:
        now = trio.current_time()
        try:
            self._faults.hit("store.request")
            match message:
                case PutResponse(response_id=rid, owner=owner, body=body, reply_tx=put_tx):
                    reply(put_tx, self._log.put(response_id=rid, owner=owner, body=body, now=now))
                case GetResponse(response_id=rid, owner=owner, reply_tx=get_tx):
                    reply(get_tx, self._log.get(response_id=rid, owner=owner, now=now))
                case DeleteResponse(response_id=rid, owner=owner, reply_tx=delete_tx):
                    reply(delete_tx, self._log.delete(response_id=rid, owner=owner, now=now))
                case other:
                    assert_never(other)
        finally:
            fail_message(message, INTERNAL)  # closes the reply channel, answered or not
