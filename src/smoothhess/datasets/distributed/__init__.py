"""Run one job on many processes, GPUs or machines with torch.distributed (torchrun, Slurm, mpirun).

`attribute` splits the draws of the same inputs, `explain_dataset` splits the records of a data set. This package does
not create a process group: call torch.distributed.init_process_group() first. Without a group, a single process does
all the work.
"""

from smoothhess.datasets.distributed.distributed_attribute import attribute
from smoothhess.datasets.distributed.distributed_dataset import explain_dataset
from smoothhess.datasets.distributed.process_group import RankError

__all__ = ["RankError", "attribute", "explain_dataset"]
