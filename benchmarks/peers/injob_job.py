"""Plain DDP under NVIDIA's ``ft_launcher``, with heartbeats: it restarts all ranks like torchrun, also after a hang."""

from journal import Journal, arguments  # first: it takes the time of the process's first line

# isort: split
import os

import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from training import Checkpoints, Training, train


class Heartbeats:
    """One after each step; once there are enough, the time-outs are worked out of them, unless they were given."""

    def __init__(self, calculate_after: int) -> None:
        self._client = RankMonitorClient()
        self._client.init_workload_monitoring()
        self._left = calculate_after

    def beat(self) -> None:
        self._client.send_heartbeat()
        self._left -= 1
        if self._left == 0:
            self._client.calculate_and_set_hb_timeouts()


def main() -> None:
    given = arguments()
    rank = int(os.environ["RANK"])
    journal = Journal(given.folder, rank)
    dist.init_process_group("gloo")
    heartbeats = Heartbeats(given.options.get("calculate_after", 0))
    checkpoints = Checkpoints(given.folder, given.options["checkpoint_every"])
    train(Training(given.model, journal), journal, rank, checkpoints, after_step=heartbeats.beat)


if __name__ == "__main__":
    main()
