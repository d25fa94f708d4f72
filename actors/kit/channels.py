"""Handing messages over and closing channels so that no request is ever silently dropped.

Closing a receive end throws away what is still buffered in it, and a thrown-away sender is never
closed by itself: its client would wait for ever.  So receive ends are closed by ``fail_pending``.
"""

from __future__ import annotations

from typing import TypeVar

import trio

from actors.events import Failed
from actors.messages import (
    BlocksExported,
    ClearCache,
    DeleteResponse,
    GetResponse,
    GrowCache,
    PutResponse,
    Queued,
    ReleaseCache,
    ReserveCache,
    ShrinkCache,
    SlotGrant,
    StartSequence,
    Submit,
)

T = TypeVar("T")

Message = (
    Submit
    | Queued
    | StartSequence
    | ReserveCache
    | GrowCache
    | ShrinkCache
    | ReleaseCache
    | BlocksExported
    | ClearCache
    | SlotGrant
    | PutResponse
    | GetResponse
    | DeleteResponse
)


class PeerGone(Exception):
    """The actor at the other end of an inner channel has crashed; this one ends with it."""


def hand_over(tx: trio.MemorySendChannel[T], item: T) -> None:
    """Send upwards without waiting.  There is always room, since each item answers a credit.

    Raises PeerGone when nobody receives any more; a full channel is a bug (trio.WouldBlock).
    """
    try:
        tx.send_nowait(item)
    except trio.BrokenResourceError as error:
        raise PeerGone(f"nobody receives {type(item).__name__}") from error


def reply(tx: trio.MemorySendChannel[T], answer: T) -> bool:
    """Answer on a reply channel (capacity 1) and close it.  False: nobody waits any more."""
    try:
        tx.send_nowait(answer)
    except trio.BrokenResourceError:
        return False
    finally:
        tx.close()
    return True


async def ask(reply_rx: trio.MemoryReceiveChannel[T]) -> T:
    """Wait for the answer on a reply channel and close it.  Raises PeerGone if none will come."""
    with reply_rx:
        try:
            return await reply_rx.receive()
        except trio.EndOfChannel as error:
            raise PeerGone("the reply was lost") from error


def drain(rx: trio.MemoryReceiveChannel[T]) -> list[T]:
    """Take everything that waits in ``rx``, also from blocked senders.  Never awaits."""
    items: list[T] = []
    while True:
        try:
            items.append(rx.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            return items


def fail_message(message: Message, failure: Failed) -> None:
    """End whatever ``message`` owns: its request fails, its reply channel closes."""
    match message:
        case Submit(senders=senders):
            for sender in senders:
                sender.finish(failure)
        case Queued(sender=sender):
            sender.finish(failure)
        case StartSequence(queued=queued):
            queued.sender.finish(failure)
        case ReleaseCache(reply_tx=tx):
            if tx is not None:
                tx.close()
        case ShrinkCache() | BlocksExported() | SlotGrant():
            pass
        case (
            ReserveCache(reply_tx=tx)
            | GrowCache(reply_tx=tx)
            | ClearCache(reply_tx=tx)
            | PutResponse(reply_tx=tx)
            | GetResponse(reply_tx=tx)
            | DeleteResponse(reply_tx=tx)
        ):
            tx.close()


def fail_pending(rx: trio.MemoryReceiveChannel[T], failure: Failed) -> list[T]:
    """Empty ``rx``, end each message's request with ``failure``, then close ``rx``.

    Returns the messages, for statistics and the journal.  Never awaits; idempotent.
    """
    items = drain(rx)
    for item in items:
        assert isinstance(item, Message), item
        fail_message(item, failure)
    rx.close()
    return items
