"""AdmissionActor: turns a submitted request into a tokenised, valid, queued one, or refuses it.

Owns nothing but the request each of its lane tasks has in hand.  Receives ``Submit`` (one channel
per lane), sends ``Accepted`` or ``Failed`` to the requester and ``Queued`` to the PrefillQueue.
A lane task runs until its channel ends.  The lanes are supervised one by one, so that a crash fails
only the request that caused it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import assert_never

import trio

from actors.closing import DEADLINE, INTERNAL, SHUTTING_DOWN, closing_failure
from actors.core.admission_rules import Admitted, admit, cache_root, complete_sampling
from actors.errors import ErrorCode, RequestError
from actors.events import Accepted, Failed, Finished, FinishReason, Started, Timings, Usage
from actors.kit.channels import fail_pending
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.journal import Journal
from actors.kit.supervise import Supervisor
from actors.limits import LANES, Limits
from actors.messages import Fork, Queued, Submit
from actors.offload import Offload
from actors.phase import Phase, PhaseCell
from actors.requests import (
    ChatPrompt,
    GenerationRequest,
    Priority,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from actors.token_sender import TokenSender
from models.text_model import TemplateError, TextModel

NAME = "admission"


class AdmissionActor:
    """``submit`` and ``lanes`` outlive restarts; each incarnation receives through clones."""

    def __init__(
        self,
        *,
        submit: Mapping[Priority, trio.MemoryReceiveChannel[Submit]],
        lanes: Mapping[Priority, trio.MemorySendChannel[Queued]],
        text: TextModel,
        limits: Limits,
        phase: PhaseCell,
        journal: Journal,
        offload: Offload,
        retry_after_s: Callable[[], float],
        fingerprint: str = "",
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._submit = submit
        self._lanes = lanes
        self._text = text
        self._limits = limits
        self._phase = phase
        self._journal = journal
        self._offload = offload
        self._retry_after_s = retry_after_s
        self._fingerprint = fingerprint
        self._faults = faults
        self.accepted = 0
        self.refused = 0
        self.waiting = 0  # accepted, but not yet taken by the PrefillQueue

    async def supervised(self, supervisor: Supervisor) -> None:
        """All lanes until cancelled, each supervised under ``admission.<lane>``."""
        try:
            async with trio.open_nursery() as nursery:
                for lane in LANES:
                    child = partial(self.run_lane, lane)
                    nursery.start_soon(supervisor.run, f"{NAME}.{lane.name.lower()}", child)
        finally:
            self.close()

    async def run_lane(self, lane: Priority) -> None:
        """One incarnation of one lane's task."""
        with self._submit[lane].clone() as submit_rx:
            async for submit in submit_rx:
                await self._handle(submit, lane)

    def close(self) -> None:
        """Fail what was submitted and never taken in hand, and close the channels."""
        for lane in LANES:
            for submit in fail_pending(self._submit[lane], closing_failure(self._phase)):
                self._note_refused(submit, closing_failure(self._phase).code)
            self._lanes[lane].close()

    async def _handle(self, submit: Submit, lane: Priority) -> None:
        """Pass every choice of the request on or finish it, whatever happens."""
        for sender in submit.senders:
            self._journal.record(NAME, "submitted", sender.request_id, lane.name)
        accepted = False
        rest = list(submit.senders)  # what is handed over is others' to end
        try:
            self._faults.hit("admission.in_hand")
            if self._ends_early(submit):
                return
            prompt_ids, root = await self._offload(self._prepare, submit.request)
            if self._ends_early(submit):
                return
            admitted = admit(submit.request, prompt_ids, self._text.vocab_size, self._limits)
            accepted = True
            self._accept(submit, admitted)
            self._faults.hit("admission.after_accept")
            if admitted.max_tokens == 0:
                self._finish_empty(submit, admitted)
            else:
                await self._enqueue(submit, lane, admitted, root, rest)
        except RequestError as error:
            self._refuse(submit, _failed(error))
        except BaseException as error:
            otherwise = INTERNAL
            failure = otherwise if isinstance(error, Exception) else closing_failure(self._phase)
            if accepted:
                self._end(rest, failure)
            else:
                self._refuse(submit, failure)
            raise

    def _ends_early(self, submit: Submit) -> bool:
        """Gone, draining or late: finished here, before any more work is done for it."""
        if all(sender.abandoned for sender in submit.senders):
            for sender in submit.senders:
                self._journal.record(NAME, "cancel_seen", sender.request_id, "admission")
                sender.finish(INTERNAL)
            return True
        if self._phase.phase in (Phase.DRAINING, Phase.STOPPED):
            self._refuse(submit, SHUTTING_DOWN)
            return True
        if trio.current_time() >= self._deadline_s(submit):
            self._refuse(submit, DEADLINE)
            return True
        return False

    def _deadline_s(self, submit: Submit) -> float:
        return min(submit.request.deadline_s, submit.arrived_s + self._limits.request_timeout_s)

    def _prepare(self, request: GenerationRequest) -> tuple[tuple[int, ...], bytes | None]:
        """The prompt's tokens and its cache root.  On a worker thread.  Raises RequestError."""
        prompt = request.prompt
        root = None
        if request.cache.use and self._limits.prompt_cache.enabled:
            signature = ""
            if isinstance(prompt, ChatPrompt):
                signature = self._text.template_signature(prompt.template_kwargs)
            root = cache_root(self._fingerprint, signature, request.cache.bucket)
        return self._tokenise(prompt), root

    def _tokenise(self, prompt: Prompt) -> tuple[int, ...]:
        """Runs on a worker thread.  Raises RequestError."""
        match prompt:
            case ChatPrompt(messages=messages, template_kwargs=kwargs):
                try:
                    rendered = self._text.render_chat(messages, kwargs=kwargs)
                except TemplateError as error:
                    raise RequestError(
                        ErrorCode.INVALID_REQUEST, str(error), param="messages"
                    ) from error
                # The template has already written the special tokens.
                return tuple(self._text.encode(rendered, add_special=False))
            case TextPrompt(text=text, add_special=add_special):
                return tuple(self._text.encode(text, add_special=add_special))
            case TokenPrompt(token_ids=token_ids):
                return token_ids
            case other:
                assert_never(other)

    def _accept(self, submit: Submit, admitted: Admitted) -> None:
        count = len(admitted.prompt_ids)
        for sender in submit.senders:
            self.accepted += 1
            self._journal.record(NAME, "accepted", sender.request_id, count)
            sender.send(Accepted(prompt_tokens=count))

    async def _enqueue(
        self,
        submit: Submit,
        lane: Priority,
        admitted: Admitted,
        root: bytes | None,
        rest: list[TokenSender],
    ) -> None:
        """Hand over all choices in order; ``rest`` are those that are still to go."""
        deadline_s = self._deadline_s(submit)
        fork = None
        if len(submit.senders) > 1:
            fork = Fork(fork_id=submit.senders[0].request_id, senders=submit.senders)
        self.waiting += len(rest)
        try:
            with trio.move_on_at(deadline_s) as scope:
                for choice, sender in enumerate(submit.senders):
                    queued = Queued(
                        request=submit.request,
                        sampling=complete_sampling(submit.request, choice, self._text),
                        lane=lane,
                        prompt_ids=admitted.prompt_ids,
                        max_tokens=admitted.max_tokens,
                        total_tokens=admitted.total_tokens,
                        arrived_s=submit.arrived_s,
                        deadline_s=deadline_s,
                        sender=sender,
                        cache_root=root,
                        fork=fork,
                    )
                    await self._lanes[lane].send(queued)
                    rest.pop(0)
                    self.waiting -= 1
        finally:
            self.waiting -= len(rest)
        if scope.cancelled_caught:
            self._end(rest, DEADLINE)

    def _finish_empty(self, submit: Submit, admitted: Admitted) -> None:
        """Nothing is to be generated: legal, and there is nothing to evaluate."""
        waited_s = trio.current_time() - submit.arrived_s
        finished = Finished(
            reason=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=len(admitted.prompt_ids), completion_tokens=0),
            timings=Timings(queued_s=waited_s, prefill_s=0.0, decode_s=0.0),
        )
        for sender in submit.senders:
            sender.send(Started())
            sender.finish(finished)
            self._journal.record(
                NAME, "terminal", sender.request_id, "finished", finished.reason.value
            )

    def _refuse(self, submit: Submit, failure: Failed) -> None:
        for sender in submit.senders:
            if failure.code is ErrorCode.SHUTTING_DOWN:
                sender.fail(failure.code, failure.message, retry_after_s=self._retry_after_s())
            else:
                sender.finish(failure)
        self._note_refused(submit, failure.code)

    def _note_refused(self, submit: Submit, code: ErrorCode) -> None:
        for sender in submit.senders:
            self.refused += 1
            self._journal.record(NAME, "refused", sender.request_id, code.value)

    def _end(self, senders: Iterable[TokenSender], failure: Failed) -> None:
        """End choices that were accepted."""
        for sender in senders:
            if not sender.finished:
                sender.finish(failure)
                self._journal.record(
                    NAME, "terminal", sender.request_id, "failed", failure.code.value
                )


def _failed(error: RequestError) -> Failed:
    return Failed(
        code=error.code,
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s,
        details=error.details,
    )
