"""Lists of what transformers' candidate generators and our drafters propose."""

import pytest


def watch_generators(patch: pytest.MonkeyPatch, *kinds: type) -> list[tuple[int, list[int]]]:
    """Length of the text and drafted ids of every proposal that generators of these classes make from here on."""
    made: list[tuple[int, list[int]]] = []
    for kind in kinds:
        original = kind.get_candidates

        def get_candidates(self, input_ids, *args, original=original, **kwargs):
            ids, logits = original(self, input_ids, *args, **kwargs)
            if ids.shape[1] > input_ids.shape[1]:
                made.append((input_ids.shape[1], ids[0, input_ids.shape[1] :].tolist()))
            return ids, logits

        patch.setattr(kind, "get_candidates", get_candidates)
    return made


def watch_drafter(patch: pytest.MonkeyPatch, kind: type) -> list[list[int]]:
    """The first row's ids of every draft that drafters of a class make from here on."""
    made, original = [], kind.draft

    def draft(self, request):
        out = original(self, request)
        made.append(out.token_ids[0].tolist())
        return out

    patch.setattr(kind, "draft", draft)
    return made
