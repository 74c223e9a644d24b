"""Stand-ins: modules that replace children in a shallow copy of their parent."""

from typing import Any

from torch import Tensor, nn


class StandIn(nn.Module):
    """Replaces a child in a copy of its parent; other attributes are the child's."""

    def __init__(self, child: nn.Module):
        super().__init__()
        vars(self)["child"] = child  # not a child of this module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["child"], name)


class Reached(Exception):  # no error
    """Ends a forward at a projection."""

    def __init__(self, given: Tensor):
        super().__init__()
        self.given = given


class Held(StandIn):
    """Returns `output`; if there is none, it ends the forward."""

    output: Tensor | None = None

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.output is None:
            raise Reached(inputs)
        return self.output


class Seen(StandIn):
    """Keeps its input."""

    seen: Tensor | None = None

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = inputs
        return inputs

    def taken(self) -> Tensor | None:
        """Its last input, which is released."""
        seen, self.seen = self.seen, None
        return seen
