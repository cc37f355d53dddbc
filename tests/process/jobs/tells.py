"""``FILE ...``: writes what it finds out about itself, and what a process finds that it spawns. Needs no torch."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import resilient_train as rt

assert rt


def found(_: int = 0) -> dict:
    """What a script may look at to find its files and its modules."""
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "file": __file__,
        "main": getattr(main, "__file__", None),
        "path": sys.path[0],
        "package": main.__package__,
        "spec": main.__spec__ and main.__spec__.name,
        "cwd": str(Path.cwd()),
    }


if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        told = {"self": found(), "child": pool.apply(found)}
    Path(sys.argv[1]).write_text(json.dumps(told))
