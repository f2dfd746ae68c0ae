"""Explain every record of a data set into a crash-safe store on disk that can be read while a job is running."""

from smoothhess.datasets.explain_dataset import explain_dataset
from smoothhess.datasets.store.record import Record
from smoothhess.datasets.store.store_folder import Store

__all__ = ["Record", "Store", "explain_dataset"]
