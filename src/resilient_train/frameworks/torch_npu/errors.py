"""What an exception of an Ascend device means for a recovery: the one table is ``csrc/probes/ascend_errors.hpp``.

torch_npu raises RuntimeError with words of its own (``UCE ERROR``, ``FORCE STOP``), with the runtime's number
(``NPU function error: ..., error code is 507053``) or HCCL's (``HCCL function error: ..., error code is 4``), or with
both; MindSpore has other words, and ``error_code=507053``. Words come first: where a queued operation fails, torch_npu
tells no number.
"""

from __future__ import annotations

import re

from resilient_train._native import ASCEND_WORDS, ascend_kind

_CODE = re.compile(r"error[ _]code(?: is |=)(\d+)")
_OF_HCCL = "HCCL function error"


def kind_of(text: str) -> str:
    """``UCE``, ``HCCE``, ``LINK``, ``DEVICE`` or ``STOPPED``, as of a probe's finding; empty: nothing that is known."""
    for words, kind in ASCEND_WORDS:
        if words in text:
            return kind
    code = _CODE.search(text)
    return ascend_kind("hccl" if _OF_HCCL in text else "acl", int(code[1])) if code else ""
