"""An audit of the GPU path found these, each with the tests that hold it: every one of them is there."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[4]
HERE = "packages/vescale/tests/second_device"
JOIN, SYNC = "packages/plans/tests/core/test_join.py", "packages/checkpoint/tests/test_sync.py"
CASES, ENGINE = f"{HERE}/test_second_device.py", f"{HERE}/test_second_device_engine.py"
FOUND = {
    "pipelines hang at their first call, tied weights and norms with them": [
        f"{CASES}::test_a_case_trains_as_on_one_device",
    ],
    "`reshard` joins tensors of two devices": [
        f"{ENGINE}::test_reshard_moves_what_lies_on_either",
    ],
    "`offload=True` tells host from device by addresses, and keeps a full-precision shard on the device": [
        f"{ENGINE}::test_offloaded_states_and_shards_lie_on_the_host",
    ],
    "Adagrad's states are made on the host": [
        f"{ENGINE}::test_offloaded_states_and_shards_lie_on_the_host",
        f"{CASES}::test_a_case_trains_as_on_one_device",
    ],
    "the README's loop fails under torchrun: nobody moves model or batch": [
        f"{ENGINE}::test_a_model_and_batches_of_the_host_train_on_the_device_without_waits",
        f"{JOIN}::test_the_world_has_a_backend_for_the_host_and_for_the_device",
        f"{JOIN}::test_without_torchrun_a_line_says_which_device_is_used",
    ],
    "a world joined without a backend gets a mesh on the host": [
        f"{HERE}/test_join.py::test_a_world_that_somebody_else_joined_trains_on_the_accelerator",
        f"{JOIN}::test_tensors_lie_where_the_world_has_a_backend_of_its_own",
    ],
    "a pipeline's waits block the host": [
        f"{CASES}::test_the_snapshot_holds_no_wait_of_our_own_but_those_that_are_meant",
        f"{HERE}/test_second_device_pipelines.py::test_ignored_labels_scales_and_norms_are_one_devices_without_waits",
    ],
    "a failure wakes nobody, nor does an exit": [
        f"{ENGINE}::test_a_failure_in_a_pipeline_wakes_who_waits_and_leaves_nothing_pending",
        f"{HERE}/test_exit.py::test_who_exits_with_something_pending_is_held_no_longer_than_a_collective",
        f"{HERE}/test_exit.py::test_who_raises_aborts_and_so_do_those_whom_it_leaves_waiting",
    ],
    "a checkpoint's coordination takes requests by the square of ranks": [
        f"{SYNC}::test_three_requests_per_rank_and_gather_at_4096_ranks",
        f"{SYNC}::test_three_requests_per_rank_and_beat_at_4096_ranks",
    ],
    "the reproducible mode does not look at the device's kernels": [
        f"{ENGINE}::test_the_reproducible_mode_asks_the_device_first",
    ],
    "dropout in attention gathers q, k and v": [
        f"{ENGINE}::test_attention_dropout_gathers_nothing_and_is_one_devices",
    ],
    "only the host's generator is restored and compared": [
        f"{ENGINE}::test_generators_are_taken_back",
        f"{ENGINE}::test_generators_of_the_device_are_compared",
        f"{CASES}::test_a_case_trains_as_on_one_device",
    ],
    "the host waits in steps of ZeRO, experts, dropout and clipping": [
        f"{CASES}::test_the_snapshot_holds_no_wait_of_our_own_but_those_that_are_meant",
        f"{ENGINE}::test_a_model_and_batches_of_the_host_train_on_the_device_without_waits",
    ],
}


@pytest.mark.parametrize("finding", FOUND)
def test_each_finding_is_held_by_tests_that_there_are(finding):
    assert FOUND[finding]
    for path, name in (one.split("::") for one in FOUND[finding]):
        tree = ast.parse((ROOT / path).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), f"{path}::{name}"
