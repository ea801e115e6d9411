"""Order along a dim and running reductions, on every layout against one device."""

import pytest
import torch

from vescale_testkit import mesh_of, run_ranks

ORDERS = {
    "sort": lambda x: x.sort(),
    "sort_dim": lambda x: torch.sort(x, dim=0, descending=True, stable=True),
    "argsort": lambda x: x.argsort(0, descending=True),
    "msort": lambda x: torch.msort(x),
    "topk": lambda x: x.topk(2),
    "topk_smallest": lambda x: torch.topk(x, 1, dim=0, largest=False),
    "kthvalue": lambda x: x.kthvalue(2, 1, keepdim=True),
    "median": lambda x: x.median(),
    "median_dim": lambda x: x.median(0),
    "nanmedian": lambda x: torch.nanmedian(x, 1, keepdim=True),
    "mode": lambda x: x.round().mode(1)[0],
    "quantile": lambda x: x.quantile(0.3),
    "quantile_several": lambda x: torch.quantile(x, torch.tensor([0.1, 0.5]), dim=1, keepdim=True),
}
RUNNING = {
    "cumsum": lambda x: x.cumsum(1),
    "cumsum_dim": lambda x: torch.cumsum(x, 0, dtype=torch.float64),
    "cumprod": lambda x: x.cumprod(1),
    "cumprod_dim": lambda x: torch.cumprod(x, dim=0),
    "cumsum_int": lambda x: x.detach().round().int().cumsum(-1),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: torch.cummin(x, 0),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "diff": lambda x: x.diff(),
    "diff_twice": lambda x: torch.diff(x, 2, 1, prepend=x),
    "diff_dim": lambda x: x.diff(dim=0),
}


def check(functions, shapes, sizes):
    import warnings

    from vescale_dtensor._dispatch.fallback import FallbackWarning
    from vescale_testkit.oracle import compare, placements_for

    warnings.simplefilter("error", FallbackWarning)
    mesh = mesh_of(*sizes)
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
        for placements in placements_for(shape, mesh.ndim):
            for name, function in functions.items():
                try:
                    compare(function, [x], [placements], mesh, rtol=1e-5, atol=1e-5)
                except BaseException as error:
                    error.add_note(f"{name} of {list(shape)} on {placements}")
                    raise


@pytest.mark.parametrize("functions", [ORDERS, RUNNING], ids=["orders", "running"])
@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_every_layout(functions, sizes):
    shapes = [(5, 3)] if len(sizes) == 2 else [(5, 3), (2, 9)]
    run_ranks(4, check, functions, shapes, sizes)


def test_nested_and_interleaved_cuts():
    def body():
        from vescale_dtensor import InterleavedShard, Replicate, Shard
        from vescale_testkit.oracle import compare

        mesh = mesh_of(2, 2)
        x = torch.randn(3, 8).requires_grad_()
        grouped = InterleavedShard(1, 2)
        for placements in ((Shard(1), Shard(1)), (grouped, Shard(0)), (Replicate(), grouped)):
            for function in (
                lambda x: x.cumsum(1), lambda x: x.cumprod(1), lambda x: x.topk(2), lambda x: x.topk(2, largest=False),
                lambda x: x.sort(1), lambda x: x.diff(),
            ):  # fmt: skip
                compare(function, [x], [placements], mesh, rtol=1e-5, atol=1e-5)

    run_ranks(4, body)


def test_topk_of_equal_values_points_at_them():
    def body():
        from vescale_dtensor import Shard, distribute_tensor

        mesh = mesh_of(4)
        x = torch.randint(0, 3, (4, 30)).float()
        x[0] = float("-inf")
        x[1, 17] = float("nan")
        values, indices = distribute_tensor(x, mesh, [Shard(1)]).topk(5, 1)
        values, indices = values.full_tensor(), indices.full_tensor()
        torch.testing.assert_close(values, x.topk(5, 1)[0], equal_nan=True)
        torch.testing.assert_close(x.gather(1, indices), values, equal_nan=True)
        assert all(len(set(row.tolist())) == 5 for row in indices)

    run_ranks(4, body)


def test_in_place():
    def body():
        import warnings

        from vescale_dtensor import Replicate, Shard, distribute_tensor
        from vescale_dtensor._dispatch.fallback import FallbackWarning

        warnings.simplefilter("ignore", FallbackWarning)
        mesh = mesh_of(2, 2)
        x = torch.randn(5, 3)
        for placements in ((Shard(0), Replicate()), (Shard(1), Shard(0))):
            for dim in (0, 1):
                d = distribute_tensor(x, mesh, placements)
                assert d.cumsum_(dim) is d
                assert d.placements == placements
                torch.testing.assert_close(d.full_tensor(), x.cumsum(dim))

    run_ranks(4, body)


def test_no_communication_along_other_dims():
    def body():
        from vescale_dtensor import Partial, Shard
        from vescale_testkit.oracle import compare

        mesh = mesh_of(2, 2)
        x = torch.randn(6, 9).requires_grad_()
        for function in (ORDERS["sort"], ORDERS["topk"], RUNNING["cummax"], RUNNING["cumsum"]):
            assert not compare(function, [x], [(Shard(0), Shard(0))], mesh)
        assert not compare(lambda x: x.cumsum(1), [x], [(Partial(), Shard(0))], mesh, rtol=1e-5, atol=1e-5)
        events = compare(lambda x: x.sort(1), [x], [(Shard(1),)], mesh_of(4))  # some rows, not all of them
        assert [event.kind for event in events] == ["all_to_all"]

    run_ranks(4, body)
