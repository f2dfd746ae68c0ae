"""Explains a data set on all ranks; one of them may be killed after a few packs, once."""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from smoothhess import SmoothHess
from smoothhess.datasets import distributed
from tests.datasets.distributed.cases import network
from tests.datasets.distributed.test_records import ASKED, INPUTS


def main(folder: Path, dies: bool) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net, mark = network(), folder / "killed"

    def disturb(*_):
        if dies and not mark.exists():
            if rank == 1 and len(list((folder / "store").glob("shard-0001-*"))) >= 2:
                mark.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05 * (rank == 0))  # and the other is in the middle of its share

    net.register_forward_pre_hook(disturb)
    loader = DataLoader(TensorDataset(INPUTS), batch_size=5)
    store = distributed.explain_dataset(SmoothHess(net), loader, folder / "store", **ASKED)
    (folder / f"seen by {rank}").write_text(str(len(store)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "dies")
