"""Which of the two estimates a view shows: the one rule for printed lists, tables, figures, pages and the command line.

A view of single pairs or features shows the unbiased estimate: its values, their order, their intervals, the sizes of
the pairs and the relative error beside them. The denoised estimate is used where the matrix is used as a whole:
`hessian`, `@`, `eigh`, `taylor`, and which pairs a list holds. Such a view shows the error of the denoised matrix.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

Result = Any  # a `Result`


def shown(result: Result) -> Result:
    """The result as views of single pairs and features show it."""
    return result.unshrunk()


def shown_error(result: Result) -> Tensor:
    """The relative error that is shown beside single pairs and features, (B,)."""
    return shown(result).relative_error


def error_text(error: float) -> str:
    """A relative error as text.

    >>> error_text(0.1274), error_text(float("inf")), error_text(float("nan")), error_text(12.0)
    ('12.7 %', 'over 100 %', 'unknown', 'over 1000 %')
    """
    if math.isnan(error):
        return "unknown"
    if not math.isfinite(error):
        return "over 100 %"  # the noise exceeds the signal
    return f"{100 * error:.3g} %" if error < 9.99 else "over 1000 %"


def errors_text(errors: Tensor) -> str:
    """The relative errors of several examples as text: one error, or the smallest and the largest.

    >>> import torch
    >>> errors_text(torch.tensor([0.08])), errors_text(torch.tensor([0.08, 0.127]))
    ('8 %', '8 % to 12.7 %')
    """
    known = sorted(e for e in errors.tolist() if not math.isnan(e))
    texts = [error_text(known[0]), error_text(known[-1])] if known else []
    texts += ["unknown"] * (len(known) < len(errors))
    return " to ".join(dict.fromkeys(texts))
