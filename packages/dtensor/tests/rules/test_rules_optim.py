"""Optimizers, clipping and the gradient scaler on DTensor parameters, against one device."""

# ruff: noqa: B023  every function that closes over a loop variable runs within that turn of the loop

import warnings

import pytest
import torch
import torch.nn as nn

from vescale_dtensor import DTensor, FallbackWarning, Partial, Replicate, Shard, comm_trace, distribute_tensor
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import compare, spread

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SHAPES = {"w1": (6, 5), "b1": (5,), "w2": (5, 3), "scale": (), "w3": (3, 3)}
PLACEMENTS = {"w1": (R, S1), "b1": (R, S0), "w2": (R, S0), "scale": (R, R), "w3": (S0, S1)}

CASES = []
for _name, _options in {
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{}],
    "Adagrad": [{"weight_decay": 0.1}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adamax": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "Rprop": [{}],
    "ASGD": [{}],
    "Adafactor": [{}],
}.items():
    for _one in _options:
        CASES += [(_name, {**_one, "foreach": flag}) for flag in (False, True)]
        if _name in ("SGD", "Adam", "AdamW", "Adagrad"):
            CASES.append((_name, {**_one, "fused": True}))


def _data():
    generator = torch.Generator().manual_seed(1)
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    batches = [torch.randn(7, 6, generator=generator) for _ in range(5)]
    return parameters, batches


def _loss(p, x):
    y = torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]
    return ((y @ p["w3"]) * p["scale"]).square().mean()


def _train(parameters, batches, make, after_backward=None):
    optimizer = make(list(parameters.values()))
    losses = []
    for x in batches:

        def closure():
            optimizer.zero_grad()
            loss = _loss(parameters, x)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            losses.append(optimizer.step(closure))
            continue
        losses.append(closure())
        if after_backward is not None:
            after_backward(list(parameters.values()))
        optimizer.step()
    return losses, optimizer


def _both(make, mesh, placements=PLACEMENTS, after_backward=None, rtol=1e-5):
    values, batches = _data()
    one = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    many = {
        name: distribute_tensor(value.clone().requires_grad_(), mesh, placements[name])
        for name, value in values.items()
    }
    expected, _ = _train(one, batches, make, after_backward)
    actual, optimizer = _train(many, [distribute_tensor(x, mesh, (S0, R)) for x in batches], make, after_backward)
    torch.testing.assert_close(
        torch.stack([loss.detach().full_tensor() for loss in actual]), torch.stack(expected).detach(), rtol=rtol, atol=0
    )
    for name, parameter in many.items():
        assert type(parameter) is DTensor and parameter.placements == placements[name]
        torch.testing.assert_close(parameter.detach().full_tensor(), one[name].detach(), rtol=10 * rtol, atol=1e-6)
    return many, optimizer


@in_turns(3)
def test_every_optimizer_equals_one_device():
    def on_ranks():
        mesh = mesh_of(2, 2)
        failures = []
        for name, options in CASES:
            try:
                _both(lambda ps: getattr(torch.optim, name)(ps, lr=0.01, **options), mesh)
            except Exception as error:  # every failing optimizer is named
                failures.append(f"{name} {options}: {type(error).__name__} {error}")
        assert not failures, "\n".join(failures)

    run_ranks(4, on_ranks, timeout=120)


def test_optimizers_need_no_fallback():
    def on_ranks():
        with warnings.catch_warnings(action="error", category=FallbackWarning):
            for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam"):
                for foreach in (False, True):
                    _both(lambda ps: getattr(torch.optim, name)(ps, lr=0.01, foreach=foreach), mesh_of(2, 2))

    run_ranks(4, on_ranks)


def test_lbfgs_and_muon():
    def on_ranks():
        mesh = mesh_of(2, 2)
        _both(lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3), mesh, rtol=1e-4)

        def muon(ps):
            return torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.01)

        if hasattr(torch.optim, "Muon"):  # bfloat16 inside: sums in another order differ in its digits
            _both(muon, mesh, rtol=2e-2)

    run_ranks(4, on_ranks)


def test_states_lie_like_their_parameters():
    def on_ranks():
        mesh = mesh_of(2, 2)
        many, optimizer = _both(lambda ps: torch.optim.AdamW(ps, lr=0.01), mesh)
        for parameter in many.values():
            state = optimizer.state[parameter]
            for key in ("exp_avg", "exp_avg_sq"):
                assert state[key].placements == parameter.placements
                assert state[key].to_local().shape == parameter.to_local().shape

    run_ranks(4, on_ranks)


@pytest.mark.parametrize("foreach", [False, True, None])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf"), 3.0, 0.0])
def test_clip_grad_norm(foreach, norm):
    def on_ranks():
        mesh = mesh_of(2, 2)
        norms = []

        def clip(parameters):
            total = nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=norm, foreach=foreach)
            norms.append(total.full_tensor() if type(total) is DTensor else total)

        _both(lambda ps: torch.optim.SGD(ps, lr=0.1), mesh, after_backward=clip)
        half = len(norms) // 2
        torch.testing.assert_close(norms[:half], norms[half:], rtol=1e-5, atol=0)

    run_ranks(4, on_ranks)


def test_a_gradient_norm_is_one_reduction_and_the_same_however_gradients_are_cut():
    def on_ranks():
        mesh, generator = mesh_of(4), torch.Generator().manual_seed(0)
        whole = [torch.randn(16, 24, generator=generator) for _ in range(40)]
        norms = []
        for placement in (Replicate(), Shard(0), Shard(1)):
            parameters = [distribute_tensor(torch.zeros(16, 24), mesh, [placement]).requires_grad_() for _ in whole]
            for parameter, gradient in zip(parameters, whole):
                parameter.grad = distribute_tensor(gradient, mesh, [placement])
            each = [nn.utils.get_total_norm([parameter.grad]).full_tensor() for parameter in parameters]
            with comm_trace() as trace:
                total = nn.utils.clip_grad_norm_(parameters, 1.0)
            assert len(trace) == 1 or placement == Replicate(), trace
            norms.append([*each, total.full_tensor(), *(parameter.grad.full_tensor() for parameter in parameters)])
        for others in norms[1:]:
            assert all(map(torch.equal, norms[0], others))

    run_ranks(4, on_ranks)


@pytest.mark.parametrize("foreach", [False, True, None])
def test_clip_grad_value(foreach):
    def on_ranks():
        def clip(parameters):
            nn.utils.clip_grad_value_(parameters, 0.01, foreach=foreach)

        _both(lambda ps: torch.optim.SGD(ps, lr=0.1), mesh_of(2, 2), after_backward=clip)

    run_ranks(4, on_ranks)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_gradient_scaler(options):
    def on_ranks():
        mesh = mesh_of(2, 2)
        values, batches = _data()
        batches[2][6, 0] = float("inf")  # the last row: one rank's part alone overflows

        def train(parameters, batches):
            optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.01, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scales = []
            for x in batches:
                optimizer.zero_grad()
                scaler.scale(_loss(parameters, x)).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            return scales

        one = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        many = {n: distribute_tensor(v.clone().requires_grad_(), mesh, PLACEMENTS[n]) for n, v in values.items()}
        scales = train(one, batches)
        assert train(many, [distribute_tensor(x, mesh, (S0, R)) for x in batches]) == scales
        assert scales[2] < scales[1]
        for name in many:
            torch.testing.assert_close(many[name].detach().full_tensor(), one[name].detach(), rtol=1e-4, atol=1e-6)

    run_ranks(4, on_ranks)


@in_turns(3)
def test_foreach_functions_on_mixed_layouts():
    def on_ranks():
        mesh = mesh_of(2, 2)
        generator = torch.Generator().manual_seed(3)
        shapes = [(5, 3), (4,), (), (1, 6)]
        layouts = [
            [(S0, S1), (S0, R), (R, R), (R, S1)],
            [(P, R), (R, P), (P, P), (R, R)],
            [(S0, S0), (P, S0), (R, P), (S1, P)],
        ]
        unary = [n for n in dir(torch) if n.startswith("_foreach_")]
        binary = ["add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow"]
        ternary = ["addcmul", "addcdiv", "lerp"]
        for which, own in enumerate(layouts):
            other = layouts[(which + 1) % 3]
            third = layouts[(which + 2) % 3]
            for name in unary:
                base = name.removeprefix("_foreach_").removesuffix("_")
                if base in ("mm", "copy"):
                    continue
                function = getattr(torch, name)
                lists = 2 if base in binary else 3 if base in ternary else 1
                values = [[torch.rand(s, generator=generator) + 0.2 for s in shapes] for _ in range(lists)]
                many = [
                    [spread(v, mesh, p, seed=i) for i, (v, p) in enumerate(zip(vs, ps))]
                    for vs, ps in zip(values, [own, other, third])
                ]
                expected, actual = function(*values), function(*many)
                if name.endswith("_"):
                    expected, actual = values[0], many[0]
                    assert [t.placements for t in actual] == own
                for want, have in zip(expected, actual):
                    torch.testing.assert_close(
                        have.full_tensor(), want, rtol=1e-4, atol=1e-4, equal_nan=True, msg=f"{name} {which}"
                    )

    run_ranks(4, on_ranks)


def test_foreach_scalars_tensors_and_autograd():
    def on_ranks():
        mesh = mesh_of(2, 2)
        a, b = torch.rand(5, 3, requires_grad=True), torch.rand(4, requires_grad=True)
        scale = torch.tensor(0.5)
        for own in ([(S0, S1), (R, S0)], [(P, R), (S0, S0)], [(R, R), (R, R)]):
            for function in (
                lambda x, y, s: torch._foreach_mul([x, y], s),
                lambda x, y, s: torch._foreach_add([x, y], s, alpha=2),
                lambda x, y, s: torch._foreach_mul([x, y], [2.0, 3.0]),
                lambda x, y, s: torch._foreach_pow(2.0, [x, y]),
                lambda x, y, s: torch._foreach_addcmul([x, y], [x, y], [y[:3], y], [0.5, 2.0]),
                lambda x, y, s: torch._foreach_norm([x, y], 2),
                lambda x, y, s: torch._foreach_sub([x, y], 1.5),
            ):
                for place in ((R, R), None):
                    compare(function, [a, b, scale], [*own, place], mesh)

    run_ranks(4, on_ranks)


def test_one_reduction_for_all_norms_that_lie_alike():
    def on_ranks():
        from vescale_dtensor.debug import comm_trace

        mesh = mesh_of(2, 2)
        gradients = [distribute_tensor(torch.randn(6, 4), mesh, (S0, R)) for _ in range(5)]
        with comm_trace() as trace:
            norms = torch._foreach_norm(gradients)
        assert len(trace) == 1, trace
        assert len(norms) == 5

    run_ranks(4, on_ranks)


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_zeroed_in_place_accumulate_anew(foreach):
    def on_ranks():
        mesh = mesh_of(2, 2)

        def train(parameters, batches):
            optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.01, foreach=foreach)
            for x in batches:
                optimizer.zero_grad(set_to_none=False)
                for _ in range(2):
                    _loss(parameters, x).backward()
                optimizer.step()

        values, batches = _data()
        one = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        many = {n: distribute_tensor(v.clone().requires_grad_(), mesh, PLACEMENTS[n]) for n, v in values.items()}
        train(one, batches)
        train(many, [distribute_tensor(x, mesh, (S0, R)) for x in batches])
        for name in many:
            torch.testing.assert_close(many[name].detach().full_tensor(), one[name].detach(), rtol=1e-4, atol=1e-6)

    run_ranks(4, on_ranks)


def test_averaged_models_and_vectors_of_parameters():
    def on_ranks():
        mesh = mesh_of(2, 2)
        layer = nn.Linear(5, 3)
        expected = torch.optim.swa_utils.AveragedModel(
            layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        sharded = nn.Linear(5, 3)
        sharded.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, (R, S1)))
        sharded.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, (R, S0)))
        actual = torch.optim.swa_utils.AveragedModel(
            sharded, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for model, average in ((layer, expected), (sharded, actual)):
            for _ in range(3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)
                average.update_parameters(model)
        for want, have in zip(expected.module.parameters(), actual.module.parameters()):
            assert have.placements[1] in (S0, S1)
            torch.testing.assert_close(have.detach().full_tensor(), want.detach())
        vector = nn.utils.parameters_to_vector(sharded.parameters())
        torch.testing.assert_close(
            vector.detach().full_tensor(), nn.utils.parameters_to_vector(layer.parameters()).detach()
        )

    run_ranks(4, on_ranks)
