"""Warns of a low acceptance rate at the first drafted position."""

# First drafts of a call below this share are taken for a sign of wrong layers; published heads keep two fifths.
_LEAST_ACCEPTANCE_RATE = 0.2
_MIN_DRAFTS = 200


def low_acceptance(num_drafted: int, num_accepted: int) -> str | None:
    """The warning for a low acceptance rate of first drafts; None if there is no reason to warn.

    Args:
        num_drafted: rounds and rows of one call in which a first token was drafted.
        num_accepted: how many of these tokens were kept.
    """
    if num_drafted < _MIN_DRAFTS or num_accepted >= _LEAST_ACCEPTANCE_RATE * num_drafted:
        return None
    return (
        f"{num_accepted / num_drafted:.0%} of {num_drafted} first drafts were kept, fewer than "
        f"{_LEAST_ACCEPTANCE_RATE:.0%}: the head may read other layers than it was trained on; measure it with "
        "head.check_layers(target, prompts)"
    )
