"""Data sets: every record explained into a store that survives any end and can be read while it grows."""

from smoothhess.datasets.explain_dataset import explain_dataset
from smoothhess.datasets.store.record import Record
from smoothhess.datasets.store.store_folder import Store

__all__ = ["Record", "Store", "explain_dataset"]
