"""Many processes, on many GPUs or machines, as one: torch.distributed (torchrun, Slurm, mpirun).

`attribute` shares the draws of the same inputs, `explain_dataset` the records of a data set. No process group is made
here: call torch.distributed.init_process_group() first, or call nothing and have a single process do the work.
"""

from smoothhess.datasets.distributed.distributed_attribute import attribute
from smoothhess.datasets.distributed.distributed_dataset import explain_dataset
from smoothhess.datasets.distributed.process_group import RankError

__all__ = ["RankError", "attribute", "explain_dataset"]
