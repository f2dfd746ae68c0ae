"""OperatorMode: the base of modes that see every operator which a model calls, below autograd.

What a mode does with the operators belongs in the module that defines it: `random_operations` refuses some of them,
`smoothhess.curvature.unknown_operations` records their names.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler, which takes seconds in the first call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
