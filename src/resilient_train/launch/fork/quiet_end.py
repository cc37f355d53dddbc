"""What was frozen in the zygote (``gc.freeze()``), a fork does not collect at its end: so its end is quick.

triton 3.9, which torch 2.15 brings along, has objects as defaults of methods, of a class that then stays. nanobind
tells of such objects at the end, and of all types and functions beside them: forty lines in the log of each rank.
"""

from __future__ import annotations

import atexit
import gc
import sys


def end_quietly() -> None:
    """To be called before anything of the rank's registers with ``atexit``: what is registered first is called last."""
    if "triton._C.libtriton" in sys.modules:
        atexit.register(_let_defaults_go)


def _let_defaults_go() -> None:
    """To thaw all instead would take a second: what was shared with other forks would be copied to be looked at."""
    library = sys.modules["triton._C.libtriton"]
    builder = getattr(getattr(library, "gluon_ir", None), "GluonOpBuilder", None)
    for name, method in [*vars(builder).items()] if builder is not None else ():
        if any(type(each) is library.ir.attribute for each in gc.get_referents(method)):
            delattr(builder, name)
