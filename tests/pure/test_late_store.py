"""A process that joins a running job needs torch's store for nothing, until its script asks for it."""

from datetime import timedelta

import pytest

dist = pytest.importorskip("torch.distributed")

from resilient_train.frameworks.torch.communication.late_store import LateStore, behind  # noqa: E402


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def late(server: dist.TCPStore, made: list[int]) -> LateStore:
    def connect() -> dist.Store:
        made.append(1)
        return dist.TCPStore("127.0.0.1", server.port, is_master=False)

    return LateStore(connect)


def everything(store: dist.Store) -> dict[str, object]:
    """What each verb says. Other keys are none of its business."""
    store.set("a", "1")
    store.append("a", "2")
    store.multi_set(["b", "c"], ["x", "y"])
    store.wait(["a", "b"])
    store.wait(["c"], timedelta(seconds=5))
    found: dict[str, object] = {
        "get": store.get("a"),
        "add": [store.add("n", 3), store.add("n", 4)],
        "swapped": store.compare_set("b", "x", "z"),
        "kept": store.compare_set("b", "x", "w"),
        "several": store.multi_get(["a", "b", "c"]),
        "there": [store.check(["a", "b"]), store.check(["none"])],
        "deleted": [store.delete_key("c"), store.delete_key("c")],
        "of a clone": store.clone().get("a"),
        "extended": store.has_extended_api(),
    }
    with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
        store.wait(["none"], timedelta(milliseconds=20))
    return found


def of_queues(store: dist.Store) -> list[object]:
    store.queue_push("q", "1")
    return [store.queue_len("q"), store.queue_pop("q"), store.queue_len("q")]


def test_every_verb_is_the_stores_own(server: dist.TCPStore) -> None:
    usual = dist.PrefixStore("usual", server)
    ours = late(server, []).prefixed("ours")
    assert everything(ours) == everything(usual)
    assert of_queues(ours) == of_queues(usual)
    assert sorted(ours.list_keys()) == sorted(usual.list_keys())
    assert ours.num_keys() == server.num_keys()


def test_torchs_own_prefix_finds_the_same(server: dist.TCPStore) -> None:
    """In C++, which knows of the Python class what its trampoline knows."""
    made: list[int] = []
    ours = dist.PrefixStore("mine", late(server, made))
    assert made == []
    assert everything(ours) == everything(dist.PrefixStore("usual", server))
    assert ours.num_keys() == server.num_keys()
    assert server.get("mine/a") == b"12"
    assert made == [1]


def test_it_waits_as_long_as_it_is_told(server: dist.TCPStore) -> None:
    store = late(server, [])
    store.set_timeout(timedelta(milliseconds=30))
    prefixed = store.prefixed("p")
    for each in (store, prefixed, dist.PrefixStore("p", store)):
        assert each.timeout == timedelta(milliseconds=30)
        with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
            each.get("none")


def test_what_stands_behind_a_groups_store(server: dist.TCPStore) -> None:
    made: list[int] = []
    store = late(server, made)
    assert behind(store) is store
    assert behind(server) is None
    assert behind(dist.PrefixStore("default_pg", server)) is None
    default = behind(dist.PrefixStore("default_pg", store))
    assert made == []
    assert default is not None
    default.set("k", "v")
    assert server.get("default_pg/k") == b"v"


def test_where_nobody_answers_it_is_the_caller_who_hears_of_it() -> None:
    def fails() -> dist.Store:
        raise dist.DistNetworkError("no connection")

    store = LateStore(fails)
    prefixed = dist.PrefixStore("p", store)
    with pytest.raises(dist.DistNetworkError, match="no connection"):
        store.set("a", "b")
    with pytest.raises(RuntimeError, match="no connection"):
        prefixed.set("a", "b")
