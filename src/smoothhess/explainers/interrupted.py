"""`Interrupted`: the KeyboardInterrupt of a run, with the result of what was drawn before.

The partial results are made where rows are drawn, in `adaptive` and `smooth_hess`.
"""

from __future__ import annotations

from smoothhess.result.interactions import Interactions

STATUS = "interrupted"  # of examples that had not stopped


class Interrupted(KeyboardInterrupt):
    """A run was interrupted, by Ctrl-C or another KeyboardInterrupt.

    Attributes:
        result: an `Interactions` of the draws that were complete, with the status "interrupted" for each example that
            had not stopped; None if there were none. `SmoothHess.more(error.result, n)` continues it. If the examples
            were explained in several batches because of the memory, it holds the first of them only.

    >>> import torch
    >>> from smoothhess import SmoothHess
    >>> try:
    ...     SmoothHess(lambda x: (_ for _ in ()).throw(KeyboardInterrupt)).attribute(torch.ones(1, 2), sigma=0.1)
    ... except Interrupted as error:
    ...     print(error.result)
    None
    """

    def __init__(self, message: str = "", result: Interactions | None = None) -> None:
        super().__init__(message)
        self.result = result


def interrupted(error: KeyboardInterrupt, examples: int, result: Interactions | None = None) -> Interrupted:
    """The exception for users of a run of `examples` examples; `result` is used if `error` has none."""
    found = error.result if isinstance(error, Interrupted) else result
    if found is None:
        return Interrupted("interrupted before a gradient at perturbed inputs was complete: there is no result.")
    low, high = (int(n) for n in found.n_calls.aminmax())
    calls = f"{low}" if low == high else f"{low} to {high}"
    some = f" of the first {len(found)} of {examples} examples" if len(found) < examples else ""
    return Interrupted(
        f"interrupted after {calls} calls per example{some}. The `result` of this exception holds what was drawn; "
        "continue with explainer.more(error.result, n).",
        found,
    )
