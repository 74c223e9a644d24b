"""Finds where the end of a growing text stood before."""

import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple

MAX_MATCH_LEN = 64  # tokens after which two contexts count as the same, and the latest of them is taken
_NOTHING = -1  # in place of a token: the state has no transition yet
_FIRST_SEPARATOR = -2  # separators are negative ids that never come twice
_DICT_BYTES = sys.getsizeof({0: 0})
_ENTRY_BYTES = 128  # of a large dict's entry with its two numbers, measured on CPython 3.11
_INT_BYTES = 32
_STATE_BYTES = 5 * 8 + 2 * _INT_BYTES  # of a state's places in the lists, its number and its length
_TEXT_BYTES = 4 + _INT_BYTES  # of a token in the text, and as the lists hold it


class Match(NamedTuple):
    """A text's end, as found in an index."""

    state: int  # of the automaton
    length: int  # tokens of the end that the index holds


EMPTY_MATCH = Match(0, 0)


class SuffixIndex:
    """A suffix automaton of one text that grows at its end: the longest earlier match of its end, the latest of them.

    An appended token costs a bounded number of steps on average, whatever the text's length: a suffix automaton of n
    tokens has at most 2n states and 3n transitions, and none is ever removed. A state stands for strings that end at
    the same places; most have one transition, so the first one lies in arrays and only further ones in dicts.

    Source:
        Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985.
    """

    def __init__(self, max_match_len: int = MAX_MATCH_LEN):
        self.max_match_len = max_match_len  # longer matches count as of that many tokens
        self.token_ids = array("i")  # separators are negative
        self.match_len = 0  # tokens at the text's end that stood before, at most max_match_len
        self.match_end = 0  # tokens up to their latest earlier occurrence
        # By state; 0 is the root, whose string is empty. Arrays would be smaller, and slower by a third.
        self._lens = [0]  # of the longest string
        self._links = [-1]  # the state of the longest suffix that also ends elsewhere
        self._ends = [0]  # tokens up to the latest occurrence, of strings within the longest match counted
        self._tokens = [_NOTHING]  # of the first transition
        self._nexts = [0]  # where it leads
        self._more: dict[int, dict[int, int]] = {}  # further transitions
        self._num_more = 0
        self._last = 0  # the state of the whole text
        self._matched = 0  # the state of the match
        self._num_separators = 0
        self.is_consistent = True  # until a call of `extend` is interrupted

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens, and find the match of the new end."""
        text, lens, links, ends = self.token_ids, self._lens, self._links, self._ends
        tokens, nexts, more = self._tokens, self._nexts, self._more
        most, last, matched, match_end = self.max_match_len, self._last, self._matched, self.match_end
        length, num_more, nothing = len(text), 0, _NOTHING
        for token in token_ids:
            text.append(token)
            length += 1
            new = len(lens)
            lens.append(length)
            links.append(0)
            ends.append(length)
            tokens.append(nothing)
            nexts.append(0)
            tokens[last] = token  # nothing has followed the whole text yet
            nexts[last] = new
            state = links[last]
            while state >= 0:  # every shorter suffix of the old text that the token has not followed yet
                if tokens[state] == token:
                    suffix = nexts[state]
                    break
                others = more.get(state)
                if others is None:
                    more[state] = {token: new}
                else:
                    suffix = others.setdefault(token, new)
                    if suffix != new:
                        break
                num_more += 1
                state = links[state]
            else:
                suffix = 0
            if suffix:
                if lens[suffix] > lens[state] + 1:
                    suffix = self._split(state, suffix, token)
                links[new] = suffix
            last = new
            if lens[suffix] > most:  # then the old match had `most` tokens too, and one more token follows it
                suffix = self._within(self._next(self._within(matched, most), token), most)
            matched, match_end = suffix, ends[suffix]
            while suffix:  # at most one state per length of a match
                ends[suffix] = length
                suffix = links[suffix]
        self._num_more += num_more
        self._last, self._matched = last, matched
        self.match_len, self.match_end = min(lens[matched], most), match_end

    def separate(self) -> None:
        """Begin another text, whose tokens follow nothing that came before."""
        self._num_separators += 1
        self.extend([_FIRST_SEPARATOR + 1 - self._num_separators])

    def continuation(self, end: int, num: int, is_repeated: bool = True) -> list[int]:
        """The `num` tokens, or fewer, after the first `end` ones; separators end them.

        Past the text's end, if `is_repeated`, what was found goes on, so that a text that has begun to repeat itself is
        continued with its period.
        """
        found = self.token_ids[end : end + num].tolist()
        if self._num_separators and found and min(found) < 0:
            return found[: next(offset for offset, token in enumerate(found) if token < 0)]
        if is_repeated and found:
            period = len(found)
            while len(found) < num:
                found += found[: min(num - len(found), period)]
        return found

    def advance(self, place: Match, token_ids: Iterable[int]) -> Match:
        """Where another text's end stands in this index after more of its tokens; it begins at `EMPTY_MATCH`."""
        state, length = place
        state = self._within(state, length)  # the state may have been split since
        for token in token_ids:
            following = self._next(state, token)
            while state > 0 and following < 0:
                state = self._links[state]
                length = self._lens[state]
                following = self._next(state, token)
            if following < 0:
                continue
            length = min(length + 1, self.max_match_len)
            state = self._within(following, length)
        return Match(state, length)

    def end_of(self, place: Match) -> int:
        """Tokens up to the latest occurrence of a text's end."""
        return self._ends[self._within(*place)]

    def copy(self) -> "SuffixIndex":
        """A twin that grows by itself; much cheaper than to build it."""
        twin = SuffixIndex(self.max_match_len)
        twin.__dict__.update(self.__dict__)
        for name in ("token_ids", "_lens", "_links", "_ends", "_tokens", "_nexts"):
            setattr(twin, name, getattr(self, name)[:])
        twin._more = {state: dict(others) for state, others in self._more.items()}
        return twin

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) - self._num_separators

    @property
    def num_bytes(self) -> int:
        in_lists = len(self._lens) * _STATE_BYTES + len(self.token_ids) * _TEXT_BYTES
        in_dicts = sys.getsizeof(self._more) + len(self._more) * _DICT_BYTES + self._num_more * _ENTRY_BYTES
        return in_lists * 9 // 8 + in_dicts  # lists grow by an eighth

    def _next(self, state: int, token: int) -> int:
        """Where a transition leads; -1 where there is none."""
        if self._tokens[state] == token:
            return self._nexts[state]
        others = self._more.get(state)
        return -1 if others is None else others.get(token, -1)

    def _within(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of this state's strings, which have as many at least."""
        lens, links = self._lens, self._links
        while state > 0 and lens[links[state]] >= length:
            state = links[state]
        return state

    def _split(self, state: int, wide: int, token: int) -> int:
        """Give the strings of `wide` up to those of `state` and the token a state of their own: they end here too."""
        lens, links, tokens, nexts, more = self._lens, self._links, self._tokens, self._nexts, self._more
        twin = len(lens)
        lens.append(lens[state] + 1)
        links.append(links[wide])
        self._ends.append(self._ends[wide])
        tokens.append(tokens[wide])
        nexts.append(nexts[wide])
        others = more.get(wide)
        if others is not None:
            more[twin] = others.copy()
            self._num_more += len(others)
        links[wide] = twin
        while state >= 0:
            if tokens[state] == token:
                if nexts[state] != wide:
                    break
                nexts[state] = twin
            elif more[state][token] != wide:
                break
            else:
                more[state][token] = twin
            state = links[state]
        return twin
