"""The torch twin of every operation: the definition of what the kernels compute, and the path on a CPU.

Vectorised over rows and positions, without a wait for the host. Logits go to float32 first; nothing is added to a
probability and nothing is divided to compare. A row that holds a NaN, a +inf, or only -inf has no law: the chain ends
there, the emitted token is some token in [0, V), and `Status` says why. Rows past `draft_lens[b]` do not count: row
`draft_lens[b]` is that chain's bonus row.
"""

from .block import block
from .coupled import coupled
from .greedy import greedy
from .rejection import reject, reject_and_test
from .sampling import sample
from .typical import typical

__all__ = ["block", "coupled", "greedy", "reject", "reject_and_test", "sample", "typical"]
