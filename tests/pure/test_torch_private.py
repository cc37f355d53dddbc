"""Pins what ``frameworks/torch`` uses of torch's private parts: a new torch that changes them fails here, by name."""

import inspect
import json
import os
import re
import tempfile
from pathlib import Path

import pytest

import resilient_train
from resilient_train.frameworks.supported import torch_problem
from resilient_train.launch.cli import device_count
from resilient_train.launch.spec import JobSpec

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


def test_version_is_one_that_was_tried() -> None:
    assert not torch_problem(torch.__version__)


def test_reducer_has_what_the_buckets_need() -> None:
    used = "_reset_state _rebuild_buckets _delay_all_reduce prepare_for_forward prepare_for_backward"
    for name in used.split():
        assert hasattr(dist.Reducer, name)


def test_wrapper_says_whether_its_buckets_are_laid_out() -> None:
    source = inspect.getsource(torch.nn.parallel.DistributedDataParallel)
    assert "self.reducer._rebuild_buckets():" in source
    assert source.count("self._has_rebuilt_buckets = True") == 1


def test_wrapper_can_be_given_a_new_reducer() -> None:
    """What ``buckets._renew`` calls; ``tests/pure/test_buckets.py`` runs it."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    used = "_remove_autograd_hooks _build_params_for_reducer _build_debug_param_to_name_mapping _ddp_init_helper"
    for name in used.split():
        assert hasattr(wrapper, name)
    assert "_static_graph_delay_allreduce_enqueued = False" in inspect.getsource(wrapper._set_static_graph)


def test_ddp_reduces_named_parameters_of_its_module_in_order() -> None:
    source = inspect.getsource(torch.nn.parallel.DistributedDataParallel._build_params_for_reducer)
    assert "named_parameters" in source


def test_wrapper_gives_rank_0s_buffers_in_one_function() -> None:
    """``ddp_traffic.synced``; ``tests/process/test_tail.py`` runs it."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    assert "self._sync_module_buffers(authoritative_rank)" in inspect.getsource(wrapper._sync_buffers)
    source = inspect.getsource(wrapper._default_broadcast_coalesced)
    assert "bufs = self.modules_buffers" in source
    assert "bucket_size = self.broadcast_bucket_size" in source


def test_wrapper_tells_what_it_was_made_with() -> None:
    """What ``buckets._reduced`` asks; ``tests/process/test_freezing.py`` runs it."""
    assert "self.logger = dist.Logger(self.reducer)" in inspect.getsource(torch.nn.parallel.DistributedDataParallel)
    assert hasattr(dist.Logger, "_get_ddp_logging_data")
    assert hasattr(dist.Reducer, "_get_zeros_like_grad_buckets")
    assert hasattr(dist.GradBucket, "parameters")


def test_scaler_keeps_what_was_unscaled_where_a_redo_clears_it() -> None:
    """``State.restore_small``: a rank that was READY redoes its step, and unscales again."""
    from resilient_train.frameworks.roles import Objects
    from resilient_train.frameworks.torch.engine import engine_for

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = engine_for(Objects((model,), (optimizer,), (), scaler, {}, {})).window
    for _ in range(2):
        step.begin()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        step.rollback()


def test_group_can_be_subclassed_with_all_verbs() -> None:
    from resilient_train.frameworks.torch.communication.collective_results import POINT_TO_POINT, VERBS

    for verb in (*VERBS, *POINT_TO_POINT):
        assert hasattr(dist.ProcessGroup, verb), verb


def test_the_store_of_a_group_is_made_by_one_function() -> None:
    """What ``_register`` wraps, and ``late_store.behind`` undoes."""
    from torch.distributed.rendezvous import _create_c10d_store, _env_rendezvous_handler, _torchelastic_use_agent_store

    assert "_create_c10d_store(" in inspect.getsource(_env_rendezvous_handler)
    asks = r"if (_torchelastic_use_agent_store\(\)|_agent_store_serves\(hostname, port\)):"
    assert re.search(asks, inspect.getsource(_create_c10d_store))
    assert list(inspect.signature(_create_c10d_store).parameters)[:2] == ["hostname", "port"]
    assert callable(_torchelastic_use_agent_store)
    source = inspect.getsource(dist.init_process_group)
    assert 'store = PrefixStore("default_pg", store)' in source
    helper = inspect.getsource(dist.distributed_c10d._new_process_group_helper)
    assert 'prefix_store = PrefixStore(f"{group_name}/", store)' in helper


def test_batch_norm_writes_its_statistics_silently() -> None:
    """Why ``rank_state`` counts BatchNorm's buffers as changed from the start."""
    layer = torch.nn.BatchNorm1d(3)
    before = layer.running_mean._version
    layer(torch.randn(4, 3))
    assert issubclass(torch.nn.BatchNorm1d, torch.nn.modules.batchnorm._NormBase)
    assert layer.running_mean.abs().sum() > 0
    assert layer.running_mean._version >= before


def test_works_have_futures_that_take_callbacks() -> None:
    future = torch.futures.Future()
    seen = []
    outcome = future.then(lambda done: done.value() + 1)
    future.add_done_callback(lambda done: seen.append(done.value()))
    future.set_result(1)
    assert (outcome.wait(), seen) == (2, [1])


def test_sharded_tensors_tell_their_blocks() -> None:
    """What ``checkpoint_pieces.py`` asks a DTensor; ``tests/pure/test_checkpoint_torch.py`` compares."""
    from torch.distributed.tensor import DTensor

    assert hasattr(DTensor, "__create_chunk_list__")
    assert not hasattr(torch.Tensor, "__create_chunk_list__")


def test_meshes_tell_their_slices() -> None:
    """What ``frameworks/torch/sharding/sharded._held`` asks a mesh; the mesh itself shows that of this process only."""
    from torch.distributed.device_mesh import DeviceMesh

    source = inspect.getsource(DeviceMesh.mesh.fget)
    assert "self._layout.remap_to_tensor(self._rank_map)" in source


def test_schedules_of_pipelines_say_whether_they_have_begun() -> None:
    """What ``frameworks/torch/sharding/pipelines.py`` asks of them, and sets."""
    from torch.distributed.pipelining import schedules, stage

    from resilient_train.frameworks.torch.sharding import pipelines

    single, multi = (inspect.getsource(getattr(schedules, f"PipelineSchedule{each}")) for each in ("Single", "Multi"))
    assert "self._stage = stage" in single
    assert "self._stages = stages" in multi
    for way in ("forward", "backward"):
        assert f"self._stage_{way}_initialized = False" in single
        assert f"self._stages_{way}_initialized = False" in multi
    assert "self._internal_losses: list[torch.Tensor] = []" in inspect.getsource(schedules._PipelineSchedule)
    gathered = inspect.getsource(schedules._PipelineScheduleRuntime.__init__)
    newer = hasattr(schedules._PipelineSchedule, "_initialize_pipeline_distributed_state")  # torch 2.15, or later
    for name in (*pipelines._OF_SEVERAL_STAGES, *(pipelines._OF_2_15 if newer else ())):
        assert f"self.{name}" in gathered
    assert "self._user_meta = _StageMeta(" in inspect.getsource(stage.PipelineStage)
    held = inspect.getsource(stage._PipelineStageBase.__init__)
    for name in ("args_recv_info", "grad_recv_info"):
        assert re.search(rf"self\.{name}\b.* = ", held), name
    if newer:
        votes = inspect.getsource(schedules._PipelineSchedule._initialize_pipeline_distributed_state)
        assert "InferenceMode.needs_dynamic(stage._user_meta, has_backward)" in votes
        assert "self._p2p_initialized = False" in inspect.getsource(schedules._PipelineSchedule.__init__)
        assert re.search(r"self\._gradient_reduction_handle\b.* = ", held)
    else:
        votes = inspect.getsource(stage.PipelineStage._warmup_forward_vote)
        assert "needs_dynamic(self._user_meta, has_backward)" in votes


def test_what_fsdp_can_be_switched_is_where_it_was() -> None:
    """What ``module_switches`` reads; whatever else can be set is named here, and in ``docs/how-to/sharded.md``."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    from resilient_train.frameworks.torch.kept import module_switches

    group, state = inspect.getsource(FSDPParamGroup.__init__), inspect.getsource(FSDPState.__init__)
    for name in (*module_switches._OF_GROUP, module_switches._MESH):
        assert re.search(rf"self\.{name}\b.* = ", group), name
    for name in (*module_switches._OF_STATE, "_is_root", "_state_ctx"):
        assert re.search(rf"self\.{name}\b.* = ", state), name
    carried = (
        *(
            "gradient_divide_factor",
            "force_sum_reduction_for_comms",
            "is_last_backward",
            "modules_to_backward_prefetch",
        ),
        *("modules_to_forward_prefetch", "reduce_scatter_divide_factor", "reduce_scatter_unused_params"),
        *("requires_all_reduce", "requires_gradient_sync", "reshard_after_backward", "reshard_after_forward"),
        *("unshard_in_backward", "manual_backward_finalization"),
    )
    in_front_of_the_loop = (
        *("all_reduce_hook", "allocate_memory_from_process_group_for_comm", "custom_all_gather", "symm_mem_for_comm"),
        *("custom_reduce_scatter", "reduce_scatter_max_input_buffers", "separate_reduce_scatter_group"),
    )
    of_one_pass = ("post_optim_event",)
    of_memory_only = ("keep_unsharded_storage",)
    known = {f"set_{name}" for name in (*carried, *in_front_of_the_loop, *of_one_pass, *of_memory_only)}
    assert {name for name in vars(FSDPModule) if name.startswith("set_")} <= known


@pytest.mark.parametrize(("wanted", "ranks"), [("2", 2), ("gpu", 3)])
def test_torchruns_flags_are_read_without_asking_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str, ranks: int
) -> None:
    """To read them torch looks for GPUs. No fork of a process that has asked CUDA for one may use it."""
    from resilient_train.launch.cli.run import make_job

    me = os.getpid()

    def is_available() -> bool:
        assert os.getpid() != me
        return True

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: is_available() + 2)
    monkeypatch.setattr(torch.accelerator, "is_available", is_available)
    script = tmp_path / "train.py"
    script.touch()
    job = make_job(["--nproc-per-node", wanted, "--run-dir", str(tmp_path / "run"), str(script)])
    assert isinstance(job, JobSpec)
    assert job.world_size == ranks
    assert torch.cuda.is_available is torch.accelerator.is_available is is_available


def test_reading_torchruns_flags_leaves_no_directory_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun makes one under /tmp for its logs: after thousands of jobs, thousands of them."""
    from resilient_train.launch.cli.run import make_job

    for_temporaries = tmp_path / "tmp"
    for_temporaries.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(for_temporaries))
    script = tmp_path / "train.py"
    script.touch()
    for flags in (("--tee", "3", "--log-dir", str(tmp_path / "logs")), ("-r", "3"), ("--standalone",)):
        job = make_job([*flags, "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), str(script)])
        assert isinstance(job, JobSpec)
        assert job.log_dir == tmp_path / ("logs" if "--log-dir" in flags else "run/logs")
    assert not [*for_temporaries.iterdir()]


def test_who_counts_devices_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="--nproc-per-node gpus: Unsupported nproc_per_node value: gpus"):
        device_count.ranks_for("gpus")


def test_nobody_has_torch_abort_its_groups() -> None:
    """That would end the communicators of a job that is to go on; and of the default group it destroys them all."""
    sources = Path(resilient_train.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "_abort_process_group" in path.read_text()]


def test_loaders_that_keep_their_workers_say_so() -> None:
    """What ``frameworks/torch/data.workers`` reads: the first pass draws a seed for the workers, the others do not."""
    from torch.utils.data import DataLoader

    def draws(loader: DataLoader) -> bool:
        before = torch.get_rng_state()
        iter(loader)
        return not torch.equal(before, torch.get_rng_state())

    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    assert draws(loader)
    assert loader._iterator is not None
    assert not draws(loader)
    loader._iterator = None
    assert draws(loader)


def test_the_recorder_sees_gloo_by_the_names_of_our_groups() -> None:
    """What ``observe/collectives.py`` reads of an entry."""
    from datetime import timedelta

    from torch._C._distributed_c10d import _dump_fr_trace_json

    from resilient_train.frameworks.torch.communication.transports.gloo import stock_group
    from resilient_train.observe.collectives import report_of

    group = stock_group(dist.HashStore(), 0, 1, timedelta(seconds=10), "of mine", "generation 3")
    for _ in range(2):
        group.allreduce([torch.ones(3, 4, dtype=torch.int64)]).wait()
    content = report_of(_dump_fr_trace_json(), 0, 0)
    told = json.loads(content.splitlines()[0])["newest"]
    assert re.fullmatch(r"(in|past) all_reduce 2 of group of mine \(generation 3\), Long \[3, 4\]", told)
    newest = json.loads(content.splitlines()[1])
    assert {"retired", "state", "is_p2p", "p2p_seq_id", "output_sizes", "time_created_ns"} <= set(newest)


def test_the_recorder_is_not_hooked_into_groups_that_record() -> None:
    """From torch 2.15 on it would be, into ours, which have no place for it."""
    c10d = dist.distributed_c10d
    if hasattr(c10d, "FlightRecorderHook"):
        hooks = inspect.getsource(c10d._maybe_attach_flight_recorder)
        assert "in _FR_SELF_RECORDING_BACKENDS" in hooks
        assert {"resilient", "resilient_hccl"} <= c10d._FR_SELF_RECORDING_BACKENDS


def test_a_recorder_that_is_too_large_to_be_asked_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from resilient_train.errors import UsageError
    from resilient_train.frameworks.accelerator import Accelerator
    from resilient_train.frameworks.torch.groups import TorchGroups

    nobody: Accelerator = None  # type: ignore[assignment] # it has no part in this
    groups = TorchGroups(nobody)
    assert b'"version"' in groups.recorded()
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "20001")
    with pytest.raises(UsageError, match="keeps 20001 collectives"):
        groups.recorded()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20000")
    groups.recorded()


def test_a_sharded_model_has_what_is_asked_of_it() -> None:
    """What ``sharding/sharded.py`` asks; ``test_sharding_of_models.py`` and ``test_sharded_cut.py`` do it."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    assert callable(FSDPModule._get_fsdp_state)
    assert callable(FSDPModule.reset_iter_state)
    assert callable(FSDPModule.reshard)
    assert callable(FSDPParam.to_sharded)
    state = vars(FSDPState())
    assert {"_is_root", "_state_ctx", "_fsdp_param_groups"} <= state.keys()
    assert state["_training_state"] is type(state["_training_state"]).IDLE
    assert isinstance(FSDPParamGroup.is_sharded, property)
    assert {"_unsharded_param", "sharded_param"} <= FSDPParam.__annotations__.keys()
    if "unsharded_accumulated_grad" not in FSDPParam.__annotations__:  # torch 2.15, or later
        assert "return param.grad" in inspect.getsource(FSDPParam.unsharded_accumulated_grad.fget)
    assert "all_gather_work" in AllGatherResult._fields


def test_a_loaders_first_batch_is_the_next_workers_in_turn() -> None:
    """What ``data._InTurn`` sets; ``tests/pure/test_worker_numbers.py`` runs it."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    source = inspect.getsource(_MultiProcessingDataLoaderIter)
    assert source.count("self._worker_queue_idx_cycle = ") == 1
    assert "return _MultiProcessingDataLoaderIter(self)" in inspect.getsource(torch.utils.data.DataLoader._get_iterator)
