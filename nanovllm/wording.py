"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(number: float, noun: str, form: str = "") -> str:
    """A number and what it counts: "1 prompt token", "2 prompt tokens", with the form "," also "1,024 prompt tokens".

    Args:
        noun: in the singular; its plural ends in an s.
        form: how the number is formatted.
    """
    return f"{number:{form}} {noun}{'' if number == 1 else 's'}"


def brief(value: object, most: int = 80) -> str:
    """`repr` of a value. A longer one than `most` characters is cut, and ends in "..."."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def are(number: int) -> str:
    """ "is" for 1, else "are"."""
    return "is" if number == 1 else "are"
