"""Torch reference implementation of every operation, which is also the CPU backend.

All operations are vectorised over rows and positions and never synchronise with the host. Logits
are converted to float32 first. No epsilon is added to a probability, and comparisons avoid
divisions. A row with a NaN, a +inf or only -inf is not a valid distribution. Verification ends at
such a row with some token in [0, V), and `Status` holds the reason. Row `draft_lens[b]` of the
target is the bonus row of batch row b; later rows are ignored.
"""

from .attention import attend, key_spans
from .block import block
from .coupled import coupled
from .cut import cut
from .greedy import greedy
from .rejection import reject, reject_and_test
from .sampling import sample
from .typical import typical

__all__ = [
    "attend",
    "block",
    "coupled",
    "cut",
    "greedy",
    "key_spans",
    "reject",
    "reject_and_test",
    "sample",
    "typical",
]
