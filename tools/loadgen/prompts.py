"""Made-up prompts of about a given number of tokens."""

from __future__ import annotations

from random import Random

# Short, frequent English words: about one token each in common vocabularies.
_TEXT = """
    time year people way day man thing woman life child world school state family student group
    country problem hand part place case week company system program question work number night
    point home water room mother area money story fact month lot right study book eye job word
    business issue side kind head house service friend father power hour game line end member law
    car city name team minute idea body information back parent face others level office door
    health person art war history party result change morning
"""
_WORDS = tuple(_TEXT.split())


def made_up(words: int, rng: Random) -> str:
    """``words`` random words."""
    return " ".join(rng.choices(_WORDS, k=words))


def numbered(prompt: str, index: int) -> str:
    """``prompt`` behind a number, so that no two requests share a prefix worth caching."""
    return f"{index}: {prompt}"
