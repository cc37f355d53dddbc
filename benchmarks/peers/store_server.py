"""Hosts the store of NVIDIA's in-process Wrapper outside the ranks, until it is ended."""

import signal
import sys
from datetime import timedelta

from torch.distributed import TCPStore


def main() -> None:
    port, limit_s = (int(each) for each in sys.argv[1:])
    signal.alarm(limit_s)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
    signal.pause()
    del store


if __name__ == "__main__":
    main()
