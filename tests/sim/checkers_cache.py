"""I32 and I33: what is taken over from kept caches, and how long those live."""

from __future__ import annotations

from tests.sim.run import PIPELINE, CheckFailed, Run


def prefix_is_the_prompts(run: Run) -> None:
    """I32: a sequence that begins with kept tokens begins with those of its own prompt."""
    rids: dict[int, str] = {}
    announced: dict[str, int] = {}
    for entry in run.entries:
        if entry.event == "started":
            rids[entry["seq"]] = entry["rid"]
        elif entry.event == "prefix":
            announced[entry["rid"]] = entry["tokens"]
        elif entry.event == "engine_opened":
            rid = rids[entry["seq"]]
            facts = run.requests.get(rid)
            tokens = entry["tokens"]
            if announced.get(rid) != len(tokens):
                raise CheckFailed("I32", f"{len(tokens)} tokens taken over", at=entry, rid=rid)
            if facts is None:
                continue
            if len(tokens) >= len(facts.prompt):
                raise CheckFailed("I32", "nothing is left to evaluate", at=entry, rid=rid)
            if facts.prompt[: len(tokens)] != tokens:
                raise CheckFailed("I32", "not its prompt", at=entry, rid=rid)


def handles_live_once(run: Run) -> None:
    """I33: a handle is used only while it is kept, and forgotten at most once.

    With the pipeline the engine forgets everything.
    """
    kept: set[int] = set()
    for entry in run.entries:
        match entry.event:
            case "engine_kept":
                if entry["handle"] in kept:
                    raise CheckFailed("I33", "kept twice", at=entry)
                kept.add(entry["handle"])
            case "engine_forgot":
                if entry["handle"] not in kept:
                    raise CheckFailed("I33", "forgotten without being kept", at=entry)
                kept.discard(entry["handle"])
            case "engine_opened":
                missing = set(entry["handles"]) - kept
                if missing:
                    raise CheckFailed("I33", f"{missing} used after their end", at=entry)
            case "restarted" if entry["child"] in PIPELINE:
                kept.clear()
            case _:
                pass
