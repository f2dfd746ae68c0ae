"""Data sets: every record explained into a store that survives any end and can be read while it grows."""

from smoothhess.dataset.explain import explain_dataset
from smoothhess.dataset.record import Record
from smoothhess.dataset.store import Store

__all__ = ["Record", "Store", "explain_dataset"]
