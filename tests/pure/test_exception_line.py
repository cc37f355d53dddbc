"""What is told of an exception fits in a sentence."""

from resilient_train.exception_line import short

GLOO = (
    "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:32969: reset"
)


def test_where_torch_was_built_is_left_out() -> None:
    assert short(GLOO) == "RuntimeError: Read error [127.0.0.1]:32969: reset"
    assert short("see [/tmp/run] and\n[train.py:3]") == "see [/tmp/run] and [train.py:3]"


def test_a_long_text_is_cut() -> None:
    assert short("word " * 100).endswith("word ...")
    assert len(short("word " * 100)) <= 200
