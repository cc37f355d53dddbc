"""What goes for the processes of all tests, set before one of them imports torch."""

import os

# With more threads torch's kernels spin in wait for each other wherever the machine is busy: ten times the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
