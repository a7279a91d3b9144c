"""How the official code reads SQA3D's texts: question types and tokens."""

from __future__ import annotations

import re

TYPES = ("what", "is", "how", "can", "which")


def question_type(question: str, rule: str) -> str:
    """`what`, `is`, `how`, `can`, `which` or `others`, by the question's beginning.

    Args:
        question: as annotated.
        rule: `a`: first word without `, . ?` and `'s` (MCAN code); `b`: text up to the first blank (ClipBERT code);
            `c`: prefix of the string (3D-VisTA code).
    """
    text = question.lower()
    if rule == "c":
        return next((t for t in TYPES if text.lstrip().startswith(t)), "others")
    if rule == "a":
        first = (re.sub(r"[,.?]", "", text).replace("'s", " 's").split() or [""])[0]
    else:
        first = text.split(" ", 1)[0]
    return first if first in TYPES else "others"


def scanqa_tokens(text: str) -> list[str]:
    """Words as the ScanQA branch looks them up in GloVe: case is kept, commas stay with their word."""
    return text.replace("?", " ?").replace(".", " .").split()


def mcan_tokens(text: str) -> list[str]:
    """Words as the MCAN branch looks them up: lower case, without punctuation."""
    text = re.sub(r"[,.?]", "", text.lower()).replace("'s", " 's")
    return re.sub(r"['!\"()*#:;]", "", text).replace("-", " ").replace("/", " ").split()
