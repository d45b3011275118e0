"""Names as users type them: the nearest known one, and NAME(OPTION=VALUE,...)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches


def closest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest of `names`, whatever the case, or nothing."""
    by_lower = {known.lower(): known for known in names}
    name = name.lower()
    match = get_close_matches(name, list(by_lower), n=1)
    if len(name) > 2 and not match:
        match = [known for known in by_lower if known.startswith(name)]
    return f"; did you mean {by_lower[match[0]]!r}?" if match else ""


def parse_options(
    argument: str,
    text: str,
    names: Sequence[str],
    options_of: Callable[[str], Sequence[str]],
    otherwise: str = "",
) -> tuple[str, dict[str, float]]:
    """Return the name and the options of NAME or NAME(OPTION=VALUE,...).

    Parameters
    ----------
    argument : str
        What the text was given for, for the messages.
    text : str
        What the user typed.
    names : sequence of str
        Known names.
    options_of : callable
        Options that a name has.
    otherwise : str
        What may be given instead of a name, for the messages.

    Raises
    ------
    ValueError
        If the name or an option is not known, or a value is no number.
    """
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise ValueError(
            f"`{argument}` must be NAME, NAME(OPTION=VALUE,...){otherwise}; got {text!r}"
        )
    name, inside = match.groups()
    if name not in names:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(names)}{otherwise}; got {text!r}"
            f"{closest(name, names)}"
        )
    known = options_of(name)
    options: dict[str, float] = {}
    for part in filter(None, (inside or "").split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise ValueError(
                f"options of `{argument}` {name} must be among ({', '.join(known)}); got {key!r}"
                f"{closest(key, known)}"
            )
        try:
            options[key] = float(value)
        except ValueError:
            raise ValueError(
                f"option {key} of `{argument}` {name} must be a number; got {value!r}"
            ) from None
    return name, options


def spell(name: str, options: dict[str, float]) -> str:
    """Return the one spelling of a name with options."""
    arguments = ",".join(f"{key}={value:g}" for key, value in sorted(options.items()))
    return f"{name}({arguments})" if arguments else name
